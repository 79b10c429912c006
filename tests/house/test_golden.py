"""Hashes of what must stay equal to the bit while the code around it changes: rows, masks, vocabularies, losses.

A hash that differs says that a run of an earlier version is no longer the same run. Where that is meant, write them anew:
    python tests/house/test_golden.py
All calls to the package are in the first functions. What depends on Python's own documentation is compared on the
Python that wrote the file alone; losses only with its torch on the same kind of CPU.
"""

import csv
import hashlib
import json
import os
import platform
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

GOLDEN = Path(__file__).with_name("golden.json")
SPECIAL = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
MASK, VOCAB = 3, 1000


def packed(documents, length, **options):
    from bertlab.data.packing import PackedDataset

    return PackedDataset(documents, length, seed=7, **SPECIAL, **options)


def padded(documents, length):
    return packed(documents, length, packing=False)


def in_blocks(documents, length):
    return packed(documents, length)  # of more documents than a block holds


def strided(documents, length, stride):
    return packed(documents, length, stride=stride)


def collator(objective, **options):
    from bertlab.data.collators import get_collator_cls

    special = {"pad_token_id": 0, "mask_token_id": MASK, "special_token_ids": (1, 2, 4)}
    return get_collator_cls(objective)(vocab_size=VOCAB, seed=5, **special, **options)


def embedded_texts():
    from bertlab.data.corpus import embedded_corpus

    corpus = embedded_corpus()
    return corpus.train_texts, corpus.validation_texts


def wordpiece(texts, size):
    from bertlab.data.tokenizers import train_tokenizer

    return train_tokenizer(texts, vocab_size=size).get_vocab()


DEMO = (
    "--steps 50 --hidden-size 64 --num-hidden-layers 2 --vocab-size 600 --max-sequence-length 64 "
    "--batch-size 16 --precision 32-true --max-documents 2000"
)
DROPOUT = (
    "--run.recipe reference --trainer.max_steps 50 --trainer.precision 32-true --run.vocab_size 600 "
    "--model.compile_model false --model.learning_rate 0.002 --data.max_sequence_length 64 "
    "--data.train_batch_size 16 --data.val_batch_size 16 --data.data_kwargs.max_documents 2000 "
    "--model.model_config_kwargs.hidden_size 64 --model.model_config_kwargs.num_hidden_layers 2 "
    "--model.model_config_kwargs.num_attention_heads 1 --model.model_config_kwargs.hidden_dropout 0.1 "
    "--model.model_config_kwargs.intermediate_size 128 --model.model_config_kwargs.attention_dropout 0.1"
)


