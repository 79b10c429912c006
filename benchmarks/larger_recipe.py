"""Does the laptop's recipe win at the shape of configs/colab-gpu.yaml, too?

    python benchmarks/larger_recipe.py TEXTS ... [--steps 400] [--rounds 3] [--sides ...] [--device cuda] [--at-once 3] [--quick]

Sides train one model, eight layers of 384, with batches of 65,536 tokens in rows of 256, as the configuration says:

- published: the betas, the decay, the schedule and the share of hidden tokens that the configuration says: AdamW, 30 %
  hidden, a fall over a fifth of the steps
- shares: AdamW with the schedule and the hidden share of the laptop: a fall over half of the steps, 40 % hidden
- muon: the laptop's optimizer and momentum, with its schedule and its hidden share

Each side's peak rate is tuned on seed 0, in factors of two until the best has a worse one on each side; then every seed
runs at that rate. The judge of `speedrun.py` scores all: the same held-out rows, the same hidden tokens. TEXTS are
files or folders of your own, one document in a file, or what else `load_corpus` reads; without them it is the embedded
corpus, which this shape knows by heart after some hundred steps. Equal steps are equal tokens; what a step costs is
told by steps_per_minute, which means something with --at-once 1 alone.
"""

import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from sides import (
    Ledger,
    alternate,
    common_parser,
    fingerprint,
    judge,
    machine,
    say,
    spread,
    write_result,
)

LENGTH, ROWS, VOCABULARY, HELD_OUT = 256, 256, 16_384, 0.05
SHAPE = dict(
    hidden_size=384,
    intermediate_size=768,
    num_hidden_layers=8,
    num_attention_heads=6,
    max_position_embeddings=1024,
)
PUBLISHED = {"warmup": 400 / 7500, "cooldown": 1500 / 7500, "hidden": {"mlm_probability": 0.3}}
LAPTOP = {"warmup": 0.01, "cooldown": 0.5,
          "hidden": {"mlm_probability": 0.4, "selection": "exact", "min_labels_per_document": 1}}  # fmt: skip
ADAMW = {
    "optimizer_class": "adamw",
    "optimizer_kwargs": {"betas": [0.9, 0.98], "eps": 1e-6},
    "weight_decay": 0.01,
}
MUON = {
    "optimizer_class": "muon",
    "optimizer_kwargs": {"momentum": 0.85, "betas": [0.9, 0.98], "eps": 1e-6},
    "weight_decay": 0.05,
}
SIDES = {  # name -> (optimizer, schedule and share, rates of the first grid)
    "published": (ADAMW, PUBLISHED, (1e-3, 2e-3, 4e-3)),
    "shares": (ADAMW, LAPTOP, (1e-3, 2e-3, 4e-3)),
    "muon": (MUON, LAPTOP, (2e-3, 4e-3, 8e-3, 16e-3)),
}


def recipe(case: dict) -> dict:
    "A recipe of `speedrun.py`."
    optimizer, plan, _ = SIDES[case["side"]]
    shape, rows, precision = SHAPE, ROWS, "32-true" if case["device"] == "cpu" else "bf16-mixed"
    if case["quick"]:
        shape, rows = (
            {
                **SHAPE,
                "hidden_size": 48,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
            },
            4,
        )
    return {
        "model": {**optimizer, "model_config_kwargs": {**shape, "local_attention": 128, "initializer_range": 0.02},
                  "learning_rate": case["rate"], "scheduler_warmup_steps": max(1, round(plan["warmup"] * case["steps"])),
                  "scheduler_cooldown_steps": round(plan["cooldown"] * case["steps"])},
        "data": {"train_batch_size": rows, "collator_kwargs": dict(plan["hidden"]), "num_workers": 0 if case["quick"] else 2},
        "trainer": {"max_steps": case["steps"], "precision": precision},
    }  # fmt: skip


def read_corpus(texts: list[str] | None, documents: int | None):
    "A text with a part that is held out."
    from bertlab.data.corpus import load_corpus

    return load_corpus(texts or None, validation_fraction=HELD_OUT, max_documents=documents)


