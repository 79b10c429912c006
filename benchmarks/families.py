"""Which encoders of transformers can be used for what: 41 families, each as a small random model.

    python benchmarks/families.py [--only mpnet albert] [--uses onnx] [--quick]

Every cell of the table is tried: logits are compared with transformers' own, models are trained for
two steps, saved and loaded again. A cell that does not work holds the error's first line. The result,
benchmarks/results/families.json, is the table of nbs/guides/encoders.ipynb (scripts/sync.py).
"""

import argparse
import contextlib
import io
import json
import logging
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers.processors import TemplateProcessing
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from bertlab.data.module import PretrainingDataModule
from bertlab.data.tokenizers import train_tokenizer
from bertlab.embeddings.bi_encoder import BiEncoder
from bertlab.finetuning.data import FinetuningDataModule
from bertlab.finetuning.module import FinetuningModule
from bertlab.finetuning.predictions import load_predictor
from bertlab.finetuning.runs import finetune
from bertlab.model.huggingface import load_model, save_model
from bertlab.model.mask_filling import fill_masks
from bertlab.train.export import export_model
from bertlab.train.modules import PretrainingModule
from bertlab.train.trainer import make_trainer

WORDS = "the red apple is on a green tree near our old house and falls when wind blows".split()
TEXTS = [" ".join(WORDS[i % 9 : i % 9 + 3 + i % 5]) for i in range(64)]
# What a small model of the family needs beside SIZES, or in its place.
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 64, "max_position_embeddings": 66}  # fmt: skip
_WIDE = {"emb_dim": 32, "n_layers": 2, "n_heads": 2}
_SLIDING = {"attention_window": [8, 8]}
FAMILIES = {
    "albert": {"embedding_size": 16},
    "bert": {},
    "big_bird": {"attention_type": "original_full"},
    "camembert": {},
    "canine": {"num_hash_buckets": 64, "num_hash_functions": 4},
    "convbert": {"embedding_size": 32},
    "data2vec-text": {},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
                   "norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False},
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2},
    "electra": {"embedding_size": 16},
    "ernie": {},
    "esm": {"position_embedding_type": "rotary", "token_dropout": False},
    "eurobert": {},
    "flaubert": _WIDE,
    "fnet": {"tpu_short_seq_length": 32},
    "funnel": {"num_hidden_layers": None, "num_attention_heads": None, "d_model": 32, "block_sizes": [1, 1], "n_head": 2, "d_head": 16, "d_inner": 64},
    "gte": {},
    "ibert": {},
    "jina_embeddings_v3": {},
    "layoutlm": {},
    "longformer": _SLIDING,
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 16},
    "megatron-bert": {},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16, "num_feedforward_networks": 1},
    "modernbert": {"local_attention": 8},
    "mpnet": {},
    "mra": {"num_block_per_row": 2},
    "nomic_bert": {},
    "nystromformer": {"num_landmarks": 8, "segment_means_seq_len": 8},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 32},
    "roberta": {},
    "roberta-prelayernorm": {},
    "roc_bert": {},
    "roformer": {"embedding_size": 32},
    "squeezebert": {"embedding_size": 32},
    "xlm": _WIDE,
    "xlm-roberta": {},
    "xlm-roberta-xl": {},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "yoso": {},
}  # fmt: skip
UNIGRAM = {"albert", "camembert", "xlm-roberta", "xlm-roberta-xl", "xmod", "deberta-v2", "xlnet", "rembert"}  # fmt: skip
BYTES = {"roberta", "data2vec-text", "longformer", "luke", "ibert", "modernbert", "eurobert", "deberta"}  # fmt: skip
RESULTS = Path(__file__).parent / "results"
USES = {}  # by name, in the order of the table's columns


def use(function):
    USES[function.__name__.replace("_", " ")] = function
    return function


def make_tokenizer(family: str):
    kind = "unigram" if family in UNIGRAM else "bpe" if family in BYTES else "wordpiece"
    tokenizer = train_tokenizer(TEXTS, 300, kind=kind, model_max_length=64)
    if family == "fnet":  # whose tokenizers know no mask
        tokenizer.model_input_names = ["input_ids", "token_type_ids"]
    if family in ("roberta", "longformer"):  # two ends between the texts of a pair
        ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("[CLS]", "[SEP]")]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B [SEP]", special_tokens=ids
        )
    return tokenizer


