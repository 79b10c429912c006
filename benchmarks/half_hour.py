"""What half an hour of transformers' Trainer teaches, and how soon bertlab's recipe knows as much.

    python benchmarks/half_hour.py [--rounds 3] [--theirs 30] [--ours 4] [--threads 1] [--at-once 2] [--quick]
    python benchmarks/half_hour.py --probe paces.json                   how many steps a minute holds here, and nothing else
    python benchmarks/half_hour.py --paces paces.json --device cuda --at-once 9     so many steps, made on a GPU

Both sides train one model, ModernBERT of four layers of 256, on the embedded corpus with the tokenizer of `bertlab
speedrun`, and the judge of its tracks scores what they save: the same held-out rows, the same hidden tokens. Theirs has
what Trainer offers at its best: bfloat16 where the processor multiplies it, grouped rows, so that nothing is padded,
a head that scores labels alone (`sparse_prediction`), fused AdamW, a rate that falls to nothing after a warmup, 15 or
30 % hidden, and its own rate, tuned in factors of two until the best has a worse one on each side, over a sixth of the
time. It reads whole rows as one text, so its model is scored so as well, and the better of the two scores counts. Ours
is the recipe `wider` of final_project.py, as it is.

Minutes are steps: a short run of each side, in turns, on all threads of this machine says how many it makes in a
minute, with nothing counted but training. The long runs then make so many, with --at-once 2 two of them side by side
on a thread each, so that nobody has to leave the machine alone for hours. What a step teaches is the same on a GPU, in
the precision of the machine whose minutes they are (in 32 bits with products of 32): there hours are minutes, and
--paces and --device take the long runs to one. Ours runs at a half of its minutes and at all of them, or as --spans says,
a schedule of its own each, to show where it passes.

The short run of theirs hides the larger share, whose step costs a few per cent more; where the smaller one is tuned to be
the best, Trainer gets as many per cent fewer steps than fit. A result without `probed_share` is of an earlier script,
whose short run hid the smaller share: where its long runs hide the larger one, they made a few per cent more steps than
fit into Trainer's minutes, and the result leans towards Trainer.
"""

import json
import math
import os
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from final_project import full_recipe
from pretraining import held_out_losses, their_rows
from sides import (
    Ledger,
    alternate,
    common_parser,
    fingerprint,
    judge,
    machine,
    processor,
    say,
    spread,
    write_result,
)

from bertlab.core.plots import BLUE, GREY, ORANGE, new_axes

RECIPE, ROWS, LENGTH = "wider", 16, 128
WARMUP, DECAY, CLIP, BETAS = 0.05, 0.01, 1.0, (0.9, 0.98)
RATES, SHARES = (1e-3, 2e-3, 4e-3), (0.15, 0.3)  # theirs: of the first grid; of hidden tokens
SHORT = 6  # a tuning run has so many times fewer steps
PROBE, WARM = 40, 20  # steps of a short run, and those before its clock counts


def text_and_tokenizer(documents: int | None):
    "The text of the tracks and a tokenizer trained on it."
    from speedrun import TRACKS
    from bertlab.data.corpus import embedded_corpus
    from bertlab.data.tokenizers import train_tokenizer

    track = TRACKS["ten-minutes"]
    corpus = embedded_corpus(max_documents=documents) if documents else track.text()
    return track, corpus, train_tokenizer(corpus.train_texts, track.vocab_size)


def our_model(recipe: dict):
    "The configuration of ours, which theirs says in its own words."
    from speedrun import TRACKS, race_config
    from bertlab.model.config import BertLabConfig

    shape = race_config(TRACKS["ten-minutes"], recipe, "nowhere", 0)["model"]["model_config_kwargs"]
    shape = {name: value for name, value in shape.items() if not name.startswith("attn_")}
    return BertLabConfig(**shape, vocab_size=TRACKS["ten-minutes"].vocab_size)


def steps_per_minute(times: list[float]) -> float:
    "From the times of a short run's steps, the first of them left out."
    return 60 / statistics.median(b - a for a, b in zip(times[WARM:], times[WARM + 1 :]))


def train_theirs(case: dict, corpus, tokenizer, folder: str) -> list[float]:  # when each step ended
    "transformers' Trainer; writes its model into the folder."
    from transformers import (DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments,
                              set_seed)  # fmt: skip

    from bertlab.model.huggingface import to_family_config, their_class

    rows, times = their_rows("grouped", corpus.train_texts, tokenizer), []
    set_seed(case["seed"])
    config = to_family_config(
        our_model(full_recipe(RECIPE, case["steps"])), "modernbert", "ForMaskedLM"
    )
    config.sparse_prediction = True  # scores at labels alone, as ours
    model = their_class("modernbert", "ForMaskedLM")(config)

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__) -> None:
            times.append(time.perf_counter())

    arguments = TrainingArguments(
        folder, per_device_train_batch_size=ROWS, learning_rate=case["rate"], weight_decay=DECAY, max_grad_norm=CLIP,
        adam_beta1=BETAS[0], adam_beta2=BETAS[1], optim="adamw_torch_fused", lr_scheduler_type="linear",
        warmup_steps=round(WARMUP * case["steps"]), max_steps=case["steps"], seed=case["seed"], save_strategy="no",
        bf16=case["precision"] == "bf16-mixed", report_to="none", disable_tqdm=True, logging_strategy="no",
        use_cpu=case["device"] == "cpu",
    )  # fmt: skip
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=case["share"])
    Trainer(model, arguments, collator, rows, callbacks=[Clock()]).train()
    model.config.sparse_prediction = False  # the judge asks for all scores
    model.float().cpu().save_pretrained(folder)
    return times