def measure(case: dict) -> dict:
    "One run of a side."
    from speedrun import TRACKS, load_recipe, run_seed

    corpus = read_corpus(case["texts"], case["documents"])
    track = replace(TRACKS["ten-minutes"], seconds=None, accelerator=case["device"], max_sequence_length=LENGTH,
                    vocab_size=1024 if case["quick"] else VOCABULARY)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe(case)), encoding="utf-8")
        attempt, hidden = run_seed(
            track, load_recipe(path), Path(folder) / "run", case["seed"], corpus
        )
    (first, begin, _), (last, end, _) = attempt.curve[len(attempt.curve) // 2], attempt.curve[-1]
    return {"nats": attempt.validation_loss, "bits_per_byte": attempt.bits_per_byte, "accuracy": attempt.validation_accuracy,
            "tokens": attempt.tokens, "hidden_sha256": hidden, "text_sha256": corpus.sha256,
            "steps_per_minute": 60 * (last - first) / max(1e-9, end - begin)}  # fmt: skip


def tuned(side: str, base: dict, options, ledger: Ledger) -> dict:
    "The best rate of a side on seed 0, between worse ones."
    tried, new = {}, list(SIDES[side][2])
    while new:
        cases = {
            f"{side}, rate {rate:g}": {**base, "side": side, "seed": 0, "rate": rate}
            for rate in new
        }
        found = alternate(__file__, cases, 1, options.threads, ledger, show, options.at_once)
        tried |= {cases[name]["rate"]: runs[0]["nats"] for name, runs in found.items()}
        best = min(tried, key=tried.get)
        new = (
            []
            if options.quick
            else [
                next_one
                for end, next_one in ((min(tried), best / 2), (max(tried), best * 2))
                if best == end
            ]
        )
    return {"rate": best, "tried": {f"{rate:g}": nats for rate, nats in sorted(tried.items())}}


def show(figures: dict) -> str:
    return f"{figures['nats']:.4f} nats  {figures['bits_per_byte']:.4f} bits per byte  {figures['steps_per_minute']:.0f} steps a minute"


def main() -> None:
    parser = common_parser(
        __doc__.splitlines()[0], "larger_recipe", rounds=3, free=("texts", "device")
    )
    parser.add_argument("texts", nargs="*", help="files, folders; none: the embedded corpus")
    parser.add_argument("--steps", type=int, default=400, help="of a run (default: 400)")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=list(SIDES), help="these alone"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    options = parser.parse_args()
    if options.case:
        return print(json.dumps(measure(json.loads(options.case))))
    if options.quick:
        options.rounds, options.steps = 1, 4
    begin = time.perf_counter()
    ledger = Ledger(options.kept / "larger_recipe", fingerprint(__file__), options.fresh)
    base = {"texts": [os.path.abspath(path) for path in options.texts], "documents": 200 if options.quick else None,
            "device": options.device, "card": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
            "steps": options.steps, "quick": options.quick}  # fmt: skip
    best = {side: tuned(side, base, options, ledger) for side in options.sides}
    cases = {f"{side}, seed {seed}": {**base, "side": side, "seed": seed, "rate": best[side]["rate"]}
             for seed in range(options.rounds) for side in options.sides}  # fmt: skip
    found = alternate(__file__, cases, 1, options.threads, ledger, show, options.at_once)
    runs = {
        side: [found[f"{side}, seed {seed}"][0] for seed in range(options.rounds)]
        for side in options.sides
    }
    bits = {side: [run["bits_per_byte"] for run in each] for side, each in runs.items()}
    first, *others = options.sides
    gains = {
        side: [before - after for before, after in zip(bits[first], bits[side])] for side in others
    }
    judged = [judge(f"bits per byte that {side} gains on {first}, the least of {options.rounds} seeds", min(gain), at_least=0.0)
              for side, gain in gains.items()]  # fmt: skip
    say(judged)
    write_result(options.output, {
        "what": __doc__.splitlines()[0], "machine": machine(options.threads),
        "trained_on": base["card"], "judged": judged,
        "texts": [Path(path).name for path in options.texts] or ["embedded corpus"], "steps": options.steps,
        "tokens_per_step": LENGTH * ROWS, "tuned": best, "recipes": {
            side: recipe({**base, "side": side, "rate": best[side]["rate"]}) for side in options.sides},
        "bits_per_byte": {side: spread(each) for side, each in bits.items()},
        "gains": {side: spread(each) for side, each in gains.items()}, "runs": runs,
        "seconds": round(time.perf_counter() - begin)})  # fmt: skip


if __name__ == "__main__":
    main()
