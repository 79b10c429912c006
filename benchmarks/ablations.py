"""What is a trick worth to an encoder that learns for a minute? Each alone, tuned alike, at equal tokens and equal seconds.

    python benchmarks/ablations.py [--arms NAME ...] [--on RECIPE.yaml] [--seeds 3] [--workers 2] [--list] [--quick]

The first demo's recipe in half of its steps is the control, or, with --on, a recipe of `speedrun.py` such as
benchmarks/records/muon_two_layers.yaml, the best combination. Every arm changes one thing. Its peak rate is tuned on seed 0
over a grid of factors of two around the control's best, and further while the best lies at an end; then all seeds run
at that rate. Runs have one thread each, several side by side: how long they take is not read from them. What a step
of an arm costs is measured apart, step by step in turns with the control, on all threads (an arm that changes numbers
alone costs what the control does); an arm whose step costs c runs once more with 1 / c of the steps, which is the same
number of seconds. The judge of `speedrun.py` scores every run.

Every run is written to the result as soon as it is there, and a later call goes on. Where no control so far comes out
again, on other code or another kind of processor, a control of its own is tuned first, and the arms that are still missing
are compared with that one: a gain is always of runs in one place. The arms of other places stay as they are, unless --arms
names them; one that has no gain in equal seconds yet gets it here, at its rate and beside the control of this place.
An arm whose recipe or trick has changed runs anew; that the library has changed is seen by the control alone.

A gain has two standard errors to each side, from how much runs of one arm scatter over all arms. More runs of the control
make all gains surer: --arms control --seeds 9.
"""

import argparse
import ast
import hashlib
import json
import math
import os
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from sides import KEPT, ROOT, BenchmarkParser, machine

from bertlab.core.files import atomic_write

sys.path.insert(0, str(Path(__file__).parent))  # recipes name models of tricks.py

SAME = 0.03  # relative difference of a step's cost that is none


@dataclass(frozen=True)
class Arm:
    "One change to the first demo's recipe."

    about: str
    recipe: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # as in a file of `speedrun.py`
    warmup: float | None = None  # share of the steps; None: the control's
    cooldown: float | None = None
    tokens_per_step: float = 1.0  # of the control's
    shares: Mapping[str, float] = field(
        default_factory=dict
    )  # of the arm's rate, for parameters by glob
    centre: float = 1.0  # where its grid of rates begins, over the control's best rate
    on: str = "any"  # "first": not on a recipe that has it already; "combination": on one alone, takes a part away
    free: bool = False  # a step does the same work with other numbers
    kl_weight: float = 0.0  # of a penalty for leaving the answers of the teacher, a run of twice the control's steps

    def centre_on(self, on: str | None) -> float:
        "On a recipe with Muon, its rates are already the control's."
        return self.centre if (on is None) == (self.on != "combination") else 1.0


def model(**options: Any) -> dict:
    return {"model": options}


def shape(**options: Any) -> dict:
    return {"model": {"model_config_kwargs": options}}


def masks(**options: Any) -> dict:
    return {"data": {"collator_kwargs": options}}


def callback(name: str, **options: Any) -> dict:
    return {"trainer": {"callbacks": [{"class_path": f"tricks.{name}", "init_args": options}]}}


def joined(*recipes: Mapping) -> dict:
    "Recipes laid over each other; lists, such as callbacks, are put together."
    whole: dict[str, Any] = {}
    for recipe in recipes:
        for name, value in recipe.items():
            old = whole.get(name)
            if isinstance(old, Mapping) and isinstance(value, Mapping):
                value = joined(old, value)
            elif isinstance(old, list) and isinstance(value, list):
                value = old + value
            whole[name] = value
    return whole


