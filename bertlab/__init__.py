"Train BERT-style encoders. Public names load on first use, so that `import bertlab` costs almost nothing."

import logging as _logging
import os as _os

__version__ = "0.1.0"

# OpenMP's threads spin while they wait; on a busy machine that takes time from the very thread they wait for:
# beside one other program a training step took twice as long (benchmarks/NOTES.md). Alone on
# the machine it costs three hundredths. It is read when torch is imported, so `import bertlab` goes first.
_os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# peft imports bitsandbytes, which warns on every machine without a kernel that bertlab never calls.
_logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(_logging.ERROR)
# Colab has CUDA's compiler without a GPU too, of which torch warns when a product of matrices is timed.
_logging.getLogger("torch.utils.cpp_extension").setLevel(_logging.ERROR)

# The public face, by chapter: what a user comes for. Everything else is reached by its chapter,
# for example `bertlab.data.packing.best_fit_decreasing`. `__init__.pyi` is written from this list by `make sync`,
# so that editors and type checkers know the names too.
_FACE = {
    # core: files, durations, names, devices and plots
    "core.devices": "Device describe_device find_devices",
    "core.durations": "Duration",
    "core.files": "atomic_write",
    "core.plots": "new_axes plot_loss",
    # data: from a text on disk to a masked batch
    "data.corpus": "Corpus embedded_corpus load_corpus",
    "data.tokenizers": "load_tokenizer train_tokenizer",
    "data.masking": "MaskingConfig",
    "data.diffusion": "DiffusionConfig",
    "data.rows": "Collator Vocabulary",
    "data.supervised": "QuestionAnsweringCollator SequenceClassificationCollator TokenClassificationCollator",
    "data.collators": """
        EnhancedMaskedLanguageModelingCollator MaskedDiffusionCollator MaskedLanguageModelingCollator
        get_collator_cls""",
    "data.tokens": "TokenizedDocuments load_tokens tokenize_documents",
    "data.packing": "PackedDataset",
    "data.mixing": "MixedDataset",
    "data.streaming": "PackedStream",
    "data.module": "PretrainingDataConfig PretrainingDataModule",
    "data.plain_models": "PlainModelCollator",
    "data.tokenizer_measures": "compare_tokenizers",
    "data.tokenize": "tokenize_dataset",
    # model: from token ids to a loss, one document at a time
    "model.config": """
        BertLabConfig bert_base bert_large bert_tiny modernbert_base modernbert_large modernbert_tiny neobert
        roberta_base""",
    "model.layers": "register_layer",
    "model.attention": "document_mask",
    "model.encoder": "BertLabModel",
    "model.losses": "LossConfig bits_per_byte masked_lm_loss perplexity unigram_entropy",
    "model.heads": "BertLabForEnhancedMaskedLM BertLabForMaskedDiffusion BertLabForMaskedLM",
    "model.task_heads": """
        BertLabForQuestionAnswering BertLabForSequenceClassification BertLabForTokenClassification""",
    "model.huggingface": "from_huggingface load_model save_model to_huggingface",
    "model.mask_filling": "fill_mask",
    "model.growth": "grow",
    "model.float8": "convert_to_float8",
    "model.vocabulary": "extend_vocabulary transplant_vocabulary trim_vocabulary",
    "model.adapters": "add_adapter",
    "model.context": "extend_context",
    "model.sampling": "SamplingConfig",
    "model.generation": "generate",
    # optim: how each weight is updated, and when
    "optim.schedulers": "InverseSqrtScheduler Schedule get_scheduler",
    "optim.budgets": "BatchSizeWarmup TimeBudgetLR",
    "optim.groups": "parameter_groups",
    "optim.optimizers": "get_optimizer",
    # train: a training loop that survives interruptions
    "train.steps": "TrainingModule",
    "train.config": "PretrainingConfig",
    "train.modules": "PretrainingModule",
    "train.history": "History",
    "train.parallel": "FullyShardedStrategy get_strategy",
    "train.resume": "latest_checkpoint",
    "train.checkpoints": "TrainingCheckpoint",
    "train.batch_size": "BatchSizeScheduler",
    "train.stopping": "NonFiniteGuard SpikeGuard TimeLimit",
    "train.monitors": "MemoryMonitor Throughput",
    "train.histograms": "WeightHistograms",
    "train.previews": "DiffusionPreview FillMaskPreview",
    "train.reports": "RunReport",
    "train.trainer": "make_trainer seed_everything",
    "train.distill": "DistillationModule",
    "train.model_cards": "push_model",
    "train.run": "Run build_pretraining",
    "train.stages": "run_stages",
    "train.evaluators": "Evaluator LossEvaluator",
    "train.averages": "EMA",
    "train.estimate": "estimate_memory",
    "train.export": "OnnxModel",
    # finetuning: from a checkpoint and labels to a score with its baselines
    "finetuning.data": "FinetuningDataModule",
    "finetuning.module": "FinetuningModule",
    "finetuning.runs": "finetune",
    "finetuning.predictions": "Predictor load_predictor",
    "finetuning.task": "Task get_task",
    "finetuning.builtin": "BuiltinDataset load_builtin_dataset",
    # embeddings: one text, one vector, and search
    "embeddings.losses": "ContrastiveLoss",
    "embeddings.bi_encoder": "BiEncoder Reranker",
    "embeddings.pairs": "EmbeddingDataModule",
    "embeddings.module": "EmbeddingModule",
    "embeddings.search": "TextIndex",
    # explorers: interactive views of data, models and runs
    "explorers.widgets": "mask_dial",
    "explorers.packing": "document_mask_viewer packing_visualiser",
    "explorers.schedules": "design_schedule rate_designer",
    "explorers.optimizers": "optimizer_race",
    "explorers.models": "attention_browser embedding_map",
    "explorers.training_monitor": "TrainingMonitor",
    "explorers.stepper": "stepper",
    "explorers.profiling": "profile_step",
    "explorers.text_map": "text_map",
    # cli: every command as a plain function
    "cli.demo": "DemoConfig run_demo",
}
_CHAPTERS = ("core", "data", "model", "optim", "train", "finetuning", "embeddings", "explorers", "cli")
_PLACES = {name: module for module, names in _FACE.items() for name in names.split()}

