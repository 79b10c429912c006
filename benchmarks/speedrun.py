"""Race recipes against the clock: which one brings an encoder to a given loss first?

    python benchmarks/speedrun.py race [RECIPE.yaml] [--track laptop] [--seeds 0 1 2] [--output DIR] [--quick]
    python benchmarks/speedrun.py score DIRECTORY [--track ten-minutes]

A track fixes the text, the tokenizer, the hidden tokens and the time limit. A recipe is a YAML file with changes to the
settings of the first `bertlab demo`. `race` continues with the seeds that are not finished.
"""

import argparse
import copy
import hashlib
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from bertlab.cli.demo import FIRST_DEMO, pretraining_config
from bertlab.core.files import find_model_directory
from bertlab.train.reports import environment
from bertlab.train.run import Run, pretraining_on
from bertlab.core.devices import find_accelerator
from bertlab.core.serialization import load_json, load_yaml
from bertlab.data.corpus import Corpus, load_corpus
from bertlab.data.module import PretrainingDataModule
from bertlab.data.rows import IGNORE_INDEX
from bertlab.data.tokenizers import load_tokenizer, train_tokenizer
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model
from bertlab.model.losses import token_bytes, unigram_counts, unigram_entropy
from bertlab.train.initialization import load_encoder

Interval = tuple[float, float, float]  # a mean and its 95 % interval


@dataclass(frozen=True)
class Track:
    "What all recipes of a race share."

    name: str
    # Nats per hidden token with the tokenizer of the track; None: the lowest loss wins.
    target: float | None = None
    seconds: float | None = None  # limit of training
    validation_fraction: float = 0.1  # of the characters
    vocab_size: int = 4096
    max_sequence_length: int = 128
    mlm_probability: float = 0.3  # of the held-out tokens
    max_documents: int | None = None

    def text(self) -> Corpus:
        options = {name: getattr(self, name) for name in ("validation_fraction", "max_documents")}
        return load_corpus(None, **options)

    def in_time(self, seconds: float) -> bool:
        "Whether training fits the limit; the last step may finish."
        return self.seconds is None or seconds <= 1.02 * self.seconds + 1


TRACKS = {
    "laptop": Track("laptop", target=4.25),
    "ten-minutes": Track("ten-minutes", seconds=600.0),
}
# Options of a configuration that a recipe cannot change.
OF_THE_TRACK = {
    "data": {"train_dataset_name_or_path", "val_dataset_name_or_path", "train_split", "val_split", "file_format",
             "text_column", "streaming", "pretrained_tokenizer_name_or_path", "val_batch_size"},
    "model": {"pretrained_model_name_or_path", "pretrained_tokenizer_name_or_path", "objective"},
    "run": {"output", "vocab_size", "tokenizer_kind", "val_every_steps", "validate_first", "models", "keep_last", "keep_best", "report", "loggers"},
    "trainer": {"accelerator", "devices", "num_nodes", "limit_train_batches", "limit_val_batches", "overfit_batches",
                "fast_dev_run", "barebones"},
}  # fmt: skip


def load_recipe(path: str | os.PathLike) -> dict[str, dict[str, Any]]:
    "Read what a recipe changes, by section. Raises `ValueError` for options that the track decides."
    recipe = load_yaml(path)
    for section, options in recipe.items():
        if section not in OF_THE_TRACK or not isinstance(options, Mapping):
            raise ValueError(
                f"{path}: {section!r} must be one of {', '.join(OF_THE_TRACK)}, with options"
            )
        if fixed := OF_THE_TRACK[section] & set(options):
            raise ValueError(f"{path}: the track decides {section}.{min(fixed)}; remove it")
    return recipe


def race_config(
    track: Track, recipe: Mapping[str, Any], output: str | os.PathLike, seed: int
) -> dict[str, Any]:
    "The first demo's configuration with a recipe's changes and the track's options."
    base = replace(
        FIRST_DEMO, vocab_size=track.vocab_size, max_sequence_length=track.max_sequence_length
    )
    config = copy.deepcopy(pretraining_config(base, output)) | {"seed_everything": seed}
    for section, options in recipe.items():
        for name, value in options.items():
            default = config[section].get(name)
            merge = isinstance(default, Mapping) and isinstance(value, Mapping)
            config[section][name] = {**default, **value} if merge else value
    config["run"] |= {"output": str(output), "models": False, "report": False, "validate_first": False,
                      "val_every_steps": config["trainer"]["max_steps"], "time_limit": track.seconds}  # fmt: skip
    config["trainer"] |= {"accelerator": "cpu", "devices": 1}
    return config


