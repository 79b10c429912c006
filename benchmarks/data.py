"""Delivery of packed, masked batches from a tokenized cache, beside a padded loader.

    python benchmarks/data.py [--output FILE]

Documents of log-normal length (mean 134) lie in a token file, which is mapped. Each case delivers
batches of 32 rows of 512 positions: by this process, by one worker, by transformers' collator on
padded rows, and from a stream. Real tokens count, padding does not. Medians over repeats that take
turns. Then the memory that a stream adds while a corpus, and one four times as large, passes.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from sides import machine, write_result
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

import bertlab
from bertlab.data.module import PretrainingDataModule

LENGTH, BATCH, VOCABULARY, PROBABILITY = 512, 32, 8192, 0.3


def build_tokenizer() -> PreTrainedTokenizerFast:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    names += [f"word{i}" for i in range(VOCABULARY - len(names))]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def write_corpus(path: Path, num_documents: int) -> None:
    rng = np.random.default_rng(0)
    with open(path, "w", encoding="utf-8") as file:
        for length in rng.lognormal(np.log(134) - 0.5, 1.0, num_documents).astype(int) + 1:
            file.write(" ".join(f"word{i}" for i in rng.integers(0, 8000, length)) + "\n")


def make_module(path: Path, tokenizer, **options) -> PretrainingDataModule:
    data = PretrainingDataModule(
        str(path), tokenizer, max_sequence_length=LENGTH, train_batch_size=BATCH,
        collator_kwargs={"mlm_probability": PROBABILITY}, **options)  # fmt: skip
    data.prepare_data()
    data.setup()
    return data


def padded_loader(data: PretrainingDataModule, tokenizer, num_workers: int) -> DataLoader:
    "What is usual: a document a row, cut at the row's length, padded to the longest of its batch."
    documents = data.train_dataset.documents
    rows = [
        {"input_ids": [2, *documents[n][: LENGTH - 2].tolist(), 3]} for n in range(len(documents))
    ]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=PROBABILITY)
    return DataLoader(rows, BATCH, shuffle=True, collate_fn=collator, num_workers=num_workers)


def tokens_per_second(batches, num_batches: int) -> float:
    next(batches)  # starts workers, plans the epoch
    tokens, start = 0, time.perf_counter()
    for _ in range(num_batches):
        tokens += int((next(batches)["attention_mask"] > 0).sum())
    return tokens / (time.perf_counter() - start)


def stream_memory(path: str, num_documents: int) -> float:  # MB at the peak, above the start
    "Read a whole corpus as a stream, in this process."
    data = PretrainingDataModule(path, build_tokenizer(), max_sequence_length=LENGTH,
                                 train_batch_size=BATCH, streaming=True)  # fmt: skip
    data.setup()
    batches = iter(data.train_dataloader())
    for _ in range(20):
        next(batches)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(num_documents * 134 // (LENGTH * BATCH) - 20):
        next(batches)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", help="write the figures to this JSON file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--documents", type=int, default=8000)
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)  # path, documents
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        print(stream_memory(options.memory_of[0], int(options.memory_of[1])))
        return
    tokenizer, place = build_tokenizer(), machine(threads=1)
    with tempfile.TemporaryDirectory() as folder:
        path, larger = Path(folder, "text.txt"), Path(folder, "larger.txt")
        write_corpus(path, options.documents)
        cached = {"cache_dir": Path(folder, "cache")}
        data = make_module(path, tokenizer, **cached)
        cases = {
            "packed, in this process": lambda: data.train_dataloader(),
            "packed, one worker": lambda: make_module(
                path, tokenizer, num_workers=1, **cached
            ).train_dataloader(),
            "padded, transformers, in this process": lambda: padded_loader(data, tokenizer, 0),
            "padded, transformers, one worker": lambda: padded_loader(data, tokenizer, 1),
            "streamed and tokenized, in this process": lambda: make_module(
                path, tokenizer, streaming=True
            ).train_dataloader(),
        }
        rates = {name: [] for name in cases}
        for _ in range(options.repeats):
            for name, make in cases.items():
                rates[name].append(tokens_per_second(iter(make()), 15))
        result = {
            name: {"tokens_per_second": round(statistics.median(r))} for name, r in rates.items()
        }
        for name, figures in result.items():
            print(f"{name:44}{figures['tokens_per_second']:12,} tokens/s")
        write_corpus(larger, 4 * options.documents)
        for name, size in ((path, options.documents), (larger, 4 * options.documents)):
            command = [sys.executable, __file__, "--memory-of", str(name), str(size)]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            megabytes = round(float(shown.split()[-1]), 1)
            result[f"stream of {size} documents"] = {"memory_added_MB": megabytes}
            print(f"stream of {size:,} documents: {megabytes} MB added after its first 20 batches")
    if options.output:
        write_result(options.output, {"what": __doc__.splitlines()[0], "bertlab": bertlab.__version__,
                                      "machine": place, "figures": result})  # fmt: skip


if __name__ == "__main__":
    main()
