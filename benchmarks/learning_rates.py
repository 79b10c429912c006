"""Which learning rate is best for a model, a task and an optimizer, and how far the default falls short of it.

    python benchmarks/learning_rates.py MODEL [MODEL ...] [--tasks intents area] [--optimizers adamw lion]

MODEL is a directory, MODEL:6 its first six layers. Each case trains as `bertlab finetune` does when nothing is
named (three epochs, batches of 32, a linear decay after a warmup of 10 %), at the default rate, and at rates
that are doubled or halved from there until the best one lies inside. `--schedules` compares schedules at that best
rate instead. The task `text` continues the pretraining on --text for 150 steps and scores the validation loss.
"""

import itertools
import logging
import random
import statistics
import tempfile
import warnings
from pathlib import Path

from sides import Ledger, common_parser, machine, write_result

TASKS = "intents", "area", "code", "similarity"
STEP = 2  # factor between the rates that are tried
MOST = 8  # rates of a case
ACTIONS = "open", "close", "start", "stop", "order", "cancel", "move", "check"
OBJECTS = "account", "delivery", "ticket", "meeting", "invoice"
TEMPLATES = (
    "please {0} the {1} for {2}", "can you {0} my {1} on {2}", "i want to {0} a {1} with {2}",
    "{2} asked me to {0} this {1}", "how do i {0} the {1} of {2}", "{0} {2}'s {1} right now",
    "it is time to {0} another {1}, {2}", "would you {0} that {1} before {2} calls",
)  # fmt: skip
NAMES = "anna", "ben", "monday", "carla", "the bank", "david", "friday", "my sister", "eve"
SCHEDULES = list(itertools.product(("linear", "cosine", "constant"), (0.0, 0.1, 0.25)))


def requests(count: int, seed: int) -> list[dict]:
    "Make sentences with one of 40 intents, each from one of eight templates."
    generator = random.Random(seed)
    rows = []
    for _ in range(count):
        action, item = generator.choice(ACTIONS), generator.choice(OBJECTS)
        text = generator.choice(TEMPLATES).format(action, item, generator.choice(NAMES))
        rows.append({"text": text, "label": f"{action} {item}"})
    return rows


def pairs(count: int, seed: int) -> list[dict]:
    "Make pairs of requests; their score is the share of action and object that they have in common."
    generator, rows = random.Random(seed), []
    for first in requests(count, seed):
        action, item = first["label"].split()
        other = (
            generator.choice((action, generator.choice(ACTIONS))),
            generator.choice((item, generator.choice(OBJECTS))),
        )
        text = generator.choice(TEMPLATES).format(*other, generator.choice(NAMES))
        score = ((action == other[0]) + (item == other[1])) / 2
        rows.append({"text": first["text"], "text_pair": text, "label": score})
    return rows