__all__ = ["__version__", *_CHAPTERS, *_PLACES]


def _lazy_parts(chapter: str, names: tuple[str, ...]):
    "`__getattr__` and `__dir__` of a chapter, whose parts are imported when somebody asks for them."
    from importlib import import_module

    def __getattr__(name: str):
        if name in names:
            return import_module(f"{chapter}.{name}")
        raise AttributeError(f"module {chapter!r} has no part {name!r}; it has {', '.join(names)}")

    return __getattr__, lambda: sorted(names)


def __getattr__(name: str):
    "Import a chapter, or the module that defines a public name, when somebody asks for it (PEP 562)."
    from importlib import import_module

    if name in _CHAPTERS:
        return import_module(f"bertlab.{name}")
    if name in _PLACES:
        found = getattr(import_module(f"bertlab.{_PLACES[name]}"), name)
        _add_parameters(found, _PLACES[name], name)
        return found
    from difflib import get_close_matches

    near = get_close_matches(name, __all__, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise AttributeError(f"module 'bertlab' has no attribute {name!r}{hint}")


def _add_parameters(found, module: str, name: str) -> None:
    "Let `help()` show the comments of the parameters, which Python itself does not keep."
    if f"{module}.{name}" in _TOLD or not isinstance(found.__doc__, str):
        return
    _TOLD.add(f"{module}.{name}")
    import inspect

    from bertlab.core.names import parameter_comments

    comments = parameter_comments(found)
    lines = []
    for parameter in inspect.signature(found).parameters.values():
        comment = comments.get(parameter.name)
        lines.append(f"{parameter}" + f"\n    {comment}" * bool(comment))
    if lines:
        found.__doc__ = "\n\n".join([found.__doc__.rstrip(), "Parameters:", *lines])


_TOLD: set[str] = set()  # whose docstring is complete


def __dir__() -> list[str]:
    return sorted(__all__)
