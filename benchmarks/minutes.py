"""What minutes of pretraining are worth to three tasks: the first demo's recipe beside the record's.

    python benchmarks/minutes.py [--rounds 3] [--threads 1] [--at-once 2] [--quick]

Both recipes pretrain on the embedded corpus for 1, 3 and 10 minutes, which is so many steps as this recipe made in
that time in the table of records of a processor of this kind, with bfloat16 or without, whatever else the machine does
now; each number of steps is a schedule of its own, in the recipe's shares. Then each model is fine-tuned with all of
its weights on a thousand rows of each of the three offline tasks, four times over; a model without pretraining
stands beside them. The rate is the one that adapters.py found best for all weights on each of these tasks. The score
is the mean of the three test scores, as GLUE's is of its tasks. A round is a seed, of both trainings.
"""

import json
import statistics
import tempfile
from pathlib import Path

from adapters import TASKS
from adapters import measure as finetune
from final_project import full_recipe
from sides import RESULTS, Ledger, alternate, common_parser, fingerprint, machine, spread, write_result

from bertlab.core.plots import BLUE, ORANGE, new_axes

RECIPES = {"first": "first_demo", "record": "muon_two_layers"}  # of final_project.py -> in the table of records
MINUTES = (1, 3, 10)
ROWS, EPOCHS, RATE = 1000, 4, 1e-3  # of fine-tuning


def table_of_records() -> Path:
    "The one of processors that multiply as this one does."
    from bertlab.core.devices import describe_device

    place = RESULTS / "records"
    return (place if describe_device().precision == "bf16-mixed" else place / "without_bfloat16") / "laptop.json"


def steps_in(recipe: str, minutes: float) -> int:
    "Steps of a recipe in so many minutes on the machine of the table of records."
    row = json.loads(table_of_records().read_text(encoding="utf-8"))["rows"][RECIPES[recipe]]
    return round(60 * minutes * row["steps"] / statistics.median(row["seconds"]))


def measure(case: dict) -> dict:
    "One pretraining, and its scores on the tasks."
    import yaml

    from bertlab.cli.speedrun import TRACKS, load_speedrun, run_seed

    track, seed = TRACKS["laptop"], case["round"]
    text = track.text()
    with tempfile.TemporaryDirectory() as name:
        path, home = Path(name) / "recipe.yaml", Path(name) / "run"
        recipe = full_recipe(case["recipe"], max(2, case["steps"]))
        if case["steps"] == 0:
            recipe["model"]["learning_rate"] = 1e-30  # two steps that change nothing: the model as it was drawn
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        attempt, _ = run_seed(track, load_speedrun(path), home, seed, text)
        scores = {task: finetune(str(home), task, "full", RATE, seed, case["size"], case["epochs"])["test"] for task in TASKS}
    return {"nats": attempt.validation_loss, "tokens": attempt.tokens, "tasks": scores,
            "score": statistics.mean(scores.values())}  # fmt: skip


def draw(result: dict):
    "The score by minutes, a line for each recipe, a dot for each seed."
    figure, axes = new_axes("minutes of pretraining", "mean score of three tasks", size=(6, 3.5))
    for recipe, name, colour in (("first", "the first demo's recipe", BLUE), ("record", "the record's", ORANGE)):
        rows = [row for row in result["rows"] if row["recipe"] == recipe]
        places = range(len(rows))
        axes.plot(places, [row["score"]["median"] for row in rows], "-o", color=colour, label=name)
        for place, row in zip(places, rows):
            axes.plot([place] * len(row["scores"]), row["scores"], ".", color=colour, alpha=0.5)
        axes.set_xticks(places, [f"{row['minutes']:g}" for row in rows])
    axes.legend(frameon=False)
    return figure


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "minutes", rounds=3)
    parser.add_argument("--at-once", type=int, default=1, help="pretrainings side by side")
    options = parser.parse_args()
    if options.case:
        return print(json.dumps(measure(json.loads(options.case))))
    size, epochs, minutes = ROWS, EPOCHS, (0, *MINUTES)
    steps = steps_in
    if options.quick:
        size, epochs, minutes, options.rounds, steps = 64, 1, (0, 1), 1, lambda recipe, minutes: 4 * minutes
    cases = {f"{recipe}, {minute} minutes": {"recipe": recipe, "minutes": minute, "steps": steps(recipe, minute),
                                             "size": size, "epochs": epochs}
             for minute in minutes for recipe in RECIPES}  # fmt: skip
    ledger, where = Ledger(options.kept / "minutes", fingerprint(__file__), options.fresh), machine(options.threads)
    runs = alternate(__file__, cases, options.rounds, options.threads, ledger,
                     lambda found: f"{found['score']:.3f} after {found['nats']:.3f} nats", options.at_once)  # fmt: skip
    rows = []
    for name, found in runs.items():
        case, scores = cases[name], [one["score"] for one in found]
        rows.append({"recipe": case["recipe"], "minutes": case["minutes"], "steps": case["steps"], "scores": scores,
                     "score": spread(scores), "nats": [one["nats"] for one in found],
                     "tasks": {task: [one["tasks"][task] for one in found] for task in TASKS}})  # fmt: skip
    write_result(Path(options.output), {
        "what": __doc__.splitlines()[0], "machine": where, "minutes_of": str(table_of_records().relative_to(RESULTS)),
        "minutes": list(minutes), "fine_tuning": {"rows": size, "epochs": epochs, "rate": RATE}, "rows": rows}, draw)  # fmt: skip


if __name__ == "__main__":
    main()
