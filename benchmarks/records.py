"""The recipes of benchmarks/records on the laptop's track, side by side: what each needs, and where each ends.

    python benchmarks/records.py [--only NAME ...] [--rounds 3] [--text FILE] [--quick]

A round is a seed. results/records/laptop.json holds the table, and beside it lies the log of each recipe, which
test_records.py reads. With --text the same recipes are asked about other text, on which nothing was
tuned; its held-out tenth judges, and other_text.json holds what came out. With --only or with fewer rounds nothing is
written without --output.

Run it on a quiet machine: the clock is the point.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from sides import (
    RESULTS,
    Ledger,
    alternate,
    common_parser,
    fingerprint,
    hash_of,
    machine,
    ratios,
    write_result,
)

from speedrun import TRACKS, load_recipe, race, run_seed

RECIPES = Path(__file__).parent / "records"
BASE = "first_demo"


def attempt(case: dict) -> dict:
    "One seed of one recipe: the log of `speedrun.py`, or on other text what its track gives."
    said, seed = case["recipe"], case["round"]
    if case["quick"]:
        model = {
            **said.get("model", {}),
            "scheduler_warmup_steps": 1,
            "scheduler_cooldown_steps": 1,
        }
        said |= {"model": model, "trainer": {"max_steps": 4}}
    with tempfile.TemporaryDirectory() as folder:
        if case["text"] is None:
            return race(said, TRACKS["laptop"], f"{folder}/run", [seed])
        track = replace(TRACKS["laptop"], name="other text", source=case["text"], target=None)
        return {"attempts": [vars(run_seed(track, said, f"{folder}/run", seed, track.text())[0])]}


def row(runs: list[dict], base: list[dict]) -> dict:
    "What a table shows of a recipe, beside the base's seconds of the same seed."
    shares = [
        ratios([one], [other], "train_seconds")["median"]
        for one, other in zip(runs, base, strict=True)
    ]
    return {"seconds": [round(one["train_seconds"], 2) for one in runs], "share_of_base": shares,
            "steps": runs[0]["steps"], "losses": [one["validation_loss"] for one in runs],
            "bits_per_byte": [one["bits_per_byte"] for one in runs]}  # fmt: skip


def shown(log: dict) -> str:
    run = log["attempts"][0]
    return f"{run['validation_loss']:.3f} nats, {run['bits_per_byte']:.4f} bits per byte, {run['train_seconds']:.1f} s"


def main() -> None:
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    parser = common_parser(__doc__.splitlines()[0], "records/laptop", rounds=3, free=["text"])
    raced = [name for name in names if name != BASE]  # the base runs in any case
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        default=raced,
        metavar="NAME",
        help="of benchmarks/records",
    )
    parser.add_argument("--text", help="file or directory of other text (default: the track's)")
    options = parser.parse_args()
    if options.case:
        return print(json.dumps(attempt(json.loads(options.case))))
    if options.text and options.output == RESULTS / "records" / "laptop.json":
        options.output = options.output.with_name("other_text.json")
    if options.text and not Path(options.text).exists():
        parser.error(f"--text: there is no file or directory {options.text}")
    names = list(dict.fromkeys([BASE, *options.only]))
    # Recipe and text themselves, not their names: what is kept is found again for the same ones alone.
    text = {"text": options.text, "text_hash": options.text and hash_of([Path(options.text)])}
    try:
        recipes = {name: load_recipe(RECIPES / f"{name}.yaml") for name in names}
    except ValueError as error:
        parser.error(str(error))
    cases = {
        name: {"recipe": recipe, **text, "quick": options.quick} for name, recipe in recipes.items()
    }
    kept = options.kept / f"records{'-text' * bool(options.text)}{'-quick' * options.quick}"
    ledger, where = Ledger(kept, fingerprint(__file__), options.fresh), machine(options.threads)
    logs = alternate(__file__, cases, options.rounds, options.threads, ledger, shown)
    runs = {name: [log["attempts"][0] for log in each] for name, each in logs.items()}
    write_result(options.output, {
        "what": __doc__.splitlines()[0], "machine": where,
        "text": Path(options.text).name if options.text else "the track's",
        "rows": {name: row(found, runs[BASE]) for name, found in runs.items()}})  # fmt: skip
    for name in names if options.output and not options.text else ():
        write_result(
            options.output.with_name(f"{name}.log.json"), {**logs[name][-1], "attempts": runs[name]}
        )


if __name__ == "__main__":
    main()
