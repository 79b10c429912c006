"""Data beside `datasets.map` and transformers' collators: tokenize, pack, mask, deliver; tokens per second.

    python benchmarks/delivery.py [--documents N] [--batches 400]

The embedded corpus goes through both pipelines, in fresh processes of one thread that take turns. Stages:
text to token ids; ids to rows; rows at hand to masked batches (the collator alone); and rows to masked
batches through the loader, shuffled, which a training run waits for in every step of every epoch. Theirs
in two forms: a document a row (nothing to pack), and concatenated texts. Real tokens count, padding does
not. Collators on longer rows, and the packing rules of the reference projects, are measured by
collators.py and packing.py.
"""

import json
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from pretraining import FORMS, LENGTH, PROBABILITY, grouped_rows, shared_text, their_tokens
from sides import (
    Ledger,
    alternate,
    common_parser,
    fingerprint,
    judge,
    machine,
    ratios,
    say,
    spread,
    write_result,
)

import bertlab
from bertlab.core.plots import BLUE, GREY, ORANGE, new_axes

VOCABULARY, ROWS, TARGET = 30_522, 32, 5.0
STAGES = {"tokenize": "text to ids", "pack": "ids to rows", "mask": "rows at hand to batches",
          "deliver": "loader: rows to batches"}  # fmt: skip


def timed(make: Callable, count: Callable) -> tuple[float, object]:
    "Tokens per second of what is made, and what it is."
    start = time.perf_counter()
    made = make()
    seconds = time.perf_counter() - start
    return count(made) / seconds, made


def count_real(batches: Iterable[dict]) -> int:
    return sum(int((batch["attention_mask"] > 0).sum()) for batch in batches)


def rate_of(batches: Iterable[dict]) -> float:
    "Tokens per second of batches that are looked at and let go, as a training run does."
    start = time.perf_counter()
    return count_real(batches) / (time.perf_counter() - start)


def forever(loader: Iterable) -> Iterable[dict]:
    "Epoch after epoch. The first batch, before which an epoch is planned or workers start, is left out."
    batches = (batch for _ in range(10**6) for batch in loader)
    next(batches)
    return batches


def our_stages(case: dict, corpus, tokenizer) -> dict[str, float]:
    "What PretrainingDataModule does, stage by stage."
    from bertlab.data.module import PretrainingDataModule
    from bertlab.data.packing import PackedDataset, special_token_ids
    from bertlab.data.cache import tokenize_documents

    def pack(documents) -> list:
        dataset = PackedDataset(documents, LENGTH, **special_token_ids(tokenizer))
        places = range(len(dataset))
        return [dataset.__getitems__(places[n : n + ROWS]) for n in places[::ROWS]]

    tokenize, documents = timed(lambda: tokenize_documents(corpus.train_texts, tokenizer, num_proc=1),
                                lambda documents: int(documents.offsets[-1]))  # fmt: skip
    packed, blocks = timed(
        lambda: pack(documents), lambda blocks: count_real(b.stacked for b in blocks)
    )
    data = PretrainingDataModule(corpus, tokenizer, max_sequence_length=LENGTH, train_batch_size=ROWS,
                                 collator_kwargs={"mlm_probability": PROBABILITY})  # fmt: skip
    data.setup()
    loader = data.train_dataloader()
    some = blocks[:-1][: case["batches"]]
    return {"tokenize": tokenize, "pack": packed, "mask": rate_of(map(loader.collator, some)),
            "deliver": rate_of(islice(forever(loader), case["batches"]))}  # fmt: skip


def their_stages(case: dict, corpus, tokenizer) -> dict[str, float]:
    "run_mlm.py's maps, and the collator and loader of transformers' Trainer."
    from torch.utils.data import DataLoader
    from transformers import DataCollatorForLanguageModeling

    ids = lambda rows: sum(map(len, rows["input_ids"]))  # noqa: E731
    tokenize, rows = timed(lambda: their_tokens(case["side"], corpus.train_texts, tokenizer), ids)
    found = {"tokenize": tokenize}
    if case["side"] == "grouped":
        found["pack"], rows = timed(lambda: grouped_rows(rows), ids)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=PROBABILITY)
    listed = rows.select(range(min(len(rows), ROWS * case["batches"]))).to_list()
    some = [listed[n : n + ROWS] for n in range(0, len(listed) - ROWS, ROWS)]
    found["mask"] = rate_of(map(collator, some))
    loader = DataLoader(rows, ROWS, shuffle=True, collate_fn=collator, drop_last=True)
    return {**found, "deliver": rate_of(islice(forever(loader), case["batches"]))}


def measure(case: dict) -> dict:
    "One side, in this process."
    import torch

    torch.set_num_threads(1)
    corpus, tokenizer = shared_text(VOCABULARY, case["documents"], Path(case["kept"]))
    return (our_stages if case["side"] == "ours" else their_stages)(case, corpus, tokenizer)


def draw(result: dict):
    "Tokens per second of each stage and side."
    figure, axes = new_axes("", "million real tokens per second", size=(8, 4))
    colours = {"ours": BLUE, "grouped": ORANGE, "padded": GREY}
    for place, (side, figures) in enumerate(result["sides"].items()):
        at = [x for x, stage in enumerate(STAGES) if stage in figures]
        values = [figures[stage]["median"] / 1e6 for stage in STAGES if stage in figures]
        bars = axes.bar(
            [x + 0.27 * (place - 1) for x in at], values, 0.25, color=colours[side], label=side
        )
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_xticks(
        range(len(STAGES)), [f"{stage}\n{what}" for stage, what in STAGES.items()], fontsize=7
    )
    axes.set_title(f"{result['machine']['processor']}, one thread", fontsize=9)
    axes.legend(frameon=False)
    return figure


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "delivery", rounds=5)
    parser.add_argument("--documents", type=int, help="of the corpus (default: all)")
    parser.add_argument("--batches", type=int, default=400, help="that are timed (default: 400)")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(json.loads(options.case))))
        return
    if options.quick:
        options.rounds, options.documents, options.batches = 1, 2000, 3
    place = machine(1)
    ledger = Ledger(options.kept / "delivery.json", fingerprint(__file__), options.fresh)
    shared_text(VOCABULARY, options.documents, options.kept)
    base = {"documents": options.documents, "batches": options.batches, "kept": str(options.kept)}
    cases = {side: {**base, "side": side} for side in ("ours", *FORMS)}
    show = lambda f: (
        ", ".join(f"{stage} {rate / 1e6:.2f}" for stage, rate in f.items()) + " M tokens/s"
    )  # noqa: E731
    runs = alternate(__file__, cases, options.rounds, 1, ledger, show)
    compared = {f"{stage}, over {form}": ratios(runs["ours"], runs[form], stage)
                for stage in STAGES for form in FORMS if stage in runs[form][0]}  # fmt: skip
    judged = [judge(f"delivery over {form}", compared[f"deliver, over {form}"]["median"], at_least=TARGET)
              for form in FORMS]  # fmt: skip
    say(judged)
    sides = {
        side: {k: spread(f[k] for f in found) for k in found[0]} for side, found in runs.items()
    }
    settings = dict(row_length=LENGTH, rows=ROWS, masked_share=PROBABILITY, vocabulary=VOCABULARY)
    write_result(options.output, {
        "what": __doc__.splitlines()[0], "bertlab": bertlab.__version__, "machine": place,
        "settings": settings, "judged": judged, "ratios": compared, "sides": sides, "runs": runs}, draw)  # fmt: skip


if __name__ == "__main__":
    main()