def losses(command, directory):
    "Of each step of a command that trains, on one thread."
    words = {
        "demo": ["demo", *DEMO.split(), "--output"],
        "pretrain with dropout": ["pretrain", *DROPOUT.split(), "--run.output"],
    }[command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-m", "bertlab.cli", *words, str(directory / "run")],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    with open(directory / "run" / "history.csv", newline="") as file:
        return [row["train_loss"] for row in csv.DictReader(file)]


def hash_arrays(arrays):
    digest = hashlib.sha256()
    for array in arrays:
        array = np.asarray(array)
        dtype = np.float32 if array.dtype.kind == "f" else np.int64
        digest.update(f"{array.shape}".encode() + np.ascontiguousarray(array, dtype).tobytes())
    return digest.hexdigest()


def hash_texts(*parts):
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def written_documents(count, longest, seed=0):
    "Documents of 0 to `longest` ids, most of them short."
    rng = np.random.default_rng(seed)
    lengths = (rng.random(count) ** 3 * (longest + 1)).astype(int)
    return [rng.integers(5, VOCAB, length).tolist() for length in lengths]


def written_texts(count=400, seed=1):
    "Texts of made-up words, in which some syllables are frequent."
    rng = np.random.default_rng(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiouäé"]
    word = lambda: "".join(
        syllables[int(len(syllables) * rng.random() ** 3)] for _ in range(rng.integers(1, 5))
    )
    return [" ".join(word() for _ in range(rng.integers(3, 60))) + "." for _ in range(count)]


def hash_rows(dataset):
    "Three epochs, row after row."
    names = "input_ids", "attention_mask"
    rows = (dataset[epoch, index] for epoch in range(3) for index in range(len(dataset)))
    return hash_arrays(row[name] for row in rows for name in names)


def hash_batches(objective, **options):
    "Batches of packed rows, with documents of several lengths."
    rows, collate = packed(written_documents(300, 90), 128), collator(objective, **options)
    batches = [collate([rows[2, i] for i in range(start, start + 16)]) for start in (0, 16, 32)]
    names = [name for name in ("input_ids", "labels", "loss_weights") if name in batches[0]]
    return hash_arrays(batch[name].numpy() for batch in batches for name in names)


WORDS = {"continues_word": [i > 4 and i % 3 == 0 for i in range(VOCAB)]}
ROWS = {
    "rows of 128": lambda: hash_rows(packed(written_documents(2000, 300), 128)),
    "rows of 512": lambda: hash_rows(packed(written_documents(2000, 900), 512)),
    "rows of 128 in one order": lambda: hash_rows(
        packed(written_documents(2000, 300), 128, shuffle=False)
    ),
    "rows of 128 with a stride of 16": lambda: hash_rows(
        strided(written_documents(1000, 600), 128, 16)
    ),
    "padded rows of 128": lambda: hash_rows(padded(written_documents(1000, 300), 128)),
    "rows of 512 from three blocks": lambda: hash_rows(
        in_blocks(written_documents(140_000, 12), 512)
    ),
}
BATCHES = {
    f"{unit}, {selection}": lambda unit=unit, selection=selection: hash_batches(
        "mlm", unit=unit, selection=selection, **({} if unit == "token" else WORDS)
    )
    for unit in ("token", "word", "span")
    for selection in ("bernoulli", "exact")
    if (unit, selection) != ("span", "bernoulli")  # spans are drawn until a budget is spent
}
BATCHES |= {
    "promised labels": lambda: hash_batches("mlm", min_labels_per_document=2, selection="exact"),
    "few labels": lambda: hash_batches("mlm", max_predictions=16),
    "diffusion": lambda: hash_batches("diffusion"),
    "diffusion, cosine": lambda: hash_batches("diffusion", schedule="cosine", min_masked=1),
    "diffusion, few labels": lambda: hash_batches("diffusion", max_predictions=24),
}
TOKENIZERS = {
    "WordPiece of 500": lambda: hash_texts(sorted(wordpiece(written_texts(), 500).items()))
}
PYTHON = {
    "embedded corpus": lambda: hash_texts(*embedded_texts()),
    "WordPiece of 2,000 on the embedded corpus": lambda: hash_texts(
        sorted(wordpiece(embedded_texts()[0], 2000).items())
    ),
}
ANYWHERE = ROWS | BATCHES | TOKENIZERS
LOSSES = ("demo", "pretrain with dropout")


def here():
    "What the hashes of texts and the losses depend on."
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


@lru_cache
def golden():
    return json.loads(GOLDEN.read_text())


def skip_unless_same(*names):
    there, now = golden()["written with"], here()
    if changed := [f"{name} {there[name]}" for name in names if there[name] != now[name]]:
        pytest.skip(f"written with {', '.join(changed)}; here: {now}")


@pytest.mark.parametrize("name", ANYWHERE)
def test_rows_batches_and_vocabularies_are_unchanged(name):
    assert ANYWHERE[name]() == golden()["hashes"][name]


@pytest.mark.parametrize("name", PYTHON)
def test_the_embedded_corpus_is_unchanged(name):
    skip_unless_same("python")
    assert PYTHON[name]() == golden()["hashes"][name]


@pytest.mark.slow
@pytest.mark.parametrize("command", LOSSES)
def test_losses_are_unchanged(command, tmp_path):
    skip_unless_same("python", "torch", "cpu")
    assert losses(command, tmp_path) == golden()["losses"][command]


def write():
    import tempfile

    hashes = {name: make() for name, make in (ANYWHERE | PYTHON).items()}
    runs = {}
    for command in LOSSES:
        with tempfile.TemporaryDirectory() as directory:
            runs[command] = losses(command, Path(directory))
    content = {"written with": here(), "hashes": hashes, "losses": runs}
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    write()
