"""Data beside `datasets.map` and transformers' collators: tokenize, pack, mask, deliver.

    python benchmarks/delivery.py [--documents N] [--batches 400]

The embedded corpus goes through both pipelines in fresh processes of one thread that take turns. The
stages: text to token ids; ids to rows; rows to masked batches (the collator alone); and shuffled masked
batches from the loader, which training waits for in every step. Real tokens count, padding does not.
"""

import json
import time
from collections.abc import Callable, Iterable
from itertools import islice

from pretraining import FORMS, LENGTH, PROBABILITY, grouped_rows, load_text, their_tokens
from sides import Ledger, alternate, common_parser, machine, ratios, spreads, write_result

import bertlab
from bertlab.core.plots import BLUE, GREY, ORANGE, new_axes

VOCABULARY, ROWS = 30_522, 32
STAGES = {
    "tokenize": "text to ids",
    "pack": "ids to rows",
    "mask": "rows to batches",
    "deliver": "loader: rows to batches",
}


def timed(make: Callable, count: Callable) -> tuple[float, object]:
    "Return tokens per second of `make`, and its result."
    start = time.perf_counter()
    result = make()
    seconds = time.perf_counter() - start
    return count(result) / seconds, result


def rate_of(batches: Iterable[dict]) -> float:
    "Return the real tokens per second of batches that are read and dropped, as in training."
    start = time.perf_counter()
    tokens = sum(int((batch["attention_mask"] > 0).sum()) for batch in batches)
    return tokens / (time.perf_counter() - start)


def forever(loader: Iterable) -> Iterable[dict]:
    "Yield epoch after epoch without the first batch, before which an epoch is planned."
    batches = (batch for _ in range(10**6) for batch in loader)
    next(batches)
    return batches


def our_stages(case: dict, corpus, tokenizer) -> dict[str, float]:
    "Time what PretrainingDataModule does, stage by stage."
    from torch.utils.data import DataLoader

    from bertlab.data.collators import MaskedLanguageModelingCollator
    from bertlab.data.packing import PackedDataset, special_token_ids

    encode = lambda: tokenizer(corpus.train_texts, add_special_tokens=False)["input_ids"]
    tokenize, documents = timed(encode, lambda rows: sum(map(len, rows)))

    def pack() -> tuple:
        dataset = PackedDataset(documents, LENGTH, **special_token_ids(tokenizer))
        starts = range(0, len(dataset) - ROWS, ROWS)
        return dataset, [dataset.__getitems__(list(range(n, n + ROWS))) for n in starts]

    real = lambda rows: int((rows["attention_mask"] > 0).sum())
    count = lambda packed: sum(real(row) for block in packed[1] for row in block)
    rate, (dataset, blocks) = timed(pack, count)
    collator = MaskedLanguageModelingCollator.from_tokenizer(
        tokenizer, max_sequence_length=LENGTH, mlm_probability=PROBABILITY
    )
    mask = rate_of(map(collator, blocks[: case["batches"]]))
    loader = DataLoader(dataset, ROWS, shuffle=True, collate_fn=collator, drop_last=True)
    deliver = rate_of(islice(forever(loader), case["batches"]))
    return {"tokenize": tokenize, "pack": rate, "mask": mask, "deliver": deliver}


def their_stages(case: dict, corpus, tokenizer) -> dict[str, float]:
    "Time run_mlm.py's maps, and the collator and loader of transformers' Trainer."
    from torch.utils.data import DataLoader
    from transformers import DataCollatorForLanguageModeling

    ids = lambda rows: sum(map(len, rows["input_ids"]))
    rates = {}
    tokenize = lambda: their_tokens(case["side"], corpus.train_texts, tokenizer)
    rates["tokenize"], rows = timed(tokenize, ids)
    if case["side"] == "grouped":
        rates["pack"], rows = timed(lambda: grouped_rows(rows), ids)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=PROBABILITY)
    listed = rows.select(range(min(len(rows), ROWS * case["batches"]))).to_list()
    batches = [listed[n : n + ROWS] for n in range(0, len(listed) - ROWS, ROWS)]
    rates["mask"] = rate_of(map(collator, batches))
    loader = DataLoader(rows, ROWS, shuffle=True, collate_fn=collator, drop_last=True)
    return {**rates, "deliver": rate_of(islice(forever(loader), case["batches"]))}


def measure(case: dict) -> dict[str, float]:
    "Measure one side in this process."
    import torch

    torch.set_num_threads(1)
    corpus, tokenizer = load_text(VOCABULARY, case["documents"])
    return (our_stages if case["side"] == "ours" else their_stages)(case, corpus, tokenizer)


def draw(result: dict):
    "Draw the tokens per second of each stage and side."
    figure, axes = new_axes("", "million real tokens per second", size=(8, 4))
    colours = {"ours": BLUE, "grouped": ORANGE, "padded": GREY}
    for column, (side, figures) in enumerate(result["sides"].items()):
        positions = [x for x, stage in enumerate(STAGES) if stage in figures]
        values = [figures[stage]["median"] / 1e6 for stage in STAGES if stage in figures]
        positions = [x + 0.27 * (column - 1) for x in positions]
        bars = axes.bar(positions, values, 0.25, color=colours[side], label=side)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    labels = [f"{stage}\n{meaning}" for stage, meaning in STAGES.items()]
    axes.set_xticks(range(len(STAGES)), labels, fontsize=7)
    axes.set_title(f"{result['machine']['processor']}, one thread", fontsize=9)
    axes.legend(frameon=False)
    return figure


def main() -> None:
    parser = common_parser(__doc__, "delivery", rounds=5)
    parser.add_argument("--documents", type=int, help="of the corpus (default: all)")
    parser.add_argument("--batches", type=int, default=400, help="timed batches (default: 400)")
    options = parser.parse_args()
    if options.case:
        return print(json.dumps(measure(options.case)))
    if options.quick:
        options.rounds, options.documents, options.batches = 1, 3000, 3
    load_text(VOCABULARY, options.documents)
    base = {"documents": options.documents, "batches": options.batches}
    cases = {side: {**base, "side": side} for side in ("ours", *FORMS)}
    show = lambda f: ", ".join(f"{stage} {rate / 1e6:.2f}" for stage, rate in f.items())
    ledger, where = Ledger("delivery", options.fresh), machine(1)
    runs = alternate(__file__, cases, options, ledger, show, threads=1)
    compared = {
        f"{stage}, over {form}": ratios(runs["ours"], runs[form], stage)
        for stage in STAGES
        for form in FORMS
        if stage in runs[form][0]
    }
    content = {"bertlab": bertlab.__version__, "machine": where, "ratios": compared}
    write_result(options, {**content, "sides": spreads(runs)}, draw)


if __name__ == "__main__":
    main()