ARMS = {
    "control": Arm("the first demo's recipe"),
    # the optimizer and its batch
    "muon": Arm("Muon for hidden matrices", model(optimizer_class="muon"), centre=2.0, on="first"),
    "muon, tables at half": Arm("Muon, and half of its rate for the embedding", model(optimizer_class="muon"),
                                shares={"*embeddings*": 0.5}, centre=2.0, on="first"),
    "muon, tables at a quarter": Arm("Muon, and a quarter of its rate for the embedding", model(optimizer_class="muon"),
                                     shares={"*embeddings*": 0.25}, centre=2.0, on="first"),
    "muon, polar": Arm("Muon, the best polynomial for each round", model(optimizer_class="tricks.PolarMuon"), centre=2.0),
    "muon, rows alike": Arm("Muon whose rows move alike (NorMuon)", model(optimizer_class="tricks.NorMuon"), centre=2.0),
    "muon, rows 8": Arm("Muon on half the batch", joined(model(optimizer_class="muon"), {"data": {"train_batch_size": 8}}),
                        tokens_per_step=0.5, centre=2.0, on="first"),
    "muon, zero outputs": Arm("Muon, and projections into the stream begin at zero", model(
        optimizer_class="muon", objective="tricks.ZeroOutputs"), centre=2.0, on="first"),
    "muon, momentum 0.9": Arm("Muon that forgets faster", model(
        optimizer_class="muon", optimizer_kwargs={"momentum": 0.9}), centre=2.0, on="first"),
    "muon, momentum 0.8": Arm("Muon that forgets faster still", model(
        optimizer_class="muon", optimizer_kwargs={"momentum": 0.8}), centre=4.0, on="first"),
    "muon, momentum 0.9, rows 8": Arm("Muon that forgets faster, on half the batch", joined(
        model(optimizer_class="muon", optimizer_kwargs={"momentum": 0.9}), {"data": {"train_batch_size": 8}}),
        tokens_per_step=0.5, centre=4.0, on="first"),
    "muon, cooldown 0.6": Arm("Muon, 60 % cooldown", model(optimizer_class="muon"), cooldown=0.6, centre=2.0, on="first"),
    "rows 8": Arm("half the batch, twice the steps", {"data": {"train_batch_size": 8}}, tokens_per_step=0.5),
    "rows 4": Arm("a quarter of the batch, four times the steps", {"data": {"train_batch_size": 4}}, tokens_per_step=0.25),
    "rows 32": Arm("twice the batch, half the steps", {"data": {"train_batch_size": 32}}, tokens_per_step=2.0),
    "growing batch": Arm("half the batch for half of the tokens, then all of it", {
        "data": {"train_batch_size": 8}, **callback("DoublingBatch")}, tokens_per_step=2 / 3),
    "tables at twice": Arm("AdamW, twice its rate for the embedding", shares={"*embeddings*": 2.0}, on="first", free=True),
    "tables at four": Arm("AdamW, four times its rate for the embedding", shares={"*embeddings*": 4.0}, on="first", free=True),
    "beta2 0.95": Arm("AdamW forgets faster", model(optimizer_kwargs={"betas": [0.9, 0.95]}), free=True),
    "no weight decay": Arm("weight decay 0", model(weight_decay=0.0), free=True),
    "adamw": Arm("AdamW in place of Muon", model(optimizer_class="adamw", optimizer_kwargs=None), on="combination", centre=0.25),
    "muon, values apart": Arm("Muon on queries, keys and values one by one", model(
        optimizer_class="tricks.MuonOfParts"), on="combination"),
    "muon, gates apart": Arm("Muon on queries, keys, values and gates one by one", model(
        optimizer_class="tricks.MuonOfAllParts"), on="combination"),
    "momentum 0.95": Arm("Muon forgets slower", model(optimizer_kwargs={"momentum": 0.95}), on="combination", free=True),
    # the shape
    "4 layers": Arm("twice the depth", shape(num_hidden_layers=4), on="combination"),
    "2 layers": Arm("half the depth", shape(num_hidden_layers=2), on="first"),
    "2 layers of 256": Arm("two layers, a third wider", shape(
        num_hidden_layers=2, hidden_size=256, intermediate_size=512, num_attention_heads=4)),
    "6 layers of 128": Arm("deeper and narrower", shape(
        num_hidden_layers=6, hidden_size=128, intermediate_size=256, num_attention_heads=2)),
    "6 heads": Arm("heads of 32", shape(num_attention_heads=6)),
    "grown": Arm("two layers for half of the run, then four, copied", callback("GrowingDepth", first=2, until=0.5), on="first"),
    "untied head": Arm("the head has a table of its own", shape(tie_word_embeddings=False)),
    # how it begins
    "zero outputs": Arm("projections into the stream begin at zero", model(objective="tricks.ZeroOutputs"), free=True),
    "init 0.08": Arm("all weights begin twice as wide", shape(initializer_range=0.08), free=True),
    "init 0.02": Arm("all weights begin half as wide", shape(initializer_range=0.02), free=True),
    # parts of the model
    "squared relu": Arm("plain MLP with squared ReLU, as many weights", shape(
        mlp="plain", hidden_activation="relu_squared", intermediate_size=576)),
    "swiglu": Arm("SiLU in the gated MLP", shape(hidden_activation="silu")),
    "qk norm": Arm("queries and keys normed", shape(qk_norm=True)),
    "rms norm": Arm("RMS norms", shape(norm="rms")),
    "soft cap": Arm("scores between -15 and 15", model(objective="tricks.SoftCapped")),
    "scaled scores": Arm("a learnt factor of all scores", model(objective="tricks.ScaledScores")),
    "embedding skips": Arm("each block reads the embedding again", model(objective="tricks.EmbeddingSkips")),
    "value embeddings": Arm("tokens add to values directly", model(objective="tricks.ValueEmbeddings")),
    "branch scales": Arm("LayerScale at 0.1", model(objective="tricks.BranchScales")),
    "output gate": Arm("a sigmoid gate behind attention", shape(output_gate="head")),
    # what is seen
    "all global": Arm("every layer sees the whole document", shape(global_attention_every_n_layers=1)),
    "windows 32": Arm("local layers see 32 tokens", shape(local_attention=32)),
    "growing windows": Arm("local layers begin with 16 tokens", callback("GrowingWindows")),
    "short rows": Arm("rows of 64, twice as many", {"data": {"max_sequence_length": 64, "train_batch_size": 32}}),
    "short rows first": Arm("rows of 64 for 70 % of the run, then of 128", callback("ShortRowsFirst", length=64, until=0.7)),
    "easy first": Arm("the first epoch from frequent to rare tokens", callback("EasyFirst"), free=True),
    "long rows": Arm("rows of 256, half as many", {"data": {"max_sequence_length": 256, "train_batch_size": 8}}),
    # what is asked
    "mask 0.15": Arm("15 % hidden", masks(mlm_probability=0.15)),
    "mask 0.2": Arm("20 % hidden", masks(mlm_probability=0.2)),
    "mask 0.3": Arm("30 % hidden", masks(mlm_probability=0.3), on="combination"),
    "mask 0.4": Arm("40 % hidden", masks(mlm_probability=0.4), on="first"),
    "falling masks": Arm("50 % hidden, then less, to 20 %", {
        **masks(mlm_probability=0.5), **callback("FallingMasks", first=0.5, last=0.2)}),
    "whole words": Arm("whole words hidden", masks(unit="word")),
    "spans": Arm("spans hidden", masks(unit="span")),
    "always [MASK]": Arm("no random and no kept tokens", masks(mask_replace_prob=1.0, random_replace_prob=0.0), free=True),
    "distilled": Arm("also asked to answer as an earlier run does", kl_weight=1.0),
    "label smoothing": Arm("5 % of the target spread", model(loss_kwargs={"label_smoothing": 0.05})),
    "z-loss": Arm("z-loss of 1e-4", model(loss_kwargs={"z_weight": 1e-4})),
    # the rate over time
    "short warmup": Arm("1 % warmup", warmup=0.01, on="first", free=True),
    "warmup 0.05": Arm("5 % warmup", warmup=0.05, on="combination", free=True),
    "cooldown 0.3": Arm("30 % cooldown", cooldown=0.3, on="combination", free=True),
    "long warmup": Arm("15 % warmup", warmup=0.15, free=True),
    "cooldown 0.6": Arm("60 % cooldown", cooldown=0.6, free=True),
    "cooldown all": Arm("the rate falls all the way", cooldown=0.95, free=True),
    "1-sqrt": Arm("cooldown by 1 - sqrt, 60 %", model(scheduler_cooldown_kind="inverse-sqrt"), cooldown=0.6, free=True),
    "cosine": Arm("cosine to zero", model(scheduler_cooldown_kind="cosine"), cooldown=0.95, free=True),
    "average": Arm("validated with an average of the last steps", {"run": {"average": 0.98}}),
    # the vocabulary
    "vocabulary 2048": Arm("half the vocabulary", {"run": {"vocab_size": 2048}}),
    "vocabulary 8192": Arm("twice the vocabulary", {"run": {"vocab_size": 8192}}),
}  # fmt: skip