def make_directory(family: str, tokenizer, directory: Path) -> None:
    "Write a random model with the head over the vocabulary, or without a head."
    torch.manual_seed(0)
    cls = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    ids = {name: getattr(tokenizer, name) for name in
           ("pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id")}  # fmt: skip
    ids |= {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
    settings = {**SIZES, **ids, "vocab_size": len(tokenizer), **FAMILIES[family]}
    config = cls(**{name: value for name, value in settings.items() if value is not None})
    name = MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(family)
    auto = transformers.AutoModel if name is None else transformers.AutoModelForMaskedLM
    model = auto.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def encoded(tokenizer):
    options = {"return_attention_mask": True, "return_token_type_ids": False}
    return tokenizer(TEXTS[:4], return_tensors="pt", padding=True, **options)


def largest_difference(got, want, mask=None) -> None:
    "Raise `AssertionError` unless two tensors agree to 1e-5 where there is text."
    got, want = (t if mask is None else t[mask.bool()] for t in (got, want))
    difference = float((got - want).detach().abs().max())
    assert difference <= 1e-5, f"differs from transformers by {difference:.1e}"


def fit(task: str, directory: Path, folder: Path, **options):
    "Train for two steps, save, load and predict."
    windows = {"doc_stride": 4} if task == "question_answering" else None
    data = FinetuningDataModule(task, make_or_load(directory), max_sequence_length=32,
                                train_batch_size=4, val_batch_size=4, test_batch_size=4,
                                collator_kwargs=windows)  # fmt: skip
    rows = [ROWS[task](i) for i in range(8)]
    data.set_datasets(rows, rows, rows)
    module = FinetuningModule(task, str(directory), learning_rate=1e-3, **options)
    run = finetune(
        module, data, folder / "run", num_epochs=1, precision="32-true", accelerator="cpu"
    )
    predictor = load_predictor(run.save_predictor(folder / "model"))
    rows = [*data.rows["test"]]
    scores = predictor.task.score(rows, predictor.predict_rows(rows).rows)
    for name, value in scores.items():
        assert abs(value - run.metrics[f"test_{name}"]) < 1e-5, f"{name} changes when it is saved"
    return run


ROWS = {
    "classification": lambda i: {"text": TEXTS[i], "label": "ab"[i % 2]},
    "token_classification": lambda i: {"words": TEXTS[i].split(),
                                       "labels": ["O" if len(w) > 2 else "B-X" for w in TEXTS[i].split()]},
    "question_answering": lambda i: {"question": "what is it", "context": TEXTS[i],
                                     "answers": {"text": [TEXTS[i].split()[1]],
                                                 "answer_start": [TEXTS[i].index(" ") + 1]}},
}  # fmt: skip


def make_or_load(directory: Path):
    from bertlab.data.tokenizers import load_tokenizer

    return load_tokenizer(directory)


@use
def fill_mask(directory: Path, folder: Path) -> None:
    tokenizer, loaded = make_or_load(directory), load_model(directory, "ForMaskedLM")
    reference = transformers.AutoModelForMaskedLM.from_pretrained(directory).eval()
    batch = encoded(tokenizer)
    with torch.no_grad():
        largest_difference(
            loaded.model(**batch).logits, reference(**batch).logits, batch["attention_mask"]
        )
    fill_masks(loaded.model, tokenizer, [f"the {tokenizer.mask_token} is on a tree", f"a {tokenizer.mask_token}"])  # fmt: skip


@use
def classification(directory: Path, folder: Path) -> None:
    fit("classification", directory, folder)


@use
def tokens(directory: Path, folder: Path) -> None:
    fit("token_classification", directory, folder)


@use
def answers(directory: Path, folder: Path) -> None:
    fit("question_answering", directory, folder)


@use
def embeddings(directory: Path, folder: Path) -> None:
    model = BiEncoder.load(directory)
    vectors = model.encode(TEXTS[:4])
    model.save(folder / "model")
    reference = transformers.AutoModel.from_pretrained(directory).eval()
    batch = encoded(model.tokenizer)
    with torch.no_grad():
        states = reference(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None]
    want = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
    largest_difference(torch.from_numpy(vectors), want)
    assert np.abs(BiEncoder.load(folder / "model").encode(TEXTS[:4]) - vectors).max() < 1e-5


@use
def lora(directory: Path, folder: Path) -> None:
    fit("classification", directory, folder, adapter="lora")


@use
def pretraining(directory: Path, folder: Path) -> None:
    tokenizer = make_or_load(directory)
    module = PretrainingModule(pretrained_model_name_or_path=str(directory), learning_rate=1e-3)
    data = PretrainingDataModule(None, tokenizer, max_sequence_length=32, train_batch_size=8,
                                 val_batch_size=8)  # fmt: skip
    data.set_datasets(TEXTS, TEXTS[:8])
    trainer = make_trainer(2, precision="32-true", accelerator="cpu")
    trainer.fit(module, data)
    save_model(module.model, tokenizer, folder / "model")
    reopened = transformers.AutoModelForMaskedLM.from_pretrained(folder / "model").eval()
    source = json.loads((directory / "config.json").read_text())["model_type"]
    assert reopened.config.model_type == source, f"is saved as {reopened.config.model_type}"
    batch, mask = encoded(tokenizer), encoded(tokenizer)["attention_mask"]
    with torch.no_grad():
        largest_difference(module.model.eval()(**batch).logits, reopened(**batch).logits, mask)


@use
def onnx(directory: Path, folder: Path) -> None:
    if load_model(directory).model.get_output_embeddings() is None:  # no head over words
        BiEncoder.load(directory).save(folder / "model")
        directory = folder / "model"
    export_model(directory, folder / "onnx", int8=False, texts=TEXTS[:8])  # compares


def reads_padding(directory: Path) -> bool:
    "Return whether the vectors of a text change with the padding behind it."
    model = load_model(directory, "Model").model
    batch = encoded(make_or_load(directory))
    lengths = batch["attention_mask"].sum(1)
    row, length = int(lengths.argmin()), int(lengths.min())
    alone = {name: values[row : row + 1, :length] for name, values in batch.items()}
    with torch.no_grad():
        padded, plain = (model(**b).last_hidden_state for b in (batch, alone))
    return float((padded[row, :length] - plain[0]).abs().max()) > 1e-3


def reason(directory: Path, error: Exception) -> str:
    "Say in one line why a use does not work."
    if isinstance(error, AssertionError) and reads_padding(directory):
        return "its vectors depend on the padding of a batch"
    text = one_line(error).replace(f"{directory.parent}/", "")
    return text.replace(f"'{directory.name}' is a {directory.name}, for which ", "")


def one_line(error: BaseException) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0].partition("\x1b")[0].strip()
    plain = isinstance(error, (ValueError, AssertionError))
    return text if plain else f"{type(error).__name__}: {text}"


