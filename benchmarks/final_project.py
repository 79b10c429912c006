"""The reference table of the course's final project: recipes of ten minutes each, with three seeds.

    python benchmarks/final_project.py [--rounds 3] [--threads 2] [--quick]

For each recipe a short run measures how many steps this machine makes in a second; the schedule is then laid over
what fits into nine tenths of the track's time, so that the clock ends no cooldown. Seeds are rounds, recipes take
turns, each run is a process of its own, and the track's judge scores what was saved, with an interval. The page
nbs/course/final_project.ipynb reads the result. Nothing here was tuned on the held-out text: the rates are those of
the demo, scaled down for wider models.
--quick trains four steps with one seed: its figures say that the script runs, and nothing else.
"""

import json
import tempfile
import warnings
from pathlib import Path

from sides import Ledger, alternate, common_parser, fingerprint, machine, run_child, write_result

TRACK, SHARE, PROBE = "ten-minutes", 0.9, 60  # PROBE: steps of the short run
RECIPES = {  # name -> what it is, what differs from the demo
    "demo": ("the demo's model, trained longer", {}),
    "small": ("half the width, three layers", {"model": {"model_config_kwargs": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 2}}}),
    "wide": ("256 wide, six layers, a lower rate", {"model": {"learning_rate": 1.5e-3, "model_config_kwargs": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4}}}),
    "sparse": ("the demo's model, 15 % hidden in training", {"data": {"collator_kwargs": {"mlm_probability": 0.15}}}),
}  # fmt: skip


def full_recipe(name: str, steps: int) -> dict:
    "A recipe with its schedule: a twentieth of the steps up, four tenths down."
    recipe = json.loads(json.dumps(RECIPES[name][1]))  # a copy
    recipe.setdefault("model", {}).update(scheduler_warmup_steps=max(1, steps // 20),
                                          scheduler_cooldown_steps=2 * steps // 5)  # fmt: skip
    return {**recipe, "trainer": {"max_steps": steps}}


def steps_per_second(curve: list) -> float:
    "The pace of the second half of a run: compiling and first touches are over."
    (first, begun, _), (last, ended, _) = curve[len(curve) // 2], curve[-1]
    return (last - first) / max(ended - begun, 1e-9)


def measure(case: dict) -> dict:
    "Train and score one seed."
    import yaml

    from bertlab.cli.speedrun import TRACKS, load_speedrun, run_seed, score_model

    track = TRACKS[TRACK]
    corpus = track.text()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "recipe.yaml"
        path.write_text(yaml.safe_dump(full_recipe(case["recipe"], case["steps"])))
        recipe, home = load_speedrun(path), Path(name) / "run"
        attempt, _ = run_seed(track, recipe, home, case["round"], corpus)
        pace = {"steps_per_second": steps_per_second(attempt.curve)}
        if case.get("probe"):
            return pace
        score = score_model(home, TRACK, corpus)
    return {"seed": case["round"], "nats": score.nats, "bits": score.bits, "line": score.line, "steps": attempt.steps,
            "planned_steps": case["steps"], "tokens": attempt.tokens, "train_seconds": score.seconds,
            "accuracy": attempt.validation_accuracy, "text_sha256": corpus.sha256, **pace}  # fmt: skip


def plan(names: list[str], threads: int, quick: bool, ledger: Ledger) -> dict[str, dict]:
    "A case for each recipe, with as many steps as fit on this machine."
    from bertlab.cli.speedrun import TRACKS

    cases = {}
    for name in names:
        steps = 4
        if not quick:
            probe = {"recipe": name, "steps": PROBE, "round": 0, "probe": True}
            pace, _ = ledger.ask(json.dumps([probe, threads], sort_keys=True), lambda: run_child(__file__, probe, threads))  # noqa: B023
            steps = int(SHARE * TRACKS[TRACK].seconds * pace["steps_per_second"])
        cases[name] = {"recipe": name, "steps": steps}
        print(f"  {name:8} {steps:6,} steps", flush=True)
    return cases


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "final_project", rounds=3)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.case:
        print(json.dumps(measure(json.loads(options.case))))
        return
    names = list(RECIPES)[: 2 if options.quick else None]
    ledger = Ledger(options.kept / "final_project", fingerprint(__file__), options.fresh or options.quick)
    cases = plan(names, options.threads, options.quick, ledger)
    where = machine(options.threads)
    runs = alternate(__file__, cases, 1 if options.quick else options.rounds, options.threads, ledger,
                     lambda found: f"{found['nats'][0]:.3f} nats after {found['train_seconds']:.0f} s")  # fmt: skip
    first = runs[names[0]][0]
    write_result(options.output, {
        "machine": where, "track": TRACK, "line": first["line"], "text_sha256": first["text_sha256"],
        "quick": options.quick,
        "recipes": {name: {"about": RECIPES[name][0], "recipe": full_recipe(name, cases[name]["steps"]),
                           "seeds": sorted(found, key=lambda one: one["seed"])} for name, found in runs.items()},
    })  # fmt: skip


if __name__ == "__main__":
    main()