@cache
def course(quick: bool) -> tuple[Any, Any]:
    "The track and its text, once a process."
    from speedrun import TRACKS
    from bertlab.data.corpus import embedded_corpus

    return TRACKS["laptop"], embedded_corpus(max_documents=600 if quick else None)


@cache
def tokenizer_of(quick: bool, size: int) -> Any:
    from bertlab.data.tokenizers import train_tokenizer

    return train_tokenizer(course(quick)[1].train_texts, size)


@cache
def judge_of(quick: bool, size: int) -> Any:
    from speedrun import Judge

    return Judge(*course(quick), tokenizer_of(quick, size))


def teacher_of(quick: bool, on: str | None) -> Path:
    "Where the teacher's directory is, for a distilled arm."
    name = "first_demo" if on is None else Path(on).stem
    return KEPT / f"ablations-teacher-{name}{'-quick' * quick}"


@dataclass(frozen=True)
class Control:
    "What an arm's change is laid over."

    recipe: Mapping[str, Mapping[str, Any]]
    steps: int
    rates: tuple[float, ...]  # its first grid
    warmup: float  # shares of the steps
    cooldown: float


@cache
def control_of(on: str | None) -> Control:
    "The first demo's recipe in half of its steps, or a recipe in a file."
    from speedrun import load_recipe

    if on is None:
        return Control({}, 440, (1e-3, 2e-3, 4e-3), 0.05, 0.3)
    recipe = load_recipe(ROOT / on)
    model, parts = (
        recipe.get("model", {}),
        [f"scheduler_{part}_steps" for part in ("warmup", "cooldown")],
    )
    if missing := [name for name in ("learning_rate", *parts) if name not in model]:
        raise ValueError(f"{on}: arms are laid over a recipe that sets its own model.{', model.'.join(missing)}; write them "
                         "into it, or leave --on out for the first demo's")  # fmt: skip
    if "max_steps" not in recipe.get("trainer", {}):
        raise ValueError(
            f"{on}: arms are laid over a recipe that sets trainer.max_steps; write it into it"
        )
    steps, rate = recipe["trainer"]["max_steps"], model.pop("learning_rate")
    shares = [model.pop(part) / steps for part in parts]
    return Control(recipe, steps, (rate / 2, rate, 2 * rate), *shares)