class Judge:
    "Held-out rows with their hidden tokens: the same for every recipe with the same tokenizer."

    def __init__(self, track: Track, corpus: Corpus, tokenizer: Any):
        masking = {"mlm_probability": track.mlm_probability, "selection": "exact",
                   "min_labels_per_document": 1, "seed": 0}  # fmt: skip
        self.data = PretrainingDataModule(corpus, tokenizer, max_sequence_length=track.max_sequence_length,
                                          val_batch_size=16, collator_kwargs=masking)  # fmt: skip
        self.data.setup("validate")

    def sha256(self) -> str:
        "A hash of the hidden tokens and of the inputs."
        digest = hashlib.sha256()
        for batch in self.data.val_dataloader():
            for name in ("input_ids", "labels"):
                digest.update(batch[name].numpy().tobytes())
        return digest.hexdigest()

    def row_losses(self, model: Any) -> tuple[np.ndarray, Any]:  # (3, N), and all labels
        "For each row: nats, hidden tokens and their bytes."
        bytes_V = token_bytes(self.data.tokenizer, model.config.vocab_size)
        rows, labels = [], []
        for batch in self.data.val_dataloader():
            labels_BK = batch["labels"].gather(1, batch["label_positions"])
            hidden_BK = labels_BK != IGNORE_INDEX
            inputs = {name: value.to(model.device) for name, value in batch.items() if name in
                      ("input_ids", "attention_mask", "position_ids", "label_positions")}  # fmt: skip
            with torch.no_grad():
                logits_MV = model(**inputs).logits[hidden_BK].float().cpu()
            labels_M, row_M = labels_BK[hidden_BK], hidden_BK.nonzero()[:, 0]
            values_3M = torch.stack([F.cross_entropy(logits_MV, labels_M, reduction="none"),
                                     torch.ones(len(labels_M)), bytes_V[labels_M].float()])  # fmt: skip
            rows.append(torch.zeros(3, len(labels_BK)).index_add(1, row_M, values_3M))
            labels.append(labels_M)
        table = torch.cat(rows, 1).double().numpy()
        return table[:, table[1] > 0], torch.cat(labels)


@dataclass
class Attempt:
    "One seed of a race."

    seed: int
    validation_loss: float  # nats per hidden token
    bits_per_byte: float
    train_seconds: float
    steps: int
    tokens: int  # without padding
    curve: list[tuple[int, float]] = field(repr=False)  # step, seconds


def run_seed(
    track: Track, recipe: Mapping[str, Any], output: str | os.PathLike, seed: int, corpus: Corpus
) -> tuple[Attempt, str]:  # and the hash of the hidden tokens
    "Train one seed, save the model, and let the judge score it. Continues what is in `output`."
    record = {"corpus": corpus.name, "corpus_sha256": corpus.sha256, **environment("cpu")}
    run = Run(
        race_config(track, recipe, output, seed), pretraining_on(corpus),
        resume=(Path(output) / "run.yaml").exists(), notes={"command": "speedrun", "record": record},
    )  # fmt: skip
    run.data.val_datasets, run.parts.validates = [], False  # the judge validates, once
    run.prepare()
    run.fit()
    with run.module.evaluation_weights():
        save_model(run.module.model, run.tokenizer, output)
    judge = Judge(track, corpus, run.tokenizer)
    run.trainer.limit_val_batches = 1.0
    metrics = run.trainer.validate(run.module, judge.data, verbose=False)[0]
    tokens, seconds = run.history.totals()
    (Path(output) / "metrics.json").write_text(json.dumps({"train_seconds": seconds}))
    curve = [(int(row["step"]), round(row["seconds"], 3)) for row in run.history.rows]
    attempt = Attempt(seed, metrics["val_loss"], metrics["val_bits_per_byte"], seconds,
                      curve[-1][0], tokens, curve)  # fmt: skip
    return attempt, judge.sha256()


def race(
    recipe: Mapping[str, Any],
    track: Track,
    output: str | os.PathLike,
    seeds: Sequence[int] = (0, 1, 2),
) -> dict[str, Any]:  # the log
    "Train and judge a recipe, seed after seed; finished seeds are kept. Writes log.json."
    output, corpus = Path(output), track.text()
    judge = Judge(track, corpus, train_tokenizer(corpus.train_texts, track.vocab_size))
    target = {"nats": track.target, "hidden_sha256": judge.sha256()}
    log = {"track": track.name, "recipe": recipe, "text_sha256": corpus.sha256, "target": target,
           "machine": environment("cpu"), "attempts": []}  # fmt: skip
    for seed in seeds:
        path = output / f"seed-{seed}" / "attempt.json"
        if not path.exists():
            attempt, hidden_sha256 = run_seed(track, recipe, path.parent, seed, corpus)
            path.write_text(json.dumps(asdict(attempt) | {"hidden_sha256": hidden_sha256}))
        log["attempts"].append(load_json(path))
    (output / "log.json").write_text(json.dumps(log, indent=1) + "\n")
    return log


def arrived(log: Mapping[str, Any], attempt: Mapping[str, Any]) -> bool:
    "Return whether a seed reached the target, if there is one."
    target = log["target"]["nats"]
    return target is None or attempt["validation_loss"] <= target


def summarize(log: Mapping[str, Any]) -> dict[str, Any]:
    attempts = log["attempts"]
    return {"seeds": len(attempts), "arrived": sum(arrived(log, attempt) for attempt in attempts),
            "median_seconds": statistics.median(attempt["train_seconds"] for attempt in attempts),
            "worst_loss": max(attempt["validation_loss"] for attempt in attempts)}  # fmt: skip