def train_ours(case: dict, corpus, track, folder: str) -> list[float]:
    "A recipe of `speedrun.py`; writes its model into the folder."
    import yaml

    from speedrun import load_recipe, run_seed

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "recipe.yaml"
        recipe = full_recipe(RECIPE, case["steps"])
        recipe["trainer"]["precision"] = case["precision"]
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        track = replace(
            track, accelerator=case["device"], seconds=None
        )  # the steps say when it ends
        attempt, _ = run_seed(track, load_recipe(path), folder, case["seed"], corpus)
    if attempt.steps < case["steps"]:
        raise RuntimeError(f"ours was stopped after {attempt.steps} of {case['steps']} steps, before the end of its schedule: "
                           "run it again")  # fmt: skip
    return [seconds for _, seconds, _ in attempt.curve]


def measure(case: dict) -> dict:
    "One run of a side."
    from speedrun import Judge

    track, corpus, tokenizer = text_and_tokenizer(case["documents"])
    with tempfile.TemporaryDirectory() as name:
        folder = str(Path(name) / "run")
        times = (train_ours(case, corpus, track, folder) if case["side"] == "ours"
                 else train_theirs(case, corpus, tokenizer, folder))  # fmt: skip
        batches = Judge(track, corpus, tokenizer).data.val_dataloader()
        found = {} if case.get("probe") else held_out_losses(folder, batches)
    return {
        **found,
        "nats": min(found.values(), default=None),
        "steps_per_minute": steps_per_minute(times),
    }


def device_name(device: str) -> str:
    return processor() if device == "cpu" else torch.cuda.get_device_name()


def measure_paces(
    sides: list[str], steps: int, documents: int | None, options, ledger: Ledger
) -> dict:
    "Steps that a minute of each side holds, with all threads of this machine, or with those that a call for this alone asks for."
    threads = options.threads if options.probe else os.cpu_count()
    where = machine(threads)
    probes = {side: {"documents": documents, "device": "cpu", "precision": where["computes_in"], "side": side, "seed": 0,
                     "steps": steps, "rate": RATES[0], "share": max(SHARES), "probe": True} for side in sides}  # fmt: skip
    found = alternate(__file__, probes, 1 if options.quick else 3, threads, ledger,
                      lambda f: f"{f['steps_per_minute']:.0f} steps a minute")  # fmt: skip
    each = {side: [run["steps_per_minute"] for run in runs] for side, runs in found.items()}
    return {"machine": where, "steps_per_minute": {side: statistics.median(rates) for side, rates in each.items()},
            "steps_per_minute_of_runs": each, "probed_share": max(SHARES)}  # fmt: skip


def tuned(base: dict, steps: int, options, ledger: Ledger) -> dict:
    "Theirs over shares and rates on seed 0, and further while the best rate of a share lies at an end."
    tried, next_ones = {}, [(share, rate) for share in SHARES for rate in RATES]
    while next_ones:
        cases = {f"{share:g} hidden, rate {rate:g}": {**base, "side": "theirs", "seed": 0, "rate": rate, "share": share,
                                                      "steps": steps} for share, rate in next_ones}  # fmt: skip
        found = alternate(
            __file__,
            cases,
            1,
            options.threads,
            ledger,
            lambda f: f"{f['nats']:.3f} nats",
            options.at_once,
        )
        tried |= {
            (cases[name]["share"], cases[name]["rate"]): runs[0]["nats"]
            for name, runs in found.items()
        }
        next_ones = []
        for share in () if options.quick else SHARES:
            own = {rate: nats for (s, rate), nats in tried.items() if s == share}
            lowest = min(own, key=own.get)
            next_ones += [
                (share, rate)
                for at, rate in ((min(own), lowest / 2), (max(own), lowest * 2))
                if lowest == at
            ]
    best = min(tried, key=tried.get)
    return {"share": best[0], "rate": best[1],
            "tried": [{"share": s, "rate": r, "nats": nats} for (s, r), nats in tried.items()]}  # fmt: skip


def minutes_needed(ours: dict[str, list[float]], target: float) -> float | None:
    "When our median reaches a loss, on a line over log minutes; the first span where it has already; None: in none of them."
    points = [(math.log(float(span)), statistics.median(runs)) for span, runs in ours.items()]
    if points[0][1] <= target:
        return math.exp(points[0][0])
    for (before, high), (after, low) in zip(points, points[1:]):
        if high >= target > low:
            return math.exp(before + (high - target) / (high - low) * (after - before))
    return None


