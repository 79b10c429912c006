"""Cost per token as the corpus, the rows and the number of processes grow.

    python benchmarks/scaling.py [--documents N] [--growth 1 10 100] [--lengths 128 512 2048 8192]

Corpus: a text file, which PretrainingDataModule reads, deduplicates, divides, tokenizes, plans and
delivers for one epoch; a larger one holds copies whose words are shuffled, so that no document is a
double and lengths stay. Microseconds per real token, of the data alone, and with a training step of the
small shape on top. Rows: a step on as many positions in rows of other lengths, packed with the same
documents. Processes: one thread each, together training on twice as many rows.
"""

import json
import random
import tempfile
import time
from pathlib import Path

from pretraining import SHAPES, our_side, shape, shared_text
from sides import Ledger, alternate, common_parser, fingerprint, judge, machine, say, spread, write_result

import bertlab
from bertlab.plots import BLUE, GREEN, ORANGE, new_axes

FLAT = 1.1  # the dearest token of any size over that of the smallest corpus
PROCESSES = (1, 2)


def grown_file(texts: list[str], growth: int, path: Path) -> None:
    "A document a line; copies have their words in another order."
    draw = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for copy in range(growth):
            for text in texts:
                words = text.split()
                if copy:
                    draw.shuffle(words)
                file.write(" ".join(words) + "\n")


def corpus_case(case: dict, folder: str) -> dict:
    "One epoch of data from a file, and the steps that would train on it."
    from bertlab.data import PretrainingDataModule

    corpus, tokenizer = shared_text(SHAPES[case["model"]][3], case["documents"], Path(case["kept"]))
    texts = [text for text in corpus.train_texts + corpus.validation_texts if text.split()]
    path = Path(folder, "corpus.txt")
    grown_file(texts, case["growth"], path)
    start, busy = time.perf_counter(), time.process_time()
    data = PretrainingDataModule(str(path), tokenizer, train_batch_size=32, num_shards=1,
                                 data_kwargs={"lines": "documents"})  # fmt: skip
    data.setup()
    prepared = time.perf_counter()
    tokens = sum(int((batch["attention_mask"] > 0).sum()) for batch in data.train_dataloader())
    wall, cpu = time.perf_counter() - start, time.process_time() - busy
    return {"tokens": tokens, "file_bytes": path.stat().st_size, "microseconds": 1e6 * wall / tokens,
            "processor_microseconds": 1e6 * cpu / tokens,
            "prepare_microseconds": 1e6 * (prepared - start) / tokens}  # fmt: skip


