"""How long until something happens: import, `--help`, and the first step of training.

    python benchmarks/startup.py [--rounds 5]

Fresh processes in turns, from the start of Python: to the end of an import; to the end of a command's
help; to the end of the first training step on the embedded corpus, with a tokenizer that is there.
Theirs is transformers' Trainer on concatenated texts. The first round warms the file cache, and is not
counted. `bertlab demo` from outside is measured by demo.py.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pretraining import SHAPES, our_side, shared_text, their_side
from sides import (Ledger, common_parser, environment, fingerprint, in_turns, judge, machine, ratios, say,
                   spread, write_result)  # fmt: skip

import bertlab
from bertlab.core.plots import BLUE, GREY, ORANGE, new_axes

COMMANDS = {  # what a fresh Python runs
    "python alone": ["-c", "pass"],
    "import bertlab": ["-c", "import bertlab"],
    "import transformers": ["-c", "import transformers"],
    "import torch": ["-c", "import torch"],
    "bertlab --help": ["-m", "bertlab.cli.main", "--help"],
    "bertlab pretrain --help": ["-m", "bertlab.cli.main", "pretrain", "--help"],
}
FIRST_STEPS = {"first step, bertlab": "ours", "first step, Trainer": "grouped"}


def first_step(case: dict) -> dict:
    "One training step, in this process."
    corpus, tokenizer = shared_text(SHAPES[case["model"]][3], case["documents"], Path(case["kept"]))
    with tempfile.TemporaryDirectory() as folder:
        side = our_side if case["side"] == "ours" else their_side
        side(
            {**case, "warm": 0, "warmup": 1, "steps": 1, "seconds": 0, "seed": 0},
            corpus,
            tokenizer,
            folder,
        )
    return {}


def seconds_of(arguments: list[str], threads: int) -> dict[str, float]:
    "Wall and processor time of a fresh Python."
    before, start = os.times(), time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], env=environment(threads), check=True, capture_output=True
    )
    wall, after = time.perf_counter() - start, os.times()
    busy = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return {"seconds": wall, "processor_seconds": busy}


def draw(result: dict):
    "Seconds of each, on a logarithmic scale."
    names = list(result["seconds"])
    figure, axes = new_axes("seconds", "", size=(7.5, 3.6))
    values = [result["seconds"][name]["seconds"]["median"] for name in names]
    colours = [
        BLUE if "bertlab" in n else ORANGE if "Trainer" in n or "transformers" in n else GREY
        for n in names
    ]
    axes.barh(names, values, color=colours)
    axes.invert_yaxis()
    axes.set_xscale("log")
    for place, value in enumerate(values):
        axes.annotate(f" {value:.2f}", (value, place), va="center", fontsize=8)
    axes.set_title(result["machine"]["processor"], fontsize=9)
    return figure


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "startup", rounds=5)
    parser.add_argument("--documents", type=int, help="of the corpus (default: all)")
    parser.add_argument("--model", default="small", choices=list(SHAPES))
    options = parser.parse_args()
    if options.case:
        print(json.dumps(first_step(json.loads(options.case))))
        return
    commands, warm = dict(COMMANDS), 1
    if options.quick:
        options.rounds, options.documents, options.model, warm = 1, 2000, "tiny", 0
        commands = {
            name: commands[name] for name in ("python alone", "import bertlab", "bertlab --help")
        }
    base = {"model": options.model, "kind": "bert", "precision": "fp32", "documents": options.documents,
            "kept": str(options.kept)}  # fmt: skip
    shared_text(SHAPES[options.model][3], options.documents, options.kept)
    for name, side in FIRST_STEPS.items():
        commands[name] = [__file__, "--case", json.dumps({**base, "side": side})]
    place = machine(options.threads)
    ledger = Ledger(options.kept / "startup.json", fingerprint(__file__), options.fresh)
    runs = {name: [] for name in commands}
    for number, name in in_turns(commands, options.rounds + warm):
        key = json.dumps([commands[name], number, options.threads])
        figures, _ = ledger.ask(key, lambda: seconds_of(commands[name], options.threads))  # noqa: B023
        if number >= warm:
            runs[name].append(figures)
            print(
                f"  {number + 1 - warm}/{options.rounds} {name:26} {figures['seconds']:7.2f} s",
                flush=True,
            )
    found = {
        name: {k: spread(f[k] for f in figures) for k in figures[0]}
        for name, figures in runs.items()
    }
    bare = found["python alone"]["seconds"]["median"]
    judged = [
        judge(
            "import bertlab, seconds",
            found["import bertlab"]["seconds"]["median"] - bare,
            at_most=0.2,
        ),
        judge("bertlab --help, seconds", found["bertlab --help"]["seconds"]["median"], at_most=1.0),
    ]
    say(judged)
    compared = ratios(runs["first step, Trainer"], runs["first step, bertlab"], "seconds")
    write_result(options.output, {
        "what": __doc__.splitlines()[0], "bertlab": bertlab.__version__, "machine": place, "judged": judged,
        "model": options.model, "trainer_over_bertlab_to_first_step": compared, "seconds": found,
        "runs": runs}, draw)  # fmt: skip


if __name__ == "__main__":
    main()
