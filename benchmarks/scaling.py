"""Cost per token as the corpus, the rows and the number of processes grow.

    python benchmarks/scaling.py [--documents N] [--growth 1 10 100] [--lengths 128 512 2048 8192]
    python benchmarks/scaling.py --parts ways --output benchmarks/results/sharing.json

Corpus: a text file, which PretrainingDataModule reads, deduplicates, divides, tokenizes, plans and
delivers for one epoch; a larger one holds more copies, each with its words shuffled in its own way, so
that no document is a double and lengths stay. Microseconds of the processor per real token, of the data
alone, and with a training step of the small shape on top. A shared machine is now faster and now slower,
by more than the growth that is looked for; so the sizes run side by side in slices of less than a second,
one at a time, and the small ones again and again until the largest is through, each time with other
copies, for a text that was read a moment ago may be cheaper. Rows: a step on as many positions
in rows of other lengths, packed with the same documents. Processes: one thread each, together training
on twice as many rows. Ways: how two processes of one thread each share a step of the same rows (DDP and
FSDP2 deal the rows, tensor parallel deals each layer, context parallel each row), beside one process.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cache
from itertools import count
from pathlib import Path

from pretraining import SHAPES, our_side, shape, shared_text
from sides import (
    Ledger,
    alternate,
    common_parser,
    environment,
    fingerprint,
    judge,
    machine,
    ratios,
    say,
    spread,
    write_result,
)

import bertlab
from bertlab.core.files import atomic_write
from bertlab.core.plots import BLUE, GREEN, ORANGE, new_axes

FLAT = 1.1  # the dearest token of any size over that of the smallest corpus
PROCESSES = (1, 2)
# Of two processes, and the share of a step's rows that each reads; one process stands beside them.
WAYS = {"one": (1, 1), "ddp": (2, 2), "fsdp": (2, 2), "tensor": (2, 1), "context": (2, 1)}


def grown_file(case: dict) -> Path:
    "Copies of the corpus, a document a line, each with its words in an order of its own. Written once."
    path = Path(case["kept"], f"grown-{case['documents']}-{case['model']}-{case['copies']}.txt")
    if path.exists():
        return path
    corpus, _ = shared_text(SHAPES[case["model"]][3], case["documents"], Path(case["kept"]))
    texts = [text for text in corpus.train_texts + corpus.validation_texts if text.split()]
    draw = random.Random(0)
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for _ in range(case["copies"]):
            for text in texts:
                words = text.split()
                draw.shuffle(words)
                file.write(" ".join(words) + "\n")
    return path


def some_copies(case: dict, number: int, folder: str) -> Path:
    "A file of `growth` copies; with the next number of the next ones. All copies have as many bytes."
    size = grown_file(case).stat().st_size // case["copies"]
    path = Path(folder, "corpus.txt")
    with open(grown_file(case), "rb") as file:
        file.seek(number % (case["copies"] // case["growth"]) * case["growth"] * size)
        path.write_bytes(file.read(case["growth"] * size))
    return path


@cache
def kept_tokenizer(model: str, documents: int | None, kept: str):
    return shared_text(SHAPES[model][3], documents, Path(kept))[1]


def corpus_case(case: dict, folder: str, number: int = 0) -> dict:
    "One epoch of data from a file, its copies the next ones with each number."
    from bertlab.data.module import PretrainingDataModule

    tokenizer = kept_tokenizer(case["model"], case["documents"], case["kept"])
    path = some_copies(case, number, folder)
    start = time.process_time()
    data = PretrainingDataModule(str(path), tokenizer, train_batch_size=32, num_shards=1,
                                 data_kwargs={"lines": "documents"})  # fmt: skip
    data.setup()
    prepared = time.process_time()
    tokens = sum(int((batch["attention_mask"] > 0).sum()) for batch in data.train_dataloader())
    end = time.process_time()
    return {"tokens": tokens, "file_bytes": path.stat().st_size, "microseconds": 1e6 * (end - start) / tokens,
            "deliver_microseconds": 1e6 * (end - prepared) / tokens}  # fmt: skip


def rows_case(case: dict, folder: str) -> dict:
    "A training step on so many positions in rows of one length."
    import numpy as np
    import torch

    from bertlab.data.module import PretrainingDataModule
    from bertlab.core.devices import retain_freed_memory
    from bertlab.model.heads import BertLabForMaskedLM
    from bertlab.model.losses import LossConfig
    from bertlab.train.modules import BATCH_KEYS

    retain_freed_memory()  # as training on a CPU does
    _, tokenizer = shared_text(SHAPES[case["model"]][3], case["documents"], Path(case["kept"]))
    lengths = (
        np.random.default_rng(0)
        .lognormal(np.log(134) - 0.5, 1.0, case["positions"] // 20)
        .astype(int)
    )
    documents = [
        np.random.default_rng(n).integers(5, 1000, size + 1).tolist()
        for n, size in enumerate(lengths)
    ]
    length, rows = case["length"], case["positions"] // case["length"]
    data = PretrainingDataModule(None, tokenizer, max_sequence_length=length, train_batch_size=rows)
    data.set_datasets(documents, documents[:10])
    data.setup()
    batch = next(iter(data.train_dataloader()))
    model = BertLabForMaskedLM(
        shape("modernbert", case["model"], max_position_embeddings=8192)
    ).train()
    times = []
    for _ in range(case["steps"] - 1):  # as many as on other parts, and the first not timed
        start, busy = time.perf_counter(), time.process_time()
        named = {name: batch[name] for name in BATCH_KEYS if name in batch}
        model(**named, loss_config=LossConfig(loss_only=True)).loss.backward()
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
    settings = {
        "kind": "bert",
        "precision": "fp32",
        "seconds": 0,
        "seed": 0,
        "warm": 2,
        "warmup": 1,
    }
    figures, _ = our_side({**case, **settings, "trainer": trainer}, corpus, tokenizer, folder)
    all_tokens = figures["real_tokens"] * case["processes"]
    return {"tokens": all_tokens, "microseconds": 1e6 * figures["wall_seconds"] / all_tokens}


def ways_case(case: dict, folder: str) -> dict:
    "Steps of `bertlab pretrain` on the same rows, shared by two processes in one way."
    corpus, tokenizer = shared_text(SHAPES[case["model"]][3], case["documents"], Path(case["kept"]))
    processes, readers = WAYS[case["way"]]
    trainer = {"devices": processes, "accelerator": "cpu"}
    if processes > 1:
        trainer["strategy"] = case["way"]
    settings = {
        "kind": "modernbert",
        "precision": "fp32",
        "seconds": 0,
        "seed": 0,
        "warm": 2,
        "warmup": 1,
    }
    rows = SHAPES[case["model"]][-1] // readers
    figures, _ = our_side(
        {**case, **settings, "trainer": trainer, "rows": rows}, corpus, tokenizer, folder
    )
    tokens = figures["real_tokens"] * readers
    return {"tokens": tokens, "microseconds": 1e6 * figures["wall_seconds"] / tokens}


CASES = {"corpus": corpus_case, "rows": rows_case, "processes": processes_case, "ways": ways_case}


def measure(case: dict) -> dict:
    "One case, in this process; `again` and again, a line each time, until the process is ended."
    with tempfile.TemporaryDirectory() as folder:
        for number in count() if case.get("again") else ():
            print(json.dumps(corpus_case(case, folder, number)), flush=True)
        return CASES[case["part"]](case, folder)


def start_case(script: str | Path, case: dict, output: Path) -> subprocess.Popen:
    "A child that waits for its first slice. What it prints goes to a file, which never blocks it."
    command = [sys.executable, str(script), "--case", json.dumps(case)]
    with open(output, "w", encoding="utf-8") as file:
        child = subprocess.Popen(command, env=environment(1), stdout=file, stderr=subprocess.STDOUT,
                                 start_new_session=True)  # fmt: skip
    os.killpg(child.pid, signal.SIGSTOP)
    if hasattr(os, "sched_setaffinity"):  # cores of a shared machine differ from each other as well
        os.sched_setaffinity(child.pid, {max(os.sched_getaffinity(0))})
    return child


def printed(output: Path) -> list[dict]:
    "The figures that a child has printed so far."
    return [
        json.loads(line)
        for line in output.read_text(encoding="utf-8").splitlines()
        if line[-1:] == "}"
    ]


def in_slices(
    cases: dict[str, dict], script: str | Path = __file__, seconds: float = 0.6
) -> dict[str, dict]:  # mean figures by case
    "Run cases side by side, one at a time, in slices, until the last, the longest, has ended."
    longest = list(cases)[-1]
    with tempfile.TemporaryDirectory() as folder:
        outputs = {name: Path(folder, name) for name in cases}
        children = {name: start_case(script, {**case, "again": name != longest}, outputs[name])
                    for name, case in cases.items()}  # fmt: skip
        try:
            while not all(map(printed, outputs.values())):
                for name, child in children.items():
                    if child.poll() is not None:
                        continue
                    os.killpg(child.pid, signal.SIGCONT)
                    time.sleep(seconds if name == longest else seconds / 2)
                    if child.poll() is None:
                        os.killpg(child.pid, signal.SIGSTOP)
                    elif name != longest or child.returncode:
                        raise SystemExit(
                            f"{cases[name]} failed:\n{outputs[name].read_text()[-3000:]}"
                        )
        finally:
            for child in children.values():
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        runs = {name: printed(output) for name, output in outputs.items()}
    # Means, for the one long run is a mean over its time as well.
    return {name: {k: statistics.mean(run[k] for run in found) for k in found[0]} | {"runs": len(found)}
            for name, found in runs.items()}  # fmt: skip


def corpus_rounds(
    cases: dict[str, dict], rounds: int, ledger: Ledger, show
) -> dict[str, list[dict]]:
    "All sizes of the corpus, side by side in each round."
    grown_file(next(iter(cases.values())))  # before the children need it
    runs = {name: [] for name in cases}
    for number in range(rounds):
        key = json.dumps([*cases.values(), number], sort_keys=True)
        figures, known = ledger.ask(key, lambda: in_slices(cases))
        for name, found in figures.items():
            runs[name].append(found)
            print(f"  {number + 1}/{rounds} {name:44} {show(found)}{' (kept)' * known}", flush=True)
    return runs


def draw(result: dict):
    "Cost of a token along each axis, as multiples of the first."
    figure, axes = new_axes("growth", "cost of a token, as multiples of the first", size=(7, 4))
    if list(result["parts"]) == ["ways"]:
        found = result["parts"]["ways"]
        figure, axes = new_axes("", "microseconds of wall time per token", size=(6, 3.5))
        axes.bar(list(found), [f["microseconds"]["median"] for f in found.values()], color=BLUE)
        axes.set_title(result["machine"]["processor"], fontsize=9)
        return figure
    grown = [(part, found) for part, found in result["parts"].items() if part != "ways"]
    for (part, found), colour in zip(grown, (BLUE, ORANGE, GREEN)):
        sizes = [int(name) for name in found]
        costs = [f["microseconds"]["median"] for f in found.values()]
        axes.plot([s / sizes[0] for s in sizes], [c / costs[0] for c in costs], "o-", color=colour,
                  label=f"{part}, from {sizes[0]} to {sizes[-1]}")  # fmt: skip
    axes.set_xscale("log")
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
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
    parser.add_argument("--parts", nargs="+", choices=list(CASES),
                        default=[part for part in CASES if part != "ways"])  # fmt: skip
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(json.loads(options.case))))
        return
    if options.quick:
        options.rounds, options.documents, options.growth, options.lengths = (
            1,
            1200,
            [1, 2],
            [128, 256],
        )
        options.positions, options.steps, options.model = 1024, 2, "tiny"
    base = {"documents": options.documents, "kept": str(options.kept), "model": options.model,
            "steps": options.steps + 2, "positions": options.positions, "copies": max(options.growth)}  # fmt: skip
    sizes = {"corpus": ("growth", options.growth), "rows": ("length", options.lengths),
             "processes": ("processes", PROCESSES), "ways": ("way", list(WAYS))}  # fmt: skip
    place = machine(options.threads)
    ledger = Ledger(options.kept / "scaling.json", fingerprint(__file__), options.fresh)
    shared_text(SHAPES[options.model][3], options.documents, options.kept)
    show = lambda f: f"{f['microseconds']:9.2f} microseconds a token, {f['tokens']:,} tokens"  # noqa: E731
    parts, runs, compared = {}, {}, {}
    for part in options.parts:
        word, values = sizes[part]
        print(part, flush=True)
        cases = {str(value): {**base, "part": part, word: value} for value in values}
        runs[part] = (corpus_rounds(cases, options.rounds, ledger, show) if part == "corpus"
                      else alternate(__file__, cases, options.rounds, 1, ledger, show))  # fmt: skip
        parts[part] = {name: {k: spread(f[k] for f in found) for k in found[0]}
                       for name, found in runs[part].items()}  # fmt: skip
    judged = []
    if "corpus" in parts:
        corpora = runs["corpus"]
        compared = {name: ratios(found, corpora[str(options.growth[0])], "microseconds")
                    for name, found in corpora.items()}  # fmt: skip
        dearest = max(f["median"] for f in compared.values())
        judged = [judge(f"data, cost of a token at up to {options.growth[-1]}x over {options.growth[0]}x",
                        dearest, at_most=FLAT)]  # fmt: skip
    if {"corpus", "processes"} <= parts.keys():
        step = parts["processes"]["1"]["microseconds"]["median"]
        cost = parts["corpus"][str(options.growth[0])]["microseconds"]["median"]
        judged += [judge(f"data and step, cost of a token at up to {options.growth[-1]}x over "
                         f"{options.growth[0]}x", (cost * dearest + step) / (cost + step), at_most=FLAT)]  # fmt: skip
    say(judged)
    write_result(options.output, {
        "what": __doc__.splitlines()[0], "bertlab": bertlab.__version__, "machine": place,
        "model": options.model, "judged": judged, "ratios": compared, "parts": parts,
        "runs": runs}, draw)  # fmt: skip


if __name__ == "__main__":
    main()