def rows_case(case: dict, folder: str) -> dict:
    "A training step on so many positions in rows of one length."
    import numpy as np
    import torch

    from bertlab.data import PretrainingDataModule
    from bertlab.devices import keep_freed_memory
    from bertlab.heads import BertLabForMaskedLM
    from bertlab.losses import LossRule
    from bertlab.modules import BATCH_KEYS

    keep_freed_memory()  # as training on a CPU does
    _, tokenizer = shared_text(SHAPES[case["model"]][3], case["documents"], Path(case["kept"]))
    lengths = np.random.default_rng(0).lognormal(np.log(134) - 0.5, 1.0, case["positions"] // 20).astype(int)
    documents = [np.random.default_rng(n).integers(5, 1000, size + 1).tolist() for n, size in enumerate(lengths)]
    length, rows = case["length"], case["positions"] // case["length"]
    data = PretrainingDataModule(None, tokenizer, max_sequence_length=length, train_batch_size=rows)
    data.set_datasets(documents, documents[:10])
    data.setup()
    batch = next(iter(data.train_dataloader()))
    model = BertLabForMaskedLM(shape("modernbert", case["model"], max_position_embeddings=8192)).train()
    times = []
    for _ in range(case["steps"] + 1):
        start, busy = time.perf_counter(), time.process_time()
        named = {name: batch[name] for name in BATCH_KEYS if name in batch}
        model(**named, loss_rule=LossRule(only_loss=True)).loss.backward()
        model.zero_grad()
        times.append((time.perf_counter() - start, time.process_time() - busy))
    tokens = int((batch["attention_mask"] > 0).sum())
    wall, cpu = (spread(pair[i] for pair in times[1:])["median"] for i in range(2))
    return {"tokens": tokens, "microseconds": 1e6 * wall / tokens, "processor_microseconds": 1e6 * cpu / tokens,
            "threads": torch.get_num_threads()}  # fmt: skip


def processes_case(case: dict, folder: str) -> dict:
    "Steps of `bertlab pretrain` on one process, or on several; each counts its own tokens."
    corpus, tokenizer = shared_text(SHAPES[case["model"]][3], case["documents"], Path(case["kept"]))
    trainer = {"devices": case["processes"], "accelerator": "cpu"}
    if case["processes"] > 1:
        trainer["strategy"] = "ddp"
    settings = {"kind": "bert", "precision": "fp32", "seconds": 0, "seed": 0, "warm": 2, "warmup": 1}
    figures, _ = our_side({**case, **settings, "trainer": trainer}, corpus, tokenizer, folder)
    all_tokens = figures["real_tokens"] * case["processes"]
    return {"tokens": all_tokens, "microseconds": 1e6 * figures["wall_seconds"] / all_tokens}


CASES = {"corpus": corpus_case, "rows": rows_case, "processes": processes_case}


def measure(case: dict) -> dict:
    "One case, in this process."
    with tempfile.TemporaryDirectory() as folder:
        return CASES[case["part"]](case, folder)


def draw(result: dict):
    "Cost of a token along each axis, as multiples of the first."
    figure, axes = new_axes("growth", "cost of a token, as multiples of the first", size=(7, 4))
    for (part, found), colour in zip(result["parts"].items(), (BLUE, ORANGE, GREEN)):
        sizes = [int(name) for name in found]
        costs = [f["microseconds"]["median"] for f in found.values()]
        axes.plot([s / sizes[0] for s in sizes], [c / costs[0] for c in costs], "o-", color=colour,
                  label=f"{part}, from {sizes[0]} to {sizes[-1]}")  # fmt: skip
    axes.set_xscale("log")
    axes.axhline(1, color="0.8", zorder=0)
    axes.set_title(result["machine"]["processor"], fontsize=9)
    axes.legend(frameon=False)
    return figure


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "scaling", rounds=3)
    parser.add_argument("--documents", type=int, help="of the corpus at 1x (default: all)")
    parser.add_argument("--growth", nargs="+", type=int, default=[1, 10, 100])
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512, 2048, 8192])
    parser.add_argument("--positions", type=int, default=8192, help="of a step (default: 8192)")
    parser.add_argument("--steps", type=int, default=4, help="of each process (default: 4)")
    parser.add_argument("--model", default="small", choices=list(SHAPES))
    parser.add_argument("--parts", nargs="+", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(json.loads(options.case))))
        return
    if options.quick:
        options.rounds, options.documents, options.growth, options.lengths = 1, 1200, [1, 2], [128, 256]
        options.positions, options.steps, options.model = 1024, 2, "tiny"
    base = {"documents": options.documents, "kept": str(options.kept), "model": options.model,
            "steps": options.steps + 2, "positions": options.positions}  # fmt: skip
    sizes = {"corpus": ("growth", options.growth), "rows": ("length", options.lengths),
             "processes": ("processes", PROCESSES)}  # fmt: skip
    place = machine(options.threads)
    ledger = Ledger(options.kept / "scaling.json", fingerprint(__file__), options.fresh)
    shared_text(SHAPES[options.model][3], options.documents, options.kept)
    show = lambda f: f"{f['microseconds']:9.2f} microseconds a token, {f['tokens']:,} tokens"  # noqa: E731
    parts, runs = {}, {}
    for part in options.parts:
        word, values = sizes[part]
        print(part, flush=True)
        cases = {str(value): {**base, "part": part, word: value} for value in values}
        runs[part] = alternate(__file__, cases, options.rounds, 1, ledger, show)
        parts[part] = {name: {k: spread(f[k] for f in found) for k in found[0]}
                       for name, found in runs[part].items()}  # fmt: skip
    judged = []
    if "corpus" in parts:
        costs = [f["microseconds"]["median"] for f in parts["corpus"].values()]
        judged = [judge(f"data, cost of a token at up to {options.growth[-1]}x over {options.growth[0]}x",
                        max(costs) / costs[0], at_most=FLAT)]  # fmt: skip
    if {"corpus", "processes"} <= parts.keys():
        step = parts["processes"]["1"]["microseconds"]["median"]
        judged += [judge(f"data and step, cost of a token at up to {options.growth[-1]}x over "
                         f"{options.growth[0]}x", (max(costs) + step) / (costs[0] + step), at_most=FLAT)]  # fmt: skip
    say(judged)
    write_result(options.output, {
        "what": __doc__.splitlines()[0], "bertlab": bertlab.__version__, "machine": place,
        "model": options.model, "judged": judged, "parts": parts, "runs": runs}, draw)  # fmt: skip


if __name__ == "__main__":
    main()
