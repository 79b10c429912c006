"""Seconds until a fresh Python has imported the package, printed help, and taken a training step.

    python benchmarks/startup.py [--rounds 5]

The first training step is on the embedded corpus, with a tokenizer that exists already; theirs is
transformers' Trainer on concatenated texts. The first round warms the file cache and is not counted.
"""

import json
import subprocess
import sys
import tempfile
import time

from pretraining import SHAPES, load_text, our_side, their_side
from sides import Ledger, common_parser, environment, in_turns, machine, spread, write_result

import bertlab
from bertlab.core.plots import BLUE, GREY, ORANGE, new_axes

COMMANDS = {
    "python alone": ["-c", "pass"],
    "import bertlab": ["-c", "import bertlab"],
    "import transformers": ["-c", "import transformers"],
    "import torch": ["-c", "import torch"],
    "bertlab --help": ["-m", "bertlab.cli", "--help"],
    "bertlab pretrain --help": ["-m", "bertlab.cli", "pretrain", "--help"],
}


def first_step(case: dict) -> None:
    "Take one training step in this process."
    corpus, tokenizer = load_text(SHAPES[case["model"]][3], case["documents"])
    side = our_side if case["side"] == "ours" else their_side
    with tempfile.TemporaryDirectory() as folder:
        side({**case, "warm": 0, "steps": 1}, corpus, tokenizer, folder)


def seconds_of(arguments: list[str], threads: int) -> dict[str, float]:
    start = time.perf_counter()
    command = [sys.executable, *arguments]
    subprocess.run(command, env=environment(threads), check=True, capture_output=True)
    return {"seconds": time.perf_counter() - start}


def draw(result: dict):
    "Draw the seconds of each command on a logarithmic scale."
    names = list(result["seconds"])
    figure, axes = new_axes("seconds", "", size=(7.5, 3.6))
    values = [result["seconds"][name]["seconds"]["median"] for name in names]
    colour_of = lambda n: BLUE if "bertlab" in n else ORANGE if "tr" in n.lower() else GREY
    axes.barh(names, values, color=list(map(colour_of, names)))
    axes.invert_yaxis()
    axes.set_xscale("log")
    for row, value in enumerate(values):
        axes.annotate(f" {value:.2f}", (value, row), va="center", fontsize=8)
    axes.set_title(result["machine"]["processor"], fontsize=9)
    return figure


def main() -> None:
    parser = common_parser(__doc__, "startup", rounds=5)
    parser.add_argument("--documents", type=int, help="of the corpus (default: all)")
    parser.add_argument("--model", default="small", choices=SHAPES)
    options = parser.parse_args()
    if options.case:
        return first_step(options.case)
    commands = dict(COMMANDS)
    if options.quick:
        options.rounds, options.documents, options.model = 1, 2000, "tiny"
        del commands["import transformers"], commands["import torch"]
    base = {"model": options.model, "kind": "bert", "precision": "fp32"}
    load_text(SHAPES[options.model][3], options.documents)
    for name, side in {"bertlab": "ours", "Trainer": "grouped"}.items():
        case = {**base, "documents": options.documents, "side": side}
        commands[f"first step, {name}"] = [__file__, "--case", json.dumps(case)]
    ledger, runs = Ledger("startup", options.fresh), {name: [] for name in commands}
    for n, name in in_turns(commands, options.rounds + 1):
        key = json.dumps([commands[name], n, options.threads])
        figures = ledger.get(key, lambda: seconds_of(commands[name], options.threads))  # noqa: B023
        if n > 0:
            runs[name].append(figures["seconds"])
            print(f"  {n}/{options.rounds} {name:26} {figures['seconds']:7.2f} s", flush=True)
    seconds = {name: {"seconds": spread(values)} for name, values in runs.items()}
    where = machine(options.threads)
    content = {"bertlab": bertlab.__version__, "machine": where, "seconds": seconds}
    write_result(options, content, draw)


if __name__ == "__main__":
    main()
