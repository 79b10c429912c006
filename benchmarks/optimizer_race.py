"""The optimizer race of walkthrough 02: the same tiny encoder, each optimizer at its own best rate.

    python benchmarks/optimizer_race.py [--output FILE] [--steps 200]
    python benchmarks/optimizer_race.py --watch benchmarks/results/optimizer_race.json --output FILE

The race itself is the notebook's: this script runs the cells that carry the tag `race`, so that the two
cannot differ. Each optimizer first tries a grid of rates on two seeds, and is judged by the worse of them:
a rate that sometimes diverges is none. Its best rate then runs with three other seeds; where one of those
diverges, the rate is given up for the next best. Everything that was tried is written down.

With `--watch` nothing is tuned: the rules of an earlier record run again at the rates found there, and every
update of one hidden matrix is measured, for the replay in nbs/explorers/04_optimizers.ipynb.
"""

import argparse
import json
import math
import platform
from pathlib import Path

import torch

from bertlab.core.files import atomic_write
from bertlab.model.losses import unigram_counts, unigram_entropy
from bertlab.explorers.optimizers import OptimizerRun, UpdateRecorder, save_runs

NOTEBOOK = Path(__file__).resolve().parent.parent / "nbs/walkthroughs/02_optimizers.ipynb"
GRIDS = {  # a worse rate, or one that diverges, should lie on each side of the best
    "sgd": (0.3, 1.0, 3.0),
    "momentum": (0.1, 0.3, 0.6, 1.0),
    "adamw": (0.003, 0.01, 0.03),
    "lion": (0.001, 0.003, 0.01),
    "muon": (0.003, 0.01, 0.03, 0.1),
}
TUNING_SEEDS, RACE_SEEDS = (7, 8), (0, 1, 2)
WATCHED = "encoder.blocks.0.mlp.up_proj.weight"  # (192, 64)
WATCHED_RULES = ("momentum", "adamw", "lion", "muon")


def read_race() -> dict:
    "Run the notebook's cells that make the race, and return what they define."
    names = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if "race" in cell["metadata"].get("tags", []):
            exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
    return names


def finite(loss: float) -> float | None:
    "A loss that JSON can hold; None for a run that diverged."
    return round(loss, 4) if math.isfinite(loss) else None


def run_once(
    race: dict, name: str, rate: float, seed: int, num_steps: int
) -> tuple[float | None, list]:
    "The held-out loss at the end, and the training losses."
    model, losses = race["train"](name, rate, seed, num_steps)
    final = finite(race["held_out_loss"](model))
    print(f"{name:10}{rate:8g}  seed {seed}  {final}", flush=True)
    return final, [finite(loss) for loss in losses]


def race_one(race: dict, name: str, rates: tuple[float, ...], num_steps: int) -> dict:
    "Tune one optimizer, then run it with the seeds of the race."
    tried = {
        rate: [run_once(race, name, rate, seed, num_steps)[0] for seed in TUNING_SEEDS]
        for rate in rates
    }
    given_up = []
    for rate in sorted(rates, key=lambda rate: max(loss or math.inf for loss in tried[rate])):
        finals, losses = zip(*(run_once(race, name, rate, seed, num_steps) for seed in RACE_SEEDS))
        if None not in finals:
            break
        given_up.append({"rate": rate, "held_out": finals})
    runs = [{"seed": seed, "held_out": final, "losses": curve}
            for seed, final, curve in zip(RACE_SEEDS, finals, losses)]  # fmt: skip
    tuning = [{"rate": rate, "held_out": tried[rate]} for rate in rates]
    return {"tuning": tuning, "given_up": given_up, "rate": rate, "runs": runs}


def watch_once(race: dict, name: str, rate: float, seed: int, num_steps: int) -> OptimizerRun:
    "One run again, with every update of a matrix measured."
    run, watch = OptimizerRun(name, rate, seed), []

    def look(model):
        if not watch:  # the weights before the first update: those of the same seed, built again
            watch.append(UpdateRecorder(run, race["build"](seed).get_parameter(WATCHED), every=20))
        watch[0].look(model.get_parameter(WATCHED))

    _, losses = race["train"](name, rate, seed, num_steps, look)
    run.losses = [finite(loss) for loss in losses]
    print(f"{name:10}{rate:8g}  seed {seed}  {run.losses[-1]}", flush=True)
    return run


def watch_all(race: dict, record: dict, output: str | None) -> None:
    "Run the rules of a record again at its rates, and write what their updates looked like."
    runs = [watch_once(race, name, record["results"][name]["rate"], seed, record["steps"])
            for name in WATCHED_RULES for seed in RACE_SEEDS]  # fmt: skip
    if output:
        save_runs(runs, output)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", help="write what was tried to this JSON file")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--watch", metavar="RECORD", help="measure updates at the rates of this earlier record"
    )
    options = parser.parse_args()
    race, results = read_race(), {}
    if options.watch:
        watch_all(race, json.loads(Path(options.watch).read_text(encoding="utf-8")), options.output)
        return
    for name, rates in GRIDS.items():
        results[name] = race_one(race, name, rates, options.steps)
    labels = torch.cat([batch["labels"].ravel() for batch in race["held_batches"]])
    line = unigram_entropy(unigram_counts(labels, len(race["tokenizer"])))
    report = {
        "unigram_entropy": round(line, 4), "steps": options.steps, "tuning_seeds": TUNING_SEEDS,
        "python": platform.python_version(),
        "torch": torch.__version__, "parameters": race["build"](0).num_parameters(), "results": results,
    }  # fmt: skip
    if options.output:
        with atomic_write(options.output) as temporary:
            temporary.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
