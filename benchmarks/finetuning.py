"""Fine-tune the model of `bertlab demo` on each built-in task, and random weights beside it.

    bertlab demo --output build/demo
    python benchmarks/finetuning.py build/demo [--output FILE]

Both starts have the same shape, tokenizer, rows, updates and seeds. Every run goes back to the weights
that did best on the validation rows, and is scored on the test rows, once. Beside them stand the
majority and the bag of words of `bertlab.finetuning.baselines`. With --tune, each start first tries the rates of
TUNING on a seed that does not count, and keeps the better one by the validation rows. Seconds are wall
time of a whole run: training, validations and scores. The demo's model has read the documentation of all
modules, without labels. Nothing here passes or fails; the figures are written with the machine.
"""

import logging
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
from sides import BenchmarkParser, processor, write_result

import bertlab
from bertlab.finetuning.baselines import bag_of_words_baseline, majority_baseline
from bertlab.model.huggingface import from_huggingface
from bertlab.data.tokenizers import load_tokenizer
from bertlab.core.devices import describe_device
from bertlab.finetuning.module import FinetuningModule
from bertlab.finetuning.data import FinetuningDataModule
from bertlab.finetuning.runs import finetune
from bertlab.finetuning.tasks import BUILTIN_DATASETS, BuiltinDataset, load_builtin_dataset

NUM_EPOCHS = {"docstring-area": 4, "code-tokens": 3, "doc-words": 3, "api-questions": 4}
RATES = {"docstring-area": 5e-4, "code-tokens": 1e-3, "doc-words": 1e-3, "api-questions": 1e-3}
TUNING, TUNING_SEED = (5e-4, 1e-3, 2e-3), 7
BATCH, STRIDE = 32, 32  # rows; tokens that windows of a context share
DROPOUT = {
    "embedding_dropout": 0.1,
    "attention_dropout": 0.1,
    "mlp_dropout": 0.1,
    "classifier_dropout": 0.1,
}
TARGET = "each run under 180 seconds on two cores; pretrained above both baselines"


def read_task(
    name: str, directory: Path, limit: int | None
) -> tuple[BuiltinDataset, FinetuningDataModule]:
    "A task and its rows, tokenized once; with a limit, a small version to try the benchmark."
    task = load_builtin_dataset(
        name, sizes=limit and dict.fromkeys(("train", "validation", "test"), limit)
    )
    options = {"doc_stride": STRIDE} if task.kind == "question_answering" else None
    data = FinetuningDataModule(
        task.kind, load_tokenizer(str(directory)), max_sequence_length=task.max_sequence_length,
        train_batch_size=BATCH, val_batch_size=64, test_batch_size=64, collator_kwargs=options,
    )  # fmt: skip
    data.set_datasets(**task.splits)
    data.setup()
    return task, data


def start_options(start: str, directory: Path) -> dict:
    "What tells the two starts apart."
    if start == "pretrained":
        return {"pretrained_model_name_or_path": str(directory)}
    return {
        "model_config_kwargs": from_huggingface(directory, load_weights=False).config.to_diff_dict()
    }


def run_once(
    task: BuiltinDataset,
    data: FinetuningDataModule,
    start: dict,
    rate: float,
    seed: int,
    epochs: int,
) -> dict:
    "One run: its scores on validation and test rows by the task's metric, and its seconds."
    begin = time.perf_counter()
    dropout = dict(DROPOUT) | (
        {"classifier_pooling": "mean"} if task.kind == "classification" else {}
    )
    module = FinetuningModule(
        task.kind, learning_rate=rate, scheduler_type="linear", warmup_ratio=0.1,
        model_kwargs=dropout, **start,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = finetune(module, data, folder, num_epochs=epochs, seed=seed)
    return {
        "seed": seed, "test": run.metrics[f"test_{task.metric}"],
        "validation": run.metrics[f"val_{task.metric}"], "updates": int(run.record.rows[-1][0]),
        "tokens": int(run.record.rows[-1][4]), "seconds": time.perf_counter() - begin,
    }  # fmt: skip


def measure_start(
    name: str, task: BuiltinDataset, data: FinetuningDataModule, start: dict, options
) -> dict:
    "Choose a rate, then run each seed."
    epochs, tuning, rate = options.epochs or NUM_EPOCHS[name], [], RATES[name]
    if options.tune:
        for tried in TUNING:
            run = run_once(task, data, start, tried, TUNING_SEED, epochs)
            tuning.append({"rate": tried, "validation": run["validation"]})
        rate = max(tuning, key=lambda one: one["validation"])["rate"]
    runs = [run_once(task, data, start, rate, seed, epochs) for seed in options.seeds]
    tests = [run["test"] for run in runs]
    deviation = statistics.stdev(tests) if len(tests) > 1 else None
    return {
        "rate": rate, "mean": statistics.mean(tests), "deviation": deviation,
        "seconds": max(run["seconds"] for run in runs), "tuning": tuning, "runs": runs,
    }  # fmt: skip


def measure_task(name: str, directory: Path, options) -> dict:
    "Both baselines and both starts of one task."
    begin = time.perf_counter()
    task, data = read_task(name, directory, options.limit)
    baselines = [majority_baseline(task), bag_of_words_baseline(task)]
    result = {
        "metric": task.metric, "epochs": options.epochs or NUM_EPOCHS[name],
        "rows": {split: len(rows) for split, rows in task.splits.items()},
        "baselines": {base.name: base.scores[task.metric] for base in baselines},
        "preparing_seconds": time.perf_counter() - begin,
    }  # fmt: skip
    print(
        f"{name} ({task.metric})",
        {key: round(v, 3) for key, v in result["baselines"].items()},
        flush=True,
    )
    for start in ("pretrained", "random"):
        found = measure_start(name, task, data, start_options(start, directory), options)
        result[start] = found
        print(f"    {start:11} {found['mean']:.3f} +- {found['deviation'] or 0:.3f}  "
              f"{found['seconds']:.0f} s a run at most, rate {found['rate']:g}", flush=True)  # fmt: skip
    best = max(result["baselines"].values())
    result["margin"] = {  # in the metric, of the worst and the mean seed
        "worst_over_baselines": min(run["test"] for run in result["pretrained"]["runs"]) - best,
        "mean_over_baselines": result["pretrained"]["mean"] - best,
        "mean_over_random": result["pretrained"]["mean"] - result["random"]["mean"],
    }  # fmt: skip
    return result


def main() -> None:
    parser = BenchmarkParser("finetuning", free=["directory"], description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="what `bertlab demo` wrote")
    parser.add_argument(
        "--tasks", nargs="+", default=list(BUILTIN_DATASETS), choices=list(BUILTIN_DATASETS)
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, help="of every task (default: see NUM_EPOCHS)")
    parser.add_argument("--limit", type=int, help="rows of each split, to try the benchmark")
    parser.add_argument(
        "--tune", action="store_true", help="choose each start's learning rate first"
    )
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    result = {
        "measured": time.strftime("%Y-%m-%d"), "bertlab": bertlab.__version__,
        "processor": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "device": str(describe_device()), "system": platform.platform(),
        "python": platform.python_version(), "torch": str(torch.__version__),
        "limit": options.limit, "target": TARGET, "tasks": {},
    }  # fmt: skip
    for name in options.tasks:
        result["tasks"][name] = measure_task(name, options.directory, options)
        write_result(
            options.output, result, whole={*options.tasks} == {*result["tasks"]}
        )  # after each: they take minutes


if __name__ == "__main__":
    main()