def load_task(name: str, size: int) -> tuple[str, dict, int]:
    "Return the kind of task, its rows by split and its longest row."
    if name == "intents":
        return (
            "classification",
            {"train": requests(size, 0), "validation": requests(size // 2, 1)},
            32,
        )
    if name == "similarity":
        return "regression", {"train": pairs(size, 0), "validation": pairs(size // 2, 1)}, 48
    from bertlab.finetuning.builtin import load_builtin_dataset

    dataset = {"area": "docstring-area", "code": "code-tokens"}[name]
    size = size if name == "area" else size // 4
    task = load_builtin_dataset(dataset, sizes={"train": size, "validation": size // 2})
    splits = {"train": task.train, "validation": task.validation}
    return task.task, splits, task.max_sequence_length


def short_model(name: str) -> str:
    "Return the directory of a model; of MODEL:n, of one that has its first n layers."
    path, _, layers = name.partition(":")
    if not layers:
        return path
    from transformers import AutoModel, AutoTokenizer

    model, short = AutoModel.from_pretrained(path), Path(tempfile.mkdtemp()) / Path(path).name
    model.encoder.layer = model.encoder.layer[: int(layers)]
    model.config.num_hidden_layers = int(layers)
    model.save_pretrained(short)
    AutoTokenizer.from_pretrained(path).save_pretrained(short)
    return str(short)


def finetuned(case: dict) -> dict:
    "Fine-tune and return the rate and the score on the validation rows (higher is better)."
    from bertlab.finetuning.data import FinetuningDataModule
    from bertlab.finetuning.module import FinetuningModule
    from bertlab.train.trainer import make_trainer, seed_everything

    task, splits, longest = load_task(case["task"], case["rows"])
    seed_everything(case["seed"])
    data = FinetuningDataModule(
        task, case["model"], max_sequence_length=longest, train_batch_size=32, val_batch_size=64,
        text_column=["text", "text_pair"] if case["task"] == "similarity" else None,
    )  # fmt: skip
    data.set_datasets(splits["train"], splits["validation"])
    data.setup()
    steps = 3 * (len(splits["train"]) // 32)
    kind, warmup = case.get("schedule") or ("linear", 0.1)
    module = FinetuningModule(
        task, case["model"], optimizer_class=case["optimizer"], learning_rate=case["rate"],
        scheduler_type=kind, warmup_ratio=warmup,
    )  # fmt: skip
    make_trainer(steps).fit(module, data)
    scores = make_trainer(1).validate(module, data, verbose=False)[0]
    return {
        "width": module.config.hidden_size,
        "steps": steps,
        "rate": module.hparams.learning_rate,
        "score": float(scores[f"val_{module.task.monitor}"]),
    }


def continued(case: dict) -> dict:
    "Continue the pretraining and return the rate and the negated validation loss in nats."
    from bertlab.data.module import PretrainingDataModule
    from bertlab.train.modules import PretrainingModule
    from bertlab.train.trainer import make_trainer, seed_everything

    seed_everything(case["seed"])
    data = PretrainingDataModule(
        case["text"], case["model"], max_sequence_length=128,
        train_batch_size=16, val_batch_size=16,
    )  # fmt: skip
    module = PretrainingModule(
        pretrained_model_name_or_path=case["model"], pretrained_tokenizer_name_or_path=case["model"],
        optimizer_class=case["optimizer"], learning_rate=case["rate"],
    )  # fmt: skip
    make_trainer(case["steps"]).fit(module, data)
    loss = make_trainer(1).validate(module, data, verbose=False)[0]["val_loss"]
    return {
        "width": module.config.hidden_size,
        "steps": case["steps"],
        "rate": module.hparams["learning_rate"],
        "score": -float(loss),
    }


def measure(case: dict) -> dict:
    "Train with every seed, and return the rate and the mean score."
    train = continued if case["task"] == "text" else finetuned
    runs = [train({**case, "seed": seed}) for seed in range(case["seeds"])]
    figures = {**runs[0], "score": statistics.mean(run["score"] for run in runs)}
    print(
        f"    {case['rate'] or 'default':>10}  {figures['rate']:.2e}  {figures['score']:.4f}",
        flush=True,
    )
    return figures


def climb(score_at, default: dict) -> dict[float, dict]:
    "Try rates on both sides of the best one until it lies between two others."
    scores = {default["rate"]: default}
    while True:
        best = max(scores, key=lambda rate: scores[rate]["score"])
        around = best * STEP, best / STEP
        missing = [rate for rate in around if rate not in scores and len(scores) < MOST]
        if not missing:
            return scores
        for rate in missing:
            scores[rate] = score_at(rate)


def main() -> None:
    parser = common_parser(__doc__, "learning_rates", 1)
    add = parser.add_argument
    add("models", nargs="+", help="directories; MODEL:6 is the first six layers")
    add("--tasks", nargs="+", default=TASKS, choices=(*TASKS, "text"))
    add("--optimizers", nargs="+", default=("adamw", "lion"))
    add("--rows", type=int, default=960, help="to train on; half as many validate")
    add("--seeds", type=int, default=1, help="whose mean score counts")
    add("--steps", type=int, default=150, help="of the task `text`")
    add("--text", help="file for the task `text`")
    add("--schedules", action="store_true", help="compare schedules at the best rate")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    ledger, result = Ledger(options.output.stem, options.fresh), []
    for name, task, optimizer in itertools.product(
        options.models, options.tasks, options.optimizers
    ):
        case = {"model": short_model(name), "task": task, "optimizer": optimizer,
                "rows": options.rows, "seeds": options.seeds, "steps": options.steps, "text": options.text}  # fmt: skip
        print(Path(name).name, task, optimizer, flush=True)

        def score_at(rate, **more):
            key = f"{name} {task} {optimizer} {options.rows} {rate} {more}"
            return ledger.get(key, lambda: measure({**case, "rate": rate, **more}))

        default = score_at(None)
        rates = climb(score_at, default)
        best = max(rates, key=lambda rate: rates[rate]["score"])
        row = {"model": Path(name).name, "width": default["width"], "task": task,
               "optimizer": optimizer, "rows": options.rows, "steps": default["steps"],
               "seeds": options.seeds,
               "scores": {f"{rate:.3g}": rates[rate]["score"] for rate in sorted(rates)},
               "default_rate": default["rate"],
               "default": [default["rate"], default["score"]],
               "best": [best, rates[best]["score"]]}  # fmt: skip
        if options.schedules:
            row["schedules"] = {
                f"{kind} {warmup}": score_at(best, schedule=[kind, warmup])["score"]
                for kind, warmup in SCHEDULES
            }
        result.append(row)
    write_result(options, {"machine": machine(options.threads), "cases": result})


if __name__ == "__main__":
    main()
