"""What minutes of pretraining are worth to three tasks: the first demo's recipe beside those that came after it.

    python benchmarks/minutes.py [--rounds 3] [--threads 1] [--at-once 2] [--quick]

Two recipes pretrain on the embedded corpus for 1, 3 and 10 minutes: the first demo's and the laptop's record, both of
which were tuned for a minute or less. For 10 minutes a third stands beside them, `wider` of final_project.py, which
configs/laptop.yaml has; it won there. A minute is so many steps as short runs of a recipe, in turns, make in it on all
threads of this machine; they want it to themselves. The long runs then make so many, each with a schedule of its own,
in the recipe's shares, with --at-once 2 two of them side by side on a thread each.

Each model, and those of the first two recipes without pretraining, is fine-tuned with all of its weights on a thousand
rows of each of the three offline tasks, four times over. The rate is the best of three on validation rows of the first
seed, found by recipe and task with the recipe's model of 3 minutes (`wider`: of 10). The score is the mean of the three
test scores, as GLUE's is of its tasks. A round is a seed, of both trainings. The texts of two of the tasks stand in the
corpus, test rows among them, though without their labels: on text of another kind minutes may be worth less.
"""

import json
import os
import statistics
import tempfile
from pathlib import Path

from adapters import TASKS
from adapters import measure as finetune
from final_project import full_recipe
from half_hour import PROBE, WARM, steps_per_minute
from sides import Ledger, alternate, common_parser, fingerprint, machine, spread, write_result

from bertlab.core.plots import BLUE, GREEN, ORANGE

RECIPES = {
    "first": (0, 1, 3, 10),
    "record": (0, 1, 3, 10),
    "wider": (10,),
}  # of final_project.py -> minutes
TUNED = {
    "first": 3,
    "record": 3,
    "wider": 10,
}  # minutes of the model with which a recipe's rates are found
ROWS, EPOCHS, RATES = 1000, 4, (3e-4, 1e-3, 3e-3)  # of fine-tuning


def recipe_of(name: str, steps: int) -> dict:
    "A recipe with its schedule; without steps two that change nothing, so that the model stays as it was drawn."
    recipe = full_recipe(name, max(2, steps))
    if name == "first":  # final_project.py lets it cool down for longer than the demo did
        recipe["model"]["scheduler_cooldown_steps"] = round(0.3 * steps)
    if steps == 0:
        recipe["model"]["learning_rate"] = 1e-30
    return recipe


def measure(case: dict) -> dict:
    "One pretraining, and its scores on the tasks."
    import yaml

    from speedrun import TRACKS, load_recipe, run_seed

    track, seed = TRACKS["laptop"], case["seed"]
    text = track.text()
    with tempfile.TemporaryDirectory() as name:
        path, home = Path(name) / "recipe.yaml", Path(name) / "run"
        path.write_text(yaml.safe_dump(case["with"]), encoding="utf-8")
        attempt, _ = run_seed(track, load_recipe(path), home, seed, text)
        if case.get("probe"):
            return {
                "steps_per_minute": steps_per_minute([seconds for _, seconds, _ in attempt.curve])
            }
        tasks = {task: [{"rate": rate, **finetune(str(home), task, "full", rate, seed, case["size"], case["epochs"])}
                        for rate in rates] for task, rates in case["rates"].items()}  # fmt: skip
    return {"nats": attempt.validation_loss, "tokens": attempt.tokens, "tasks": tasks}


def best(tried: list[dict]) -> dict:
    return max(tried, key=lambda one: one["validation"])


def score(found: dict) -> float:
    "The mean of the tasks' test scores, each at its best rate."
    return statistics.mean(best(tried)["test"] for tried in found["tasks"].values())


