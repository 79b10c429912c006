"""The reference table of the course's final project: recipes of ten minutes each, with three seeds.

    python benchmarks/final_project.py [--rounds 3] [--threads 2] [--at-once 1] [--quick]

For each recipe a short run measures how many steps this machine makes in a second; the schedule is then laid over
what fits into nine tenths of the track's time, so that the clock ends a cooldown only where the machine is slower by more than
that tenth than it was in the short run. Such a seed has made fewer `steps` than its `planned_steps`, and the end of its
cooldown is missing; it is scored all the same, and named. Seeds are rounds, recipes take turns, each run is a process of
its own, and the track's judge scores what was saved, with an interval. The page nbs/course/final_project.ipynb reads the
result. Nothing here was tuned for ten minutes: the first recipe has the rate of the first demo; the settings of the two
others come from races to its loss, in which the same held-out text was asked.
With --threads 1 --at-once 2 two runs share a machine of two cores, a core each: half the steps in half the time.
--quick trains four steps with one seed: its figures say that the script runs, and nothing else.
"""

import json
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sides import Ledger, alternate, common_parser, fingerprint, machine, run_child, write_result

TRACK, SHARE, PROBE = "ten-minutes", 0.9, 60  # PROBE: steps of the short run
RECORD = {
    "model": {
        "optimizer_class": "muon",
        "optimizer_kwargs": {"momentum": 0.85},
        "learning_rate": 1.2e-2,
    },
    "data": {"collator_kwargs": {"mlm_probability": 0.4}},
}  # of benchmarks/records/muon_two_layers.yaml
RECIPES = {  # name -> what it is, what differs from the first demo, shares of the steps up and down
    "first": ("the first demo, trained longer", {}, (0.05, 0.4)),
    "record": ("the laptop's record, trained longer: two layers and Muon", {
        **RECORD, "model": {**RECORD["model"], "model_config_kwargs": {"num_hidden_layers": 2}}}, (0.01, 0.5)),
    "wider": ("the record with four layers of 256 and two thirds of its rate", {
        **RECORD, "model": {**RECORD["model"], "learning_rate": 8e-3, "model_config_kwargs": {
            "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}}}, (0.01, 0.5)),
}  # fmt: skip


def full_recipe(name: str, steps: int) -> dict:
    "A recipe with its schedule."
    _, changes, (up, down) = RECIPES[name]
    recipe = json.loads(json.dumps(changes))  # a copy
    recipe.setdefault("model", {}).update(scheduler_warmup_steps=max(1, int(up * steps)),
                                          scheduler_cooldown_steps=int(down * steps))  # fmt: skip
    return {**recipe, "trainer": {"max_steps": steps}}


def steps_per_second(curve: list) -> float:
    "The pace of the second half of a run: compiling and first touches are over."
    (first, begun, _), (last, ended, _) = curve[len(curve) // 2], curve[-1]
    return (last - first) / max(ended - begun, 1e-9)


def measure(case: dict) -> dict:
    "Train and score one seed."
    import yaml

    from speedrun import TRACKS, load_recipe, run_seed, score_model

    track = TRACKS[TRACK]
    corpus = track.text()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "recipe.yaml"
        path.write_text(yaml.safe_dump(full_recipe(case["recipe"], case["steps"])))
        recipe, home = load_recipe(path), Path(name) / "run"
        attempt, _ = run_seed(track, recipe, home, case["round"], corpus)
        pace = {"steps_per_second": steps_per_second(attempt.curve)}
        if case.get("probe"):
            return pace
        score = score_model(home, track, corpus)
    return {"seed": case["round"], "nats": score.nats, "bits": score.bits, "line": score.baseline, "steps": attempt.steps,
            "planned_steps": case["steps"], "tokens": attempt.tokens, "train_seconds": score.seconds,
            "accuracy": attempt.validation_accuracy, "text_sha256": corpus.sha256, **pace}  # fmt: skip


def pace_of(name: str, threads: int, at_once: int, ledger: Ledger) -> float:
    "Steps per second, with as many runs beside each other as there will be; the slowest counts."
    probes = [
        {"recipe": name, "steps": PROBE, "round": copy, "probe": True} for copy in range(at_once)
    ]
    with ThreadPoolExecutor(at_once) as pool:
        found = pool.map(lambda probe: ledger.ask(json.dumps([probe, threads, at_once], sort_keys=True),
                                                  lambda: run_child(__file__, probe, threads))[0], probes)  # fmt: skip
        return min(one["steps_per_second"] for one in found)


def plan(
    names: list[str], threads: int, at_once: int, quick: bool, ledger: Ledger
) -> dict[str, dict]:
    "A case for each recipe, with as many steps as fit on this machine."
    from speedrun import TRACKS

    cases = {}
    for name in names:
        steps = 4
        if not quick:
            steps = int(SHARE * TRACKS[TRACK].seconds * pace_of(name, threads, at_once, ledger))
        cases[name] = {"recipe": name, "steps": steps}
        print(f"  {name:8} {steps:6,} steps", flush=True)
    return cases


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "final_project", rounds=3)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side (default: 1)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.case:
        print(json.dumps(measure(json.loads(options.case))))
        return
    names = list(RECIPES)[: 2 if options.quick else None]
    ledger = Ledger(
        options.kept / "final_project", fingerprint(__file__), options.fresh or options.quick
    )
    cases = plan(names, options.threads, options.at_once, options.quick, ledger)
    where = machine(options.threads)
    runs = alternate(__file__, cases, 1 if options.quick else options.rounds, options.threads, ledger,
                     lambda found: f"{found['nats'][0]:.3f} nats after {found['train_seconds']:.0f} s",
                     options.at_once)  # fmt: skip
    for name, found in runs.items():
        for one in found:
            if one["steps"] < one["planned_steps"]:
                print(
                    f"  {name:8} seed {one['seed']}: ended by the clock, {one['steps']:,} of {one['planned_steps']:,} steps"
                )
    first = runs[names[0]][0]
    write_result(options.output, {
        "machine": where, "at_once": options.at_once, "track": TRACK, "line": first["line"],
        "text_sha256": first["text_sha256"], "quick": options.quick,
        "recipes": {name: {"about": RECIPES[name][0], "recipe": full_recipe(name, cases[name]["steps"]),
                           "seeds": sorted(found, key=lambda one: one["seed"])} for name, found in runs.items()},
    })  # fmt: skip


if __name__ == "__main__":
    main()