def survey(family: str, uses: list[str]) -> dict[str, str]:  # column: "yes", or why not
    "Try every use of one family."
    row: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, family)
        try:
            make_directory(family, make_tokenizer(family), directory)
            row["rows"] = load_model(directory, "Model").padded_because or "packed"
        except Exception as error:
            if DEBUG:
                raise
            return {"rows": one_line(error)}
        for name in uses:
            target = Path(folder, name)
            target.mkdir()
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    USES[name](directory, target)
                row[name] = "yes"
            except Exception as error:
                if DEBUG:
                    raise
                row[name] = reason(directory, error)
    return row


DEBUG = False


def main() -> None:
    global DEBUG
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(FAMILIES), help="families")
    parser.add_argument("--uses", nargs="*", default=list(USES), help="columns")
    parser.add_argument("--quick", action="store_true", help="two families, and no ONNX file")
    parser.add_argument("--debug", action="store_true", help="raise the first error")
    parser.add_argument("--output", default=str(RESULTS / "families.json"))
    args = parser.parse_args()
    DEBUG = args.debug
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    names = ["bert", "mpnet"] if args.quick else args.only
    uses = [name for name in args.uses if not (args.quick and name == "onnx")]
    path = Path(args.output)
    table = json.loads(path.read_text()) if path.exists() else {}  # of an earlier run, kept
    for family in names:
        table[family] = table.get(family, {}) | survey(family, uses)
        print(family, json.dumps(table[family]), flush=True)
        path.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