def draw(result: dict):
    "Scores by minutes, all tasks together and each: a line for each recipe, a dot for each seed."
    import matplotlib.pyplot as plt

    names = ("mean of the three", *TASKS)
    figure, panels = plt.subplots(1, 4, figsize=(11, 3.2), layout="constrained")
    looks = (
        ("first", "the first demo's", BLUE, "-o"),
        ("record", "the record's", ORANGE, "-s"),
        ("wider", "wider", GREEN, "^"),
    )
    for axes, name in zip(panels, names):
        for recipe, label, colour, look in looks:
            rows = [row for row in result["rows"] if row["recipe"] == recipe]
            scores = [row["scores"] if name not in TASKS else row["tasks"][name] for row in rows]
            places = [result["minutes"].index(row["minutes"]) for row in rows]
            axes.plot(
                places,
                [statistics.median(each) for each in scores],
                look,
                color=colour,
                label=label,
            )
            for place, each in zip(places, scores):
                axes.plot([place] * len(each), each, ".", color=colour, alpha=0.5)
        axes.set_xticks(
            range(len(result["minutes"])), [f"{minutes:g}" for minutes in result["minutes"]]
        )
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("minutes of pretraining")
    panels[0].set_ylabel("test score")
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "minutes", rounds=3)
    parser.add_argument("--at-once", type=int, default=1, help="long runs side by side")
    options = parser.parse_args()
    if options.case:
        return print(json.dumps(measure(json.loads(options.case))))
    size, epochs, rates, minutes_of, probe = ROWS, EPOCHS, RATES, RECIPES, PROBE
    if options.quick:
        size, epochs, rates, minutes_of, probe, options.rounds = (
            64,
            1,
            RATES[1:],
            {"first": (0, 3), "record": (3,)},
            WARM + 3,
            1,
        )
    ledger, where = (
        Ledger(options.kept / "minutes", fingerprint(__file__), options.fresh),
        machine(options.threads),
    )
    probes = {
        name: {"seed": 0, "with": recipe_of(name, probe), "probe": True} for name in minutes_of
    }
    found = alternate(__file__, probes, 1 if options.quick else 3, os.cpu_count(), ledger,
                      lambda f: f"{f['steps_per_minute']:.0f} steps a minute")  # fmt: skip
    pace = {
        name: statistics.median(run["steps_per_minute"] for run in runs)
        for name, runs in found.items()
    }
    if options.quick:
        pace = dict.fromkeys(pace, 2.0)
    steps = {
        (name, minutes): round(pace[name] * minutes)
        for name, each in minutes_of.items()
        for minutes in each
    }

    def ask(
        wanted: list[tuple[str, int]], seed: int, rates: dict[str, dict[str, list[float]]]
    ) -> dict:
        "Models of one seed, by recipe and minutes."
        cases = {f"{name}, {minutes} minutes, seed {seed}": {"with": recipe_of(name, steps[name, minutes]), "seed": seed,
                                                             "rates": rates[name], "size": size, "epochs": epochs}
                 for name, minutes in wanted}  # fmt: skip
        found = alternate(__file__, cases, 1, options.threads, ledger,
                          lambda f: f"{score(f):.3f} after {f['nats']:.3f} nats", options.at_once)  # fmt: skip
        return {one: runs[0] for one, runs in zip(wanted, found.values())}

    tuned = [(name, TUNED[name]) for name in minutes_of]
    first = ask(tuned, 0, {name: dict.fromkeys(TASKS, list(rates)) for name in minutes_of})
    chosen = {
        name: {
            task: [best(tried)["rate"]] for task, tried in first[name, TUNED[name]]["tasks"].items()
        }
        for name in minutes_of
    }
    seeds = [
        ask([one for one in steps if seed or one not in tuned], seed, chosen)
        for seed in range(options.rounds)
    ]
    seeds[0] |= first
    rows = []
    for (name, minutes), number in steps.items():
        runs = [seed[name, minutes] for seed in seeds]
        scores = [score(run) for run in runs]
        rows.append({"recipe": name, "minutes": minutes, "steps": number, "scores": scores, "score": spread(scores),
                     "nats": [run["nats"] for run in runs],
                     "tasks": {task: [best(run["tasks"][task])["test"] for run in runs] for task in TASKS}})  # fmt: skip
    write_result(options.output, {
        "what": __doc__.splitlines()[0], "machine": where, "minutes": sorted({minutes for _, minutes in steps}),
        "steps_per_minute": pace, "fine_tuning": {"rows": size, "epochs": epochs, "rates": list(rates)},
        "rates": {name: {task: rate for task, (rate,) in each.items()} for name, each in chosen.items()},
        "tuned": {name: run["tasks"] for (name, _), run in first.items()}, "rows": rows}, draw)  # fmt: skip


if __name__ == "__main__":
    main()
