"""Masked batches per second, beside transformers' DataCollatorForLanguageModeling.

    python benchmarks/collators.py [--output FILE]

Both get the same packed rows of 512 tokens. bertlab hides single tokens by coins or up to a budget,
whole words, spans, or as masked diffusion does. transformers hides single tokens by coins, and is
timed three times: with rows as lists, as a cached dataset gives them; with tensors; and with tensors
that bring their special_tokens_mask, which is all that it can be spared. Medians over repeats that
take turns; `speedup` is against the fastest of the three.
"""

import argparse
import statistics
import time

import numpy as np
import torch
from sides import machine, write_result
from tokenizers import Tokenizer, models
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

import bertlab
from bertlab.data.collators import MaskedDiffusionCollator, MaskedLanguageModelingCollator
from bertlab.data.packing import PackedDataset

LENGTH, BATCH, VOCABULARY, PROBABILITY = 512, 32, 8192, 0.3


def build_tokenizer() -> PreTrainedTokenizerFast:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    # Every third piece goes on with a word, so that words have one to several tokens.
    names += [f"##piece{i}" if i % 3 == 0 else f"word{i}" for i in range(VOCABULARY - len(names))]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "[UNK]"))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def build_rows() -> list[dict]:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(134) - 0.5, 1.0, 600).astype(int) + 1
    documents = [rng.integers(5, VOCABULARY, length) for length in lengths]
    dataset = PackedDataset(documents, LENGTH, pad_token_id=0, cls_token_id=2, sep_token_id=3)
    return [dataset[index] for index in range(BATCH)]


def time_calls(function, rows, num_calls: int) -> float:  # seconds a call
    start = time.perf_counter()
    for _ in range(num_calls):
        function([dict(row) for row in rows])
    return (time.perf_counter() - start) / num_calls


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", help="write the figures to this JSON file")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer, rows = build_tokenizer(), build_rows()
    theirs = DataCollatorForLanguageModeling(tokenizer, mlm_probability=PROBABILITY)
    names = "input_ids", "attention_mask"
    lists = [{name: row[name].tolist() for name in names} for row in rows]
    tensors = [{name: torch.from_numpy(row[name]) for name in names} for row in rows]
    spared = [{**row, "special_tokens_mask": (row["input_ids"] < 5).long()} for row in tensors]
    ways = [
        ("bernoulli", "token"),
        ("exact", "token"),
        ("bernoulli", "word"),
        ("exact", "word"),
        ("exact", "span"),
    ]
    ours = {
        f"bertlab, {unit}, {selection}": (
            MaskedLanguageModelingCollator.from_tokenizer(
                tokenizer, mlm_probability=PROBABILITY, selection=selection, unit=unit
            ),
            rows,
            20,
        )
        for selection, unit in ways
    }
    ours["bertlab, diffusion"] = MaskedDiffusionCollator.from_tokenizer(tokenizer), rows, 20
    cases = {
        **ours,
        "transformers, tensors and special_tokens_mask": (theirs, spared, 3),
        "transformers, tensors": (theirs, tensors, 3),
        "transformers, lists": (theirs, lists, 3),
    }
    seconds = {name: [] for name in cases}
    for _ in range(options.repeats):
        for name, (function, inputs, num_calls) in cases.items():
            seconds[name].append(time_calls(function, inputs, num_calls))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    fastest = min(median for name, median in medians.items() if name.startswith("transformers"))
    result = {
        name: {
            "tokens_per_second": round(BATCH * LENGTH / median),
            "milliseconds_per_batch": round(median * 1e3, 3),
            "speedup": round(fastest / median, 2),
        }
        for name, median in medians.items()
    }
    for name, figures in result.items():
        print(
            f"{name:48}{figures['milliseconds_per_batch']:9.2f} ms a batch"
            f"{figures['tokens_per_second']:12,} tokens/s  {figures['speedup']:6.1f} x"
        )
    write_result(options.output, {
        "bertlab": bertlab.__version__, "machine": machine(1), "numpy": np.__version__,
        "rows": BATCH, "positions": LENGTH, "vocabulary": VOCABULARY, "share": PROBABILITY,
        "repeats": options.repeats, "median": result,
    })  # fmt: skip


if __name__ == "__main__":
    main()