def trick_source(name: str) -> str:
    "What a name of tricks.py is made of: its code, and that of all that it uses there."
    parsed = ast.parse((Path(__file__).parent / "tricks.py").read_text(encoding="utf-8")).body
    known = {
        getattr(node, "name", None)
        or getattr(getattr(node, "targets", [None])[0], "id", None): node
        for node in parsed
    }
    found, wanted = {}, [name]
    while wanted:
        name = wanted.pop()
        if name in known and name not in found:
            found[name] = ast.unparse(known[name])
            wanted += [node.id for node in ast.walk(known[name]) if isinstance(node, ast.Name)]
    return "\n".join(found[name] for name in sorted(found))


@cache
def digest(name: str, on: str | None) -> str:
    "What an arm is, in a few letters: one that has changed is another, and is measured anew."
    arm, control = ARMS[name], control_of(on)
    said = repr([replace(arm, about=""), control.recipe, control.warmup, control.cooldown])
    said += "".join(trick_source(trick) for trick in sorted(re.findall(r"'tricks\.(\w+)'", said)))
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def arms_on(on: str | None) -> list[str]:
    "Names of the arms that say something there."
    left_out = "combination" if on is None else "first"
    return [name for name, arm in ARMS.items() if arm.on != left_out]


def build(
    arm: Arm, rate: float, steps: int, seed: int, quick: bool, output: str, on: str | None = None
) -> Any:
    "The run of an arm, with nothing to validate on."
    from bertlab.cli import pretrain
    from speedrun import race_config
    from bertlab.train.distill import DistillationModule

    (track, corpus), control = course(quick), control_of(on)
    steps = max(2, round(steps / arm.tokens_per_step))
    shares = {glob: {"lr": share * rate} for glob, share in arm.shares.items()}
    warmup, cooldown = (theirs if own is None else own for own, theirs in
                        zip((arm.warmup, arm.cooldown), (control.warmup, control.cooldown)))  # fmt: skip
    own = {"model": {"learning_rate": rate, "parameter_overrides": shares or None,
                     "scheduler_warmup_steps": round(warmup * steps), "scheduler_cooldown_steps": round(cooldown * steps)},
           "trainer": {"max_steps": steps, "logger": False},
           "run": {"checkpoint_every_steps": 10 * steps, "progress": "none"}}  # fmt: skip
    config = race_config(track, joined(control.recipe, arm.recipe, own), output, seed)
    run = pretrain.Run(config)
    run.data_options |= {"train_dataset_name_or_path": corpus, "data_kwargs": None}
    run._own_tokenizer = lambda: tokenizer_of(quick, config["run"]["vocab_size"])
    module = pretrain.PretrainingModule
    if arm.kl_weight:
        module = partial(DistillationModule, str(teacher_of(quick, on)), kl_weight=arm.kl_weight)
    with mock.patch.object(
        pretrain, "PretrainingModule", module
    ):  # the command line knows no teacher
        run.build()
    run.data.val_datasets = []  # the judge validates, once
    return run


def plain(module: Any) -> bool:
    "Whether transformers opens the model as one of its own classes."
    from bertlab.model.heads import BertLabForMaskedLM
    from bertlab.model.huggingface import to_huggingface

    if type(module.model) is not BertLabForMaskedLM:
        return False
    try:
        to_huggingface(module.model)
    except ValueError:
        return False
    return True


def end_with_parent() -> None:
    "A worker whose parent was killed would train on to the end of the queue."
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def train_once(case: dict) -> dict:
    "One run of an arm, on one thread, and what the judge says."
    import logging
    import warnings

    import torch

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    arm, quick = ARMS[case["arm"]], case["quick"]
    with tempfile.TemporaryDirectory() as folder:
        run = build(
            arm, case["rate"], case["steps"], case["seed"], quick, f"{folder}/run", case.get("on")
        )
        run.prepare()
        run.fit()
        judge = judge_of(quick, len(run.tokenizer))
        found = judge.score(run.module, run.trainer)
        return {**case, "loss": found["val_loss"], "bits_per_byte": found["val_bits_per_byte"],
                "accuracy": found["val_accuracy"], "updates": run.trainer.global_step,
                "tokens": run.history.totals()[0], "parameters": run.module.model.num_parameters(),
                "plain": plain(run.module)}  # fmt: skip


def train_teacher(rate: float, steps: int, quick: bool, on: str | None) -> None:
    "A run of the control with twice its steps and a seed of its own, kept as a directory."
    import torch

    from bertlab.model.huggingface import save_model

    torch.set_num_threads(1)
    place = teacher_of(quick, on)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        run = build(ARMS["control"], rate, 2 * steps, 1000, quick, f"{folder}/run", on)
        run.prepare()
        run.fit()
        made = Path(folder) / "model"
        save_model(run.module.model, run.tokenizer, made)
        shutil.rmtree(place, ignore_errors=True)
        made.replace(place)


