"""Cost of a token as the corpus, the rows and the number of processes grow.

    python benchmarks/scaling.py [--parts corpus rows processes ways]

Corpus: PretrainingDataModule reads, splits, tokenizes, packs and delivers a text file for one epoch; a
larger file holds more copies of the corpus, each with its words shuffled. Processor time per real token.
Rows: forward and backward pass on as many positions in rows of other lengths. Ways: how two processes of
one thread each share a step of the same rows, beside one process; wall time.
"""

import json
import random
import tempfile
import time
from pathlib import Path

from pretraining import SHAPES, load_text, our_side, shape
from sides import BUILD, Ledger, alternate, common_parser, machine, spread, spreads, write_result

import bertlab
from bertlab.core.files import atomic_write
from bertlab.core.plots import BLUE, GREEN, ORANGE, new_axes

# Processes, and how many of them read rows of their own.
WAYS = {"one": (1, 1), "ddp": (2, 2), "fsdp": (2, 2), "tensor": (2, 1), "context": (2, 1)}


def grown_file(case: dict) -> Path:
    "Write copies of the corpus, one document per line, each with its words shuffled."
    path = BUILD / f"grown-{case['documents']}-{case['growth']}.txt"
    if path.exists():
        return path
    corpus, _ = load_text(SHAPES[case["model"]][3], case["documents"])
    rng = random.Random(0)
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for _ in range(case["growth"]):
            for text in corpus.train_texts:
                words = text.split()
                rng.shuffle(words)
                file.write(" ".join(words) + "\n")
    return path


def corpus_case(case: dict) -> dict[str, float]:
    "Read and deliver one epoch of a file."
    from bertlab.data.module import PretrainingDataModule

    _, tokenizer = load_text(SHAPES[case["model"]][3], case["documents"])
    path, start = grown_file(case), time.process_time()
    data = PretrainingDataModule(str(path), tokenizer, train_batch_size=32)
    data.setup()
    tokens = sum(int((batch["attention_mask"] > 0).sum()) for batch in data.train_dataloader())
    return {"tokens": tokens, "microseconds": 1e6 * (time.process_time() - start) / tokens}


def rows_case(case: dict) -> dict[str, float]:
    "Time forward and backward passes on rows of one length."
    import numpy as np

    from bertlab.data.module import PretrainingDataModule
    from bertlab.model.heads import BertLabForMaskedLM
    from bertlab.model.losses import LossConfig
    from bertlab.train.objectives import BATCH_KEYS

    _, tokenizer = load_text(SHAPES[case["model"]][3], case["documents"])
    rng, length = np.random.default_rng(0), case["length"]
    sizes = rng.lognormal(np.log(134) - 0.5, 1.0, case["positions"] // 20).astype(int) + 1
    documents = [rng.integers(5, 1000, size).tolist() for size in sizes]
    rows = case["positions"] // length
    data = PretrainingDataModule(None, tokenizer, max_sequence_length=length, train_batch_size=rows)
    data.set_datasets(documents, documents[:10])
    data.setup()
    batch = next(iter(data.train_dataloader()))
    config = shape("modernbert", case["model"], max_position_embeddings=8192)
    model, seconds = BertLabForMaskedLM(config).train(), []
    inputs = {name: batch[name] for name in BATCH_KEYS if name in batch}
    for _ in range(case["steps"]):
        start = time.perf_counter()
        model(**inputs, loss_config=LossConfig(loss_only=True)).loss.backward()
        model.zero_grad()
        seconds.append(time.perf_counter() - start)
    tokens = int((batch["attention_mask"] > 0).sum())
    return {"tokens": tokens, "microseconds": 1e6 * spread(seconds[1:])["median"] / tokens}


def ways_case(case: dict) -> dict[str, float]:
    "Train on rows that are shared by processes in one way."
    corpus, tokenizer = load_text(SHAPES[case["model"]][3], case["documents"])
    processes, readers = WAYS[case["way"]]
    trainer = {"devices": processes, "accelerator": "cpu"}
    if processes > 1:
        trainer["strategy"] = case["way"]
    case = {**case, "kind": "modernbert", "precision": "fp32", "warm": 2, "trainer": trainer}
    case["rows"] = SHAPES[case["model"]][-1] // readers
    with tempfile.TemporaryDirectory() as folder:
        figures = our_side(case, corpus, tokenizer, folder)
    tokens = figures["real_tokens"] * readers
    return {"tokens": tokens, "microseconds": 1e6 * figures["wall_seconds"] / tokens}


CASES = {"corpus": corpus_case, "rows": rows_case, "ways": ways_case}


def draw(result: dict):
    "Draw the cost of a token along each axis, as multiples of the first."
    figure, axes = new_axes("growth", "cost of a token, as multiples of the first", size=(7, 4))
    for (part, sizes), colour in zip(result["parts"].items(), (BLUE, ORANGE, GREEN)):
        if part == "ways":
            continue
        values = [int(size) for size in sizes]
        costs = [f["microseconds"]["median"] for f in sizes.values()]
        label = f"{part}, from {values[0]} to {values[-1]}"
        growth = [value / values[0] for value in values]
        axes.plot(growth, [c / costs[0] for c in costs], "o-", color=colour, label=label)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
    axes.axhline(1, color="0.8", zorder=0)
    axes.set_title(result["machine"]["processor"], fontsize=9)
    axes.legend(frameon=False)
    return figure


def main() -> None:
    parser = common_parser(__doc__, "scaling", rounds=3)
    add = parser.add_argument
    add("--parts", nargs="+", choices=CASES, default=list(CASES))
    add("--documents", type=int, help="of the corpus at 1x (default: all)")
    add("--growth", nargs="+", type=int, default=[1, 10, 100])
    add("--lengths", nargs="+", type=int, default=[128, 512, 2048, 8192])
    add("--positions", type=int, default=8192, help="of a step (default: 8192)")
    add("--steps", type=int, default=6, help="of each process (default: 6)")
    add("--model", default="small", choices=SHAPES)
    options = parser.parse_args()
    if options.case:
        return print(json.dumps(CASES[options.case["part"]](options.case)))
    if options.quick:
        options.rounds, options.documents, options.parts = 1, 1200, ["corpus", "rows"]
        options.growth, options.lengths = [1, 2], [128, 256]
        options.positions, options.steps, options.model = 1024, 2, "tiny"
    base = {name: getattr(options, name) for name in ("documents", "model", "steps", "positions")}
    axes = {
        "corpus": ("growth", options.growth),
        "rows": ("length", options.lengths),
        "ways": ("way", list(WAYS)),
    }
    where, ledger = machine(options.threads), Ledger("scaling", options.fresh)
    show = lambda f: f"{f['microseconds']:9.2f} microseconds per token"
    load_text(SHAPES[options.model][3], options.documents)
    parts = {}
    for part in options.parts:
        print(part, flush=True)
        name, values = axes[part]
        cases = {str(value): {**base, "part": part, name: value} for value in values}
        parts[part] = spreads(alternate(__file__, cases, options, ledger, show, threads=1))
    write_result(options, {"bertlab": bertlab.__version__, "machine": where, "parts": parts}, draw)


if __name__ == "__main__":
    main()