def draw(result: dict):
    "Losses of both sides by minutes; a dot for each seed, a line through the medians."
    figure, axes = new_axes(
        "minutes of training, on a logarithmic scale",
        "held-out loss (nats per hidden token)",
        size=(6, 3.5),
    )
    for side, name, colour in (("theirs", "Trainer", ORANGE), ("ours", "bertlab", BLUE)):
        losses = result["losses"][side]
        spans = [float(minutes) for minutes in losses]
        axes.plot(spans, [statistics.median(runs) for runs in losses.values()], color=colour, lw=1)
        for number, (minutes, runs) in enumerate(zip(spans, losses.values())):
            axes.plot(
                [minutes] * len(runs), runs, "o", ms=4, color=colour, label=None if number else name
            )
    axes.axhline(
        statistics.median(result["losses"]["theirs"][f"{result['minutes']['theirs']:g}"]),
        color=GREY,
        lw=0.8,
    )
    ticks = sorted({float(minutes) for side in result["losses"].values() for minutes in side})
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{minutes:g}" for minutes in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False)
    return figure


def main() -> None:
    parser = common_parser(
        __doc__.splitlines()[0], "half_hour", rounds=3, free=("probe", "paces", "device", "spans")
    )
    parser.add_argument("--theirs", type=float, default=30, help="minutes of Trainer")
    parser.add_argument("--ours", type=float, default=4, help="minutes that ours may take")
    parser.add_argument("--at-once", type=int, default=1, help="long runs side by side")
    parser.add_argument(
        "--spans",
        nargs="+",
        type=float,
        default=[0.5, 1],
        metavar="N",
        help="of our minutes (default: 0.5 1)",
    )
    parser.add_argument(
        "--probe",
        type=Path,
        metavar="FILE",
        help="measure this machine's steps a minute, write them, and end",
    )
    parser.add_argument(
        "--paces",
        type=Path,
        metavar="FILE",
        help="steps a minute of another machine, as --probe wrote them",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of the long runs (default: cpu)"
    )
    options = parser.parse_args()
    if options.case:
        return print(json.dumps(measure(json.loads(options.case))))
    minutes, probe, documents = {"theirs": options.theirs, "ours": options.ours}, PROBE, None
    if options.quick:
        options.rounds, documents, minutes, probe = 1, 600, {"theirs": 0.01, "ours": 0.01}, WARM + 3
    ledger = Ledger(options.kept / "half_hour", fingerprint(__file__), options.fresh)
    if options.paces:
        paces = json.loads(options.paces.read_text(encoding="utf-8"))
    else:
        paces = measure_paces(list(minutes), probe, documents, options, ledger)
    if options.probe:
        return write_result(options.probe, paces)
    where, pace = paces["machine"], paces["steps_per_minute"]
    base = {"documents": documents, "device": options.device, "card": device_name(options.device),
            "precision": where["computes_in"]}  # fmt: skip
    steps = {side: max(WARM + 2, round(pace[side] * minutes[side])) for side in minutes}
    best = tuned(base, max(WARM + 2, steps["theirs"] // SHORT), options, ledger)
    spans = {
        f"{minutes['ours'] * span:g}": max(WARM + 2, round(steps["ours"] * span))
        for span in sorted({*options.spans, 1.0})
    }
    cases = {"theirs": {**base, "side": "theirs", "steps": steps["theirs"], "rate": best["rate"], "share": best["share"]},
             **{f"ours, {span}": {**base, "side": "ours", "steps": count} for span, count in spans.items()}}  # fmt: skip
    seeded = {f"{name}, seed {seed}": {**case, "seed": seed} for name, case in cases.items()
              for seed in range(options.rounds)}  # fmt: skip
    found = alternate(
        __file__,
        seeded,
        1,
        options.threads,
        ledger,
        lambda f: f"{f['nats']:.3f} nats",
        options.at_once,
    )
    runs = {
        name: [found[f"{name}, seed {seed}"][0] for seed in range(options.rounds)] for name in cases
    }
    nats = {name: [run["nats"] for run in found] for name, found in runs.items()}
    ours = {span: nats[f"ours, {span}"] for span in spans}
    gaps = [theirs - mine for theirs, mine in zip(nats["theirs"], ours[f"{minutes['ours']:g}"])]
    judged = [judge(f"nats below {minutes['theirs']:g} minutes of Trainer after {minutes['ours']:g} of ours, the least of "
                    f"{options.rounds} seeds", min(gaps), at_least=0.0)]  # fmt: skip
    say(judged)
    write_result(options.output, {
        "what": __doc__.splitlines()[0], "machine": where, "trained_on": {"device": base["card"], "torch": str(torch.__version__),
                                           "python": platform.python_version()},
        "judged": judged, "minutes": minutes, **{name: value for name, value in paces.items() if name != "machine"},
        "steps": {name: case["steps"] for name, case in cases.items()}, "tuned": best, "nats_below": spread(gaps),
        "minutes_needed": minutes_needed(ours, statistics.median(nats["theirs"])),
        "losses": {"theirs": {f"{minutes['theirs']:g}": nats["theirs"]}, "ours": ours},
        "runs": runs}, draw)  # fmt: skip


if __name__ == "__main__":
    main()