def make_steps(pipe: Any, quick: bool, on: str | None) -> None:
    "A process that makes the steps of one run after the other, each when it is told to, and says how long it took."
    import torch
    from lightning.pytorch import Callback

    class Turns(Callback):
        def on_train_start(self, *_: Any) -> None:
            pipe.recv()
            self.begin = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            pipe.send(time.perf_counter() - self.begin)
            pipe.recv()
            self.begin = time.perf_counter()

    end_with_parent()
    torch.set_num_threads(os.cpu_count())
    while (asked := pipe.recv()) is not None:
        name, steps = asked
        with tempfile.TemporaryDirectory() as folder:
            run = build(ARMS[name], 1e-3, steps, 0, quick, f"{folder}/run", on)
            run.prepare()
            run.trainer.callbacks.append(Turns())
            pipe.send(None)  # ready
            run.fit()
        pipe.send(None)  # told to make one more, it has come to its end


class Pair:
    "The control and an arm, whose steps are made in turns: when the machine is slow, it is so for both."

    STAGES, SKIPPED, ENDLESS = (
        6,
        6,
        10**6,
    )  # of an arm that changes on its way; first steps; of the control

    def __init__(self, steps: int, quick: bool, on: str | None):
        self.steps, spawn = steps, get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(2)]
        (self.control, one), (self.arm, other) = pipes
        self.processes = [
            spawn.Process(target=make_steps, args=(end, quick, on)) for end in (one, other)
        ]
        for process in self.processes:
            process.start()
        self.control.send(("control", self.ENDLESS))
        self.control.recv()

    def close(self) -> None:
        for process in self.processes:
            process.kill()  # a milder signal would wait for a step that nobody asks for
            process.join()

    def step(self, pipe: Any) -> float | None:  # seconds; None behind the last step
        pipe.send("go")
        return pipe.recv()

    def cost(self, name: str) -> dict:
        "Seconds that an arm takes for the control's tokens of one step, over the control's."
        tokens, times = ARMS[name].tokens_per_step, []
        self.arm.send((name, max(1, round(self.steps * tokens))))
        self.arm.recv()
        while (theirs := self.step(self.arm)) is not None:
            times.append((theirs, self.step(self.control)))
        counted = times[self.SKIPPED :] or times
        size = -(-len(counted) // self.STAGES)
        stages = [counted[first : first + size] for first in range(0, len(counted), size)]
        each = [[statistics.median(side) for side in zip(*stage)] for stage in stages]
        ratios = [theirs / ours / tokens for theirs, ours in each]
        return {"arm": name, "cost": statistics.mean(ratios), "least": min(ratios), "most": max(ratios), "steps": len(counted),
                "milliseconds": 1e3 * statistics.mean(theirs for theirs, _ in each)}  # fmt: skip


class Table:
    "All runs so far, in the result's file."

    def __init__(self, options: argparse.Namespace):
        self.options, self.path = options, options.output
        self.found, self.lock, self.where = self.nothing(), threading.Lock(), machine(1)
        if self.path.exists() and not options.fresh:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            self.found = {name: kept.get(name, none) for name, none in self.found.items()}
            if not self.found["machines"] and self.found["runs"]:  # of a time when there was one
                self.found["machines"] = [kept["machine"]]
                for one in (
                    *self.found["runs"],
                    *self.found["costs"],
                    *self.found["arms"].values(),
                ):
                    one["machine"] = 0
                for row in self.found["arms"].values():
                    row["control_rate"] = self.found["arms"]["control"]["rate"]
        self.here, self.teacher = 0, None  # a future, while it trains
        self.pair: Pair | None = None  # which tells costs
        self.pool = ProcessPoolExecutor(options.workers, get_context("spawn"), end_with_parent)

    @staticmethod
    def nothing() -> dict:
        return {"machines": [], "runs": [], "costs": [], "scatter": [], "arms": {}}

    def case(self, arm: str, rate: float, seed: int, steps: int | None = None) -> dict:
        on = {} if self.options.on is None else {"on": self.options.on}
        return {"arm": arm, "rate": rate, "seed": seed, "steps": steps or self.options.steps, "quick": self.options.quick,
                "machine": self.here, "digest": digest(arm, self.options.on), **on}  # fmt: skip

    def known(self, case: dict) -> dict | None:
        "The run of a case. A run of a time without digests is of whatever its arm's name says."
        return next(
            (
                run
                for run in self.found["runs"]
                if all(run.get(k, k == "digest" and v) == v for k, v in case.items())
            ),
            None,
        )

    def ask(self, cases: list[dict]) -> list[dict]:
        "Runs, those that are not there yet side by side."
        wanted = [self.pool.submit(train_once, case) for case in cases if self.known(case) is None]
        for done in as_completed(wanted):
            run = done.result() | {"processor": self.where["processor"]}
            with self.lock:
                self.found["runs"].append(run)
                print(f"  {run['arm']:20} rate {run['rate']:.2g}  seed {run['seed']}  {run['steps']} steps  "
                      f"{run['loss']:.4f} nats  {run['bits_per_byte']:.4f} bits per byte", flush=True)  # fmt: skip
                self.write()
        return [self.known(case) for case in cases]

    def find_place(self) -> None:
        "Go on with the runs of this code and processor, or begin some beside those of others."
        keys = ("arm", "rate", "seed", "steps", "quick", "machine", "on")
        of_this_kind_first = sorted(range(len(self.found["machines"])), key=lambda number: [
            self.found["machines"][number].get(what) != self.where[what] for what in ("processor", "computes_in")])  # fmt: skip
        for number in of_this_kind_first:
            runs = (
                run
                for run in self.found["runs"]
                if run["arm"] == "control" and run["machine"] == number
            )
            if (first := next(runs, None)) is not None:
                again = train_once({key: first[key] for key in keys if key in first})
                if abs(again["loss"] - first["loss"]) <= 2e-3:
                    self.here = number
                    return
                print(f"the control comes out at {again['loss']:.4f} nats, not {first['loss']:.4f} as on "
                      f"{self.found['machines'][number]['processor']}")  # fmt: skip
        begun = {
            run["machine"] for run in self.found["runs"]
        }  # a call may have ended before its first run did
        self.found["machines"] = [
            place for number, place in enumerate(self.found["machines"]) if number in begun
        ]
        self.here = len(self.found["machines"])
        self.found["machines"].append(self.where)

    def missing(self, names: list[str]) -> list[str]:
        "The control, and arms that have no row of another place."
        rows = self.found["arms"]
        return [
            name
            for name in names
            if name == "control" or rows.get(name, {}).get("machine", self.here) == self.here
        ]

    def untimed(self, names: list[str]) -> list[str]:
        "Arms that were tuned in another place, and whose gain in equal seconds nobody has measured."
        rows = {name: row for name, row in self.found["arms"].items() if "equal_seconds" not in row}
        return [name for name in names if name in rows and rows[name]["machine"] != self.here
                and rows[name].get("digest", own := digest(name, self.options.on)) == own]  # fmt: skip

    def tuned(self, arm: str, centre: float | None) -> float:
        "The best rate of an arm on seed 0, with a worse one on each side."
        rates = (
            list(control_of(self.options.on).rates)
            if centre is None
            else [centre / 2, centre, 2 * centre]
        )
        if self.options.quick:
            return rates[1]
        while True:
            runs = self.ask([self.case(arm, rate, 0) for rate in rates])
            best = min(range(len(runs)), key=lambda i: runs[i]["bits_per_byte"])
            if 0 < best < len(rates) - 1 or len(rates) > 7:
                return rates[best]
            rates = [rates[0] / 2, *rates] if best == 0 else [*rates, 2 * rates[-1]]

    def at_equal_tokens(self, arm: str, centre: float | None, control: list[dict]) -> None:
        "The arm's row: its best rate, and what all seeds gain with it."
        if ARMS[arm].kl_weight and self.teacher is not None:  # other arms go on meanwhile
            self.teacher.result()
        rate = self.tuned(arm, centre)
        runs = self.seeds(arm, rate)
        row = {"about": ARMS[arm].about, "machine": self.here, "rate": rate, "control_rate": control[0]["rate"],
               "digest": digest(arm, self.options.on), "plain": runs[0]["plain"], "parameters": runs[0]["parameters"],
               "equal_tokens": gain(control, runs)}  # fmt: skip
        with self.lock:
            before = self.found["arms"].get(arm, {})
            same = all(
                before.get(name) == row[name] for name in ("machine", "rate", "control_rate")
            )
            if same and before.get("digest", row["digest"]) == row["digest"]:
                row |= {
                    name: before[name]
                    for name in ("cost", "steps", "equal_seconds", "timed")
                    if name in before
                }
            self.found["arms"][arm] = row
            self.write()

    def at_equal_seconds(self, arm: str, cost: float, control: list[dict]) -> None:
        "What all seeds gain in as many seconds as the control takes, beside what the row says of equal tokens."
        row, more = self.found["arms"][arm], {"cost": cost, "steps": self.options.steps}
        if math.isclose(cost, 1, rel_tol=SAME):
            more["equal_seconds"] = row["equal_tokens"]
        else:
            more["steps"] = round(self.options.steps / cost)
            more["equal_seconds"] = gain(control, self.seeds(arm, row["rate"], more["steps"]))
            if row["machine"] != self.here:
                more["timed"] = {"machine": self.here, "control_rate": control[0]["rate"]}
        with self.lock:
            row.pop("timed", None)  # of an earlier time in another place
            row |= more
            self.write()

    def seeds(self, arm: str, rate: float, steps: int | None = None) -> list[dict]:
        return self.ask([self.case(arm, rate, seed, steps) for seed in range(self.options.seeds)])

    def cost(self, arm: str) -> dict:
        own = digest(arm, self.options.on)
        known = next((one for one in self.found["costs"] if (one["arm"], one["machine"]) == (arm, self.here)
                      and one.get("digest", own) == own), None)  # fmt: skip
        if known is None:
            if arm == "control" or ARMS[arm].free:
                known = {"arm": arm, "cost": 1.0}
            else:
                self.pair = self.pair or Pair(
                    self.options.timed, self.options.quick, self.options.on
                )
                known = self.pair.cost(arm)
            known |= {"machine": self.here, "digest": own}
            self.found["costs"] = [
                one
                for one in self.found["costs"]
                if (one["arm"], one["machine"]) != (arm, self.here)
            ] + [known]
            print(f"  {arm:20} costs {known['cost']:.3f} of the control", flush=True)
            self.write()
        return known

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        settle(self.found, self.options.steps)
        with atomic_write(self.path) as temporary:
            arms = {name: self.found["arms"][name] for name in ARMS if name in self.found["arms"]}
            whole = {"what": __doc__.splitlines()[0], "machine": next(iter(self.found["machines"]), self.where), "steps": self.options.steps,
                     "of": len(arms_on(self.options.on)), **self.found, "arms": arms}  # fmt: skip
            temporary.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def gain(control: list[dict], runs: list[dict], paired: bool = True) -> dict:
    "Bits per byte below the control: seed by seed, or below the mean of all that it has."

    def below(name: str) -> list[float]:
        level = statistics.mean(run[name] for run in control)
        return [
            (there[name] if paired else level) - run[name]
            for there, run in zip(control if paired else runs, runs, strict=True)
        ]

    bits = below("bits_per_byte")
    return {
        "mean": statistics.mean(bits),
        "least": min(bits),
        "most": max(bits),
        "nats": statistics.mean(below("loss")),
    }


def settle(found: dict, steps: int) -> None:
    """Give every gain two standard errors to each side, from `low` to `high`.

    Runs scatter alike whatever the arm, so all arms of a place say together by how much. Where runs of one seed err
    alike, they are compared seed by seed; else with all runs of the control, of which there may be more than three.
    """

    def runs(
        name: str, place: int, rate: float, steps: int
    ) -> dict[int, dict]:  # by seed; not those of what the arm was before
        row = found["arms"].get(name, {})
        own = row.get("digest") if name != "control" or row.get("machine") == place else None
        return {run["seed"]: run for run in found["runs"] if (run["arm"], run["machine"], run["rate"], run["steps"])
                == (name, place, rate, steps) and own in (None, run.get("digest", own))}  # fmt: skip

    def ends_of(
        row: dict,
    ) -> dict[str, tuple[dict, int]]:  # where each was compared, and in how many steps
        ends = {"equal_tokens": (row, steps)}
        if "equal_seconds" in row:
            ends["equal_seconds"] = row.get("timed", row), row["steps"]
        return ends

    found["scatter"] = []
    arms = {name: row for name, row in found["arms"].items() if name != "control"}
    for place in range(len(found["machines"])):
        beside = []
        for name, row in arms.items():
            for end, (where, made_steps) in ends_of(row).items():
                if where.get("machine") != place or end == "equal_seconds" and where is row:
                    continue  # an arm speaks once
                control = runs("control", place, where["control_rate"], steps)
                tried = runs(name, place, row["rate"], made_steps)
                if len(control) > 1 and len(tried) > 1 and control.keys() >= tried.keys():
                    beside.append((control, tried))
        if len(beside) < 3:  # too few to say how much runs scatter
            found["scatter"].append(None)
            continue
        shared = sorted(set.intersection(*({*tried} for _, tried in beside)))
        bits = np.array([[tried[seed]["bits_per_byte"] for seed in shared] for _, tried in beside])
        alone = bits.var(1, ddof=1).mean()
        # What is left of each run when its arm and its seed are known.
        left = bits - bits.mean(1, keepdims=True) - bits.mean(0) + bits.mean()
        left = np.square(left).sum() / ((len(bits) - 1) * (len(shared) - 1))
        most = max(len(control) for control, _ in beside)
        paired = bool(2 * left / len(shared) < alone * (1 / len(shared) + 1 / most))
        found["scatter"].append(
            {"runs": alone**0.5, "beside_seed": left**0.5, "paired": paired, "control_runs": most}
        )
    scatters = dict(enumerate(found["scatter"]))
    for name, row in arms.items():
        for end, (where, made_steps) in ends_of(row).items():
            place = where.get("machine")
            if (scatter := scatters.get(place)) is None:
                continue
            control = runs("control", place, where["control_rate"], steps)
            made, paired = runs(name, place, row["rate"], made_steps), scatter["paired"]
            seeds = sorted(made.keys() & control.keys())
            if len(control) < 2 or len(seeds) < 2:
                continue
            one = gain(
                [control[seed] for seed in (seeds if paired else sorted(control))],
                [made[seed] for seed in seeds],
                paired,
            )
            own, shared = scatter["runs"] ** 2, scatter["beside_seed"] ** 2
            error = (
                2 * shared / len(seeds) if paired else own * (1 / len(seeds) + 1 / len(control))
            ) ** 0.5
            row[end] = one | {"low": one["mean"] - 2 * error, "high": one["mean"] + 2 * error}


def main() -> None:
    every = ("arms", "on", "timed", "workers", "no_costs", "list")  # a call adds to what is there
    parser = BenchmarkParser("ablations", free=every, otherwise="with --on ablations_NAME.json",
                             description=__doc__.splitlines()[0])  # fmt: skip
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="of --list (default: all)")
    parser.add_argument(
        "--on",
        metavar="FILE",
        help="a recipe that the arms are laid over (default: the first demo's, halved)",
    )
    parser.add_argument("--steps", type=int, help="of the control (default: the recipe's)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--timed", type=int, default=96, help="steps of an arm that its cost is told from"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="runs at once, a thread each"
    )
    parser.add_argument(
        "--no-costs",
        action="store_true",
        help="leave equal seconds to a later call, on a quiet machine",
    )
    parser.add_argument("--list", action="store_true", help="show the arms, and run nothing")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--fresh", action="store_true", help="forget all runs")
    parser.add_argument("--kept", type=Path, default=KEPT, help="where a quick run writes")
    options = parser.parse_args()
    known = arms_on(options.on)
    if options.list:
        return print("\n".join(f"{name:28}{ARMS[name].about}" for name in known))
    if options.output is None:
        parser.error("other steps or fewer seeds make another table: name its file with --output")
    if options.on and options.output.name == "ablations.json":
        options.output = options.output.with_stem(f"ablations_{Path(options.on).stem}")
    if options.on:
        # It stands in the result, which names no place of one machine, and no directory of one call.
        options.on = os.path.relpath(options.on, ROOT)
    try:
        base = control_of(options.on)
    except ValueError as error:
        parser.error(str(error))
    options.steps = options.steps or base.steps
    if unknown := [name for name in options.arms or () if name not in known]:
        parser.error(f"no arm is called {', '.join(unknown)} here; --list shows them")
    if options.quick:
        options.steps, options.seeds, options.timed = 4, 1, 3
        options.arms = options.arms or ["control", "muon", "2 layers"]
    if options.output.exists() and not options.fresh:
        kept = json.loads(options.output.read_text(encoding="utf-8"))
        if kept.get("runs") and kept.get("steps", options.steps) != options.steps:
            parser.error(
                f"{options.output} holds runs of {kept['steps']} steps, not {options.steps}: choose another --output"
            )
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # of the workers
    table = Table(options)
    table.find_place()
    untimed = [] if options.arms or options.no_costs else table.untimed(known)
    options.arms = options.arms or table.missing(known)
    best = table.tuned("control", None)
    control = table.seeds("control", best)
    distilled = [name for name in (*options.arms, *untimed) if ARMS[name].kl_weight]
    known = any(
        run["arm"] in distilled and run["machine"] == table.here for run in table.found["runs"]
    )  # by this teacher
    if distilled and not (
        known and (teacher_of(options.quick, options.on) / "config.json").is_file()
    ):
        table.teacher = table.pool.submit(
            train_teacher, best, options.steps, options.quick, options.on
        )
    with ThreadPoolExecutor(
        options.workers + 1
    ) as arms:  # several at a time: no worker waits for the last of a grid
        centres = [
            None if name == "control" else best * ARMS[name].centre_on(options.on)
            for name in options.arms
        ]
        list(arms.map(table.at_equal_tokens, options.arms, centres, [control] * len(centres)))
    if not options.no_costs:
        if table.teacher is not None:
            table.teacher.result()  # of an arm that is only timed here
        options.arms += untimed
        try:
            costs = [
                table.cost(name)["cost"] for name in options.arms
            ]  # all of them first, while nothing runs beside
        finally:
            if table.pair:
                table.pair.close()
        with ThreadPoolExecutor(options.workers + 1) as arms:
            list(arms.map(table.at_equal_seconds, options.arms, costs, [control] * len(costs)))
    rows = {name: table.found["arms"][name] for name in options.arms}
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["equal_tokens"]["mean"]):
        timed = (
            f"{row['cost']:.2f} of a step; at equal seconds {row['equal_seconds']['mean']:+.4f}"
            if "cost" in row
            else ""
        )
        print(f"{name:28} {row['equal_tokens']['mean']:+.4f} bits per byte gained "
              f"({row['equal_tokens'].get('low', math.nan):+.4f} to {row['equal_tokens'].get('high', math.nan):+.4f})  {timed}")  # fmt: skip
    table.write()
    print(f"written to {table.path}")


if __name__ == "__main__":
    main()