def format_race(log: Mapping[str, Any]) -> str:
    "Return a log as a table."
    lines = ["seed   steps  seconds  nats   bits per byte  arrived"]
    lines += [f"{a['seed']:<4} {a['steps']:>7,} {a['train_seconds']:>8.1f}  {a['validation_loss']:.3f}"
              f"  {a['bits_per_byte']:<13.4f}  {'yes' if arrived(log, a) else 'no'}" for a in log["attempts"]]  # fmt: skip
    return "\n".join(lines)


def ratio_interval(sums_N: np.ndarray, counts_N: np.ndarray, num_draws: int = 1000) -> Interval:
    "A ratio of sums over rows, and its interval when rows are drawn again (Efron 1979)."
    draws = np.random.default_rng(0).integers(len(sums_N), size=(num_draws, len(sums_N)))
    low, high = np.quantile(sums_N[draws].sum(1) / counts_N[draws].sum(1), (0.025, 0.975))
    return float(sums_N.sum() / counts_N.sum()), float(low), float(high)


@dataclass(frozen=True)
class ModelScore:
    "The judge's score of a model."

    track: Track
    directory: str
    nats: Interval  # per hidden token
    bits: Interval  # per byte
    baseline: float  # nats per hidden token of the best guess from token frequencies
    seconds: float | None  # of training; None: unknown
    hidden_sha256: str  # of the hidden tokens: losses compare where it is equal
    sums_N: np.ndarray = field(repr=False, compare=False)  # nats of each row
    counts_N: np.ndarray = field(repr=False, compare=False)  # hidden tokens of each row

    @property
    def in_time(self) -> bool | None:
        return None if self.seconds is None else self.track.in_time(self.seconds)

    @property
    def reads(self) -> bool:
        "Whether the whole interval is below the unigram baseline."
        return self.nats[2] < self.baseline


def train_seconds_of(directory: Path, corpus: Corpus) -> float | None:  # None: unknown
    "Return the training time of a run. Raises `ValueError` if it trained on another text."
    run = next((p for p in (directory, *directory.parents[:2]) if (p / "run.yaml").is_file()), None)
    if run is None:
        return None
    if load_yaml(run / "run.yaml").get("record", {}).get("corpus_sha256") != corpus.sha256:
        raise ValueError(
            f"{directory} was trained on another text, which may contain held-out documents"
        )
    metrics = run / "metrics.json"
    return load_json(metrics)["train_seconds"] if metrics.is_file() else None


def score_model(
    directory: str | os.PathLike, track: Track, corpus: Corpus | None = None
) -> ModelScore:
    "Score a masked language model. Raises `ValueError` for a run of another text."
    corpus = corpus or track.text()
    path = Path(find_model_directory(directory)).resolve()
    seconds = train_seconds_of(path, corpus)
    model = load_encoder(path)
    if not isinstance(model, BertLabForMaskedLM):
        raise ValueError(
            f"directory={str(path)!r} must be a masked language model, got {type(model).__name__}"
        )
    judge = Judge(track, corpus, load_tokenizer(path))
    (sums_N, counts_N, bytes_N), labels = judge.row_losses(model.eval().to(find_accelerator()))
    baseline = unigram_entropy(unigram_counts(labels, model.config.vocab_size))
    return ModelScore(track, str(directory), ratio_interval(sums_N, counts_N), ratio_interval(sums_N / np.log(2), bytes_N),
                      baseline, seconds, judge.sha256(), sums_N, counts_N)  # fmt: skip


def format_score(score: ModelScore) -> str:
    "A score as text."
    time = "unknown" if score.seconds is None else f"{score.seconds:.0f} s"
    time += ", over the limit" if score.in_time is False else ""
    return "\n".join([f"directory  {score.directory}", f"training   {time}",
                      "loss       {:.3f} nats per hidden token ({:.3f} to {:.3f})".format(*score.nats),
                      "in bits    {:.4f} per byte ({:.4f} to {:.4f})".format(*score.bits),
                      f"baseline   {score.baseline:.3f} nats, of the token frequencies alone",
                      f"reads      {'yes' if score.reads else 'not shown: the interval reaches the baseline'}"])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["race", "score"])
    parser.add_argument(
        "path", nargs="?", help="recipe to race (default: the first demo's), or model to score"
    )
    parser.add_argument("--track", choices=TRACKS, default="laptop")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", default="speedrun")
    parser.add_argument("--quick", action="store_true", help="two steps of one seed")
    options = parser.parse_args()
    track = replace(TRACKS[options.track], max_documents=400 if options.quick else None)
    if options.action == "score":
        return print(format_score(score_model(options.path, track)))
    recipe = load_recipe(options.path) if options.path else {}
    if options.quick:
        schedule = {"scheduler_warmup_steps": 1, "scheduler_cooldown_steps": 1}
        model = {**recipe.get("model", {}), **schedule}
        recipe = {**recipe, "model": model, "trainer": {"max_steps": 2}}
    seeds = options.seeds[:1] if options.quick else options.seeds
    print(format_race(race(recipe, track, options.output, seeds)))


if __name__ == "__main__":
    main()
