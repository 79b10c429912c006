"""What half an hour of transformers' Trainer teaches, and how soon bertlab's recipe knows as much.

    python benchmarks/half_hour.py [--rounds 3] [--theirs 30] [--ours 4] [--threads 1] [--at-once 2] [--quick]

Both sides train one model, ModernBERT of four layers of 256, on the embedded corpus with the tokenizer of `bertlab
speedrun`, and the judge of its tracks scores what they save: the same held-out rows, the same hidden tokens. Theirs has
what Trainer offers at its best: bfloat16 where the processor multiplies it, grouped rows, so that nothing is padded,
a head that scores labels alone (`sparse_prediction`), fused AdamW, a rate that falls to nothing after a warmup, 15 or
30 % hidden, and its own rate, tuned in factors of two until the best has a worse one on each side, over a sixth of the
time. It reads whole rows as one text, so its model is scored so as well, and the better of the two scores counts. Ours
is the recipe `wider` of final_project.py, as it is.

Minutes are steps: a short run of each side, in turns, on all threads of this machine says how many it makes in a
minute, with nothing counted but training. The long runs then make so many, with --at-once 2 two of them side by side
on a thread each, so that nobody has to leave the machine alone for hours. Ours runs at a half of its minutes and at all of
them, a schedule of its own each, to show where it passes.
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from final_project import full_recipe
from pretraining import held_out_losses, their_rows
from sides import Ledger, alternate, common_parser, fingerprint, judge, machine, say, spread, write_result

from bertlab.core.plots import BLUE, GREY, ORANGE, new_axes

RECIPE, ROWS, LENGTH = "wider", 16, 128
WARMUP, DECAY, CLIP, BETAS = 0.05, 0.01, 1.0, (0.9, 0.98)
RATES, SHARES = (1e-3, 2e-3, 4e-3), (0.15, 0.3)  # theirs: of the first grid; of hidden tokens
SHORT = 6  # a tuning run has so many times fewer steps
PROBE, WARM = 40, 20  # steps of a short run, and those before its clock counts


def text_and_tokenizer(documents: int | None):
    "The text of the tracks and a tokenizer trained on it."
    from bertlab.cli.speedrun import TRACKS
    from bertlab.data.corpus import embedded_corpus
    from bertlab.data.tokenizers import train_tokenizer

    track = TRACKS["ten-minutes"]
    corpus = embedded_corpus(max_documents=documents) if documents else track.text()
    return track, corpus, train_tokenizer(corpus.train_texts, track.vocab_size)


def our_model(recipe: dict):
    "The configuration of ours, which theirs says in its own words."
    from bertlab.cli.speedrun import TRACKS, speedrun_config
    from bertlab.model.config import BertLabConfig

    shape = speedrun_config(TRACKS["ten-minutes"], recipe, "nowhere", 0)["model"]["model_config_kwargs"]
    shape = {name: value for name, value in shape.items() if not name.startswith("attn_")}
    return BertLabConfig(**shape, vocab_size=TRACKS["ten-minutes"].vocab_size)


def steps_per_minute(times: list[float]) -> float:
    "From the times of a short run's steps, the first of them left out."
    return 60 / statistics.median(b - a for a, b in zip(times[WARM:], times[WARM + 1 :]))


def train_theirs(case: dict, corpus, tokenizer, folder: str) -> list[float]:  # when each step ended
    "transformers' Trainer; writes its model into the folder."
    from transformers import (DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments,
                              set_seed)  # fmt: skip

    from bertlab.core.devices import describe_device
    from bertlab.model.huggingface import huggingface_config, their_class

    rows, times = their_rows("grouped", corpus.train_texts, tokenizer), []
    set_seed(case["seed"])
    config = huggingface_config(our_model(full_recipe(RECIPE, case["steps"])), "modernbert", "ForMaskedLM")
    config.sparse_prediction = True  # scores at labels alone, as ours
    model = their_class("modernbert", "ForMaskedLM")(config)

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__) -> None:
            times.append(time.perf_counter())

    arguments = TrainingArguments(
        folder, per_device_train_batch_size=ROWS, learning_rate=case["rate"], weight_decay=DECAY, max_grad_norm=CLIP,
        adam_beta1=BETAS[0], adam_beta2=BETAS[1], optim="adamw_torch_fused", lr_scheduler_type="linear",
        warmup_steps=round(WARMUP * case["steps"]), max_steps=case["steps"], seed=case["seed"], save_strategy="no",
        bf16=describe_device().precision == "bf16-mixed", report_to="none", disable_tqdm=True, logging_strategy="no",
        use_cpu=True,
    )  # fmt: skip
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=case["share"])
    Trainer(model, arguments, collator, rows, callbacks=[Clock()]).train()
    model.config.sparse_prediction = False  # the judge asks for all scores
    model.float().save_pretrained(folder)
    return times


def train_ours(case: dict, corpus, track, folder: str) -> list[float]:
    "A recipe of `bertlab speedrun`; writes its model into the folder."
    import yaml

    from bertlab.cli.speedrun import load_speedrun, run_seed

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "recipe.yaml"
        path.write_text(yaml.safe_dump(full_recipe(RECIPE, case["steps"])), encoding="utf-8")
        attempt, _ = run_seed(track, load_speedrun(path), folder, case["seed"], corpus)
    return [seconds for _, seconds, _ in attempt.curve]


def measure(case: dict) -> dict:
    "One run of a side."
    from bertlab.cli.speedrun import Judge

    track, corpus, tokenizer = text_and_tokenizer(case["documents"])
    with tempfile.TemporaryDirectory() as name:
        folder = str(Path(name) / "run")
        times = (train_ours(case, corpus, track, folder) if case["side"] == "ours"
                 else train_theirs(case, corpus, tokenizer, folder))  # fmt: skip
        batches = Judge(track, corpus, tokenizer).data.val_dataloader()
        found = {} if case.get("probe") else held_out_losses(folder, batches)
    return {**found, "nats": min(found.values(), default=None), "steps_per_minute": steps_per_minute(times)}


def tuned(base: dict, steps: int, options, ledger: Ledger) -> dict:
    "Theirs over shares and rates on seed 0, and further while the best rate of a share lies at an end."
    tried, next_ones = {}, [(share, rate) for share in SHARES for rate in RATES]
    while next_ones:
        cases = {f"{share:g} hidden, rate {rate:g}": {**base, "side": "theirs", "seed": 0, "rate": rate, "share": share,
                                                      "steps": steps} for share, rate in next_ones}  # fmt: skip
        found = alternate(__file__, cases, 1, options.threads, ledger, lambda f: f"{f['nats']:.3f} nats", options.at_once)
        tried |= {(cases[name]["share"], cases[name]["rate"]): runs[0]["nats"] for name, runs in found.items()}
        next_ones = []
        for share in () if options.quick else SHARES:
            own = {rate: nats for (s, rate), nats in tried.items() if s == share}
            lowest = min(own, key=own.get)
            next_ones += [(share, rate) for at, rate in ((min(own), lowest / 2), (max(own), lowest * 2)) if lowest == at]
    best = min(tried, key=tried.get)
    return {"share": best[0], "rate": best[1],
            "tried": [{"share": s, "rate": r, "nats": nats} for (s, r), nats in tried.items()]}  # fmt: skip


def draw(result: dict):
    "Losses of both sides by minutes; a dot for each seed."
    figure, axes = new_axes("minutes of training", "validation loss (nats per hidden token)", size=(6, 3.5))
    for side, colour in (("theirs", ORANGE), ("ours", BLUE)):
        for minutes, runs in result["losses"][side].items():
            axes.plot([float(minutes)] * len(runs), runs, ".", color=colour, label=side if minutes == max(
                result["losses"][side], key=float) else None)  # fmt: skip
    axes.axhline(statistics.median(result["losses"]["theirs"][f"{result['minutes']['theirs']:g}"]), color=GREY, lw=0.8)
    axes.legend(frameon=False)
    return figure


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "half_hour", rounds=3)
    parser.add_argument("--theirs", type=float, default=30, help="minutes of Trainer")
    parser.add_argument("--ours", type=float, default=4, help="minutes that ours may take")
    parser.add_argument("--at-once", type=int, default=1, help="long runs side by side")
    options = parser.parse_args()
    if options.case:
        return print(json.dumps(measure(json.loads(options.case))))
    minutes, probe, documents = {"theirs": options.theirs, "ours": options.ours}, PROBE, None
    if options.quick:
        options.rounds, documents, minutes, probe = 1, 600, {"theirs": 0.01, "ours": 0.01}, WARM + 3
    where = machine(options.threads)
    ledger = Ledger(options.kept / "half_hour", fingerprint(__file__), options.fresh)
    base = {"documents": documents}
    probes = {side: {**base, "side": side, "seed": 0, "steps": probe, "rate": RATES[0], "share": SHARES[0], "probe": True}
              for side in minutes}  # fmt: skip
    found = alternate(__file__, probes, 1 if options.quick else 3, os.cpu_count(), ledger,
                      lambda f: f"{f['steps_per_minute']:.0f} steps a minute")  # fmt: skip
    pace = {side: statistics.median(run["steps_per_minute"] for run in runs) for side, runs in found.items()}
    steps = {side: max(WARM + 2, round(pace[side] * minutes[side])) for side in minutes}
    best = tuned(base, max(WARM + 2, steps["theirs"] // SHORT), options, ledger)
    cases = {"theirs": {**base, "side": "theirs", "steps": steps["theirs"], "rate": best["rate"], "share": best["share"]},
             "ours, half": {**base, "side": "ours", "steps": max(WARM + 2, steps["ours"] // 2)},
             "ours": {**base, "side": "ours", "steps": steps["ours"]}}  # fmt: skip
    seeded = {f"{name}, seed {seed}": {**case, "seed": seed} for name, case in cases.items()
              for seed in range(options.rounds)}  # fmt: skip
    found = alternate(__file__, seeded, 1, options.threads, ledger, lambda f: f"{f['nats']:.3f} nats", options.at_once)
    runs = {name: [found[f"{name}, seed {seed}"][0] for seed in range(options.rounds)] for name in cases}
    nats = {name: [run["nats"] for run in found] for name, found in runs.items()}
    gaps = [theirs - ours for theirs, ours in zip(nats["theirs"], nats["ours"])]
    judged = [judge(f"nats below {minutes['theirs']:g} minutes of Trainer after {minutes['ours']:g} of ours, the least of "
                    f"{options.rounds} seeds", min(gaps), at_least=0.0)]  # fmt: skip
    say(judged)
    write_result(options.output, {
        "what": __doc__.splitlines()[0], "machine": where, "judged": judged, "minutes": minutes, "steps_per_minute": pace,
        "steps": {name: case["steps"] for name, case in cases.items()}, "tuned": best, "nats_below": spread(gaps),
        "losses": {"theirs": {f"{minutes['theirs']:g}": nats["theirs"]},
                   "ours": {f"{minutes['ours'] / 2:g}": nats["ours, half"], f"{minutes['ours']:g}": nats["ours"]}},
        "runs": runs}, draw)  # fmt: skip


if __name__ == "__main__":
    main()
