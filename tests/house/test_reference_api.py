"The parameters of BertBlocks' training package are understood under their own names."

import importlib
import inspect

import pytest

REFERENCE = """
PretrainingModule: learning_rate weight_decay compile_model pretrained_tokenizer_name_or_path
    optimizer_class optimizer_quantized optimizer_kwargs scheduler_warmup_kind
    scheduler_warmup_steps scheduler_warmup_decay scheduler_training_kind
    scheduler_training_steps scheduler_training_decay scheduler_cooldown_kind
    scheduler_cooldown_steps scheduler_cooldown_decay objective gradient_checkpointing
    model_config_kwargs model_kwargs
FinetuningModule: task pretrained_model_name_or_path num_labels learning_rate weight_decay
    compile_model optimizer_class optimizer_kwargs optimizer_quantized scheduler_type
    scheduler_kwargs warmup_steps warmup_ratio gradient_checkpointing
PretrainingDataModule: train_dataset_name_or_path pretrained_tokenizer_name_or_path objective
    max_sequence_length val_dataset_name_or_path train_split val_split file_format text_column
    streaming shuffle num_shards train_batch_size val_batch_size num_workers collator_kwargs
    packing packing_pad_to_budget cache_dir data_kwargs
FinetuningDataModule: task pretrained_tokenizer_name_or_path dataset_name_or_path
    dataset_config_name max_sequence_length train_split val_split test_split text_column
    label_column train_batch_size val_batch_size test_batch_size num_workers shuffle_train
    collator_kwargs
Collator: pad_token_id mask_token_id vocab_size text_column label_column max_sequence_length
MaskedLanguageModelingCollator: pad_token_id mask_token_id vocab_size text_column
    max_sequence_length mlm_probability
EnhancedMaskedLanguageModelingCollator: pad_token_id mask_token_id vocab_size text_column
    label_column max_sequence_length
TokenClassificationCollator: pad_token_id mask_token_id vocab_size text_column label_column
    max_sequence_length
SequenceClassificationCollator: pad_token_id mask_token_id vocab_size text_column label_column
    max_sequence_length
QuestionAnsweringCollator: pad_token_id mask_token_id vocab_size text_column label_column
    context_column max_sequence_length doc_stride
MaskedDiffusionCollator: pad_token_id mask_token_id vocab_size text_column max_sequence_length
    num_steps sampling_eps noise_eps min_masked max_masked
get_collator_cls: objective
get_optimizer: optimizer_name params optimizer_kwargs quantized
InverseSqrtScheduler: optimizer cooldown_steps last_epoch
get_scheduler: optimizer warmup_kind warmup_steps warmup_decay training_kind training_steps
    training_decay cooldown_kind cooldown_steps cooldown_decay
optim.schedulers.get_single_scheduler: optimizer kind num_steps decay direction
finetuning.task.get_metrics_for_task: task num_labels
"""
TABLE = {
    name: parameters.split()
    for name, parameters in (
        entry.split(":") for entry in REFERENCE.strip().replace("\n    ", " ").split("\n")
    )
}


def parameters_of(path: str) -> set[str]:
    "Return the parameters of a function, or of a class and those that it forwards to its bases."
    module, _, name = path.rpartition(".")
    target = getattr(importlib.import_module(f"bertlab.{module}".rstrip(".")), name)
    functions = (
        [vars(cls)["__init__"] for cls in target.__mro__ if "__init__" in vars(cls)]
        if isinstance(target, type)
        else [target]
    )
    names = set(inspect.signature(target).parameters)
    for function in functions:
        parameters = inspect.signature(function).parameters
        names |= set(parameters)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            break  # it forwards nothing
    return names


@pytest.mark.parametrize("path", TABLE)
def test_a_reference_signature_is_understood(path):
    assert not {*TABLE[path]} - parameters_of(path)


def test_the_table_is_complete():
    assert len(TABLE) == 17 and sum(map(len, TABLE.values())) == 143
