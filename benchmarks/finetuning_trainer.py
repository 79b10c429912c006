"""Fine-tuning the built-in tasks beside transformers' Trainer: rows and real tokens per second.

    python benchmarks/finetuning_trainer.py [--tasks docstring-area code-tokens api-questions]

The same shape with fresh weights on both sides, the same rows, tokenizer, batch in rows, rate and
clipping; no validation. Ours is FinetuningModule, FinetuningDataModule and make_trainer. Theirs is what
transformers' example scripts do: `datasets.map`, then Trainer with a collator that pads to the longest
row of a batch. Tokenizing is reported, and not part of the timed steps. What the tasks can be learnt to
is measured by finetuning.py.
"""

import json
import tempfile
import time
from pathlib import Path

import torch
from pretraining import DECAY, PRECISIONS, SHAPES, Meter, shape, shared_text
from sides import (
    Ledger,
    alternate,
    common_parser,
    fingerprint,
    machine,
    ratios,
    spread,
    write_result,
)

import bertlab
from bertlab.core.plots import BLUE, ORANGE, new_axes

TASKS = ("docstring-area", "code-tokens", "api-questions")
ENDINGS = {"classification": "ForSequenceClassification", "token_classification": "ForTokenClassification",
           "question_answering": "ForQuestionAnswering"}  # fmt: skip
ROWS, RATE, STRIDE = 32, 5e-4, 32


def our_side(case: dict, task, tokenizer) -> dict:
    "FinetuningModule with a trainer of ours."
    from lightning.pytorch.callbacks import Callback

    from bertlab.cli.main import silence_libraries
    from bertlab.finetuning.module import FinetuningModule
    from bertlab.finetuning.data import FinetuningDataModule
    from bertlab.train.trainer import make_trainer, seed_everything

    silence_libraries()
    start = time.perf_counter()
    options = {"doc_stride": STRIDE} if task.kind == "question_answering" else None
    data = FinetuningDataModule(task.kind, tokenizer, max_sequence_length=task.max_sequence_length,
                                train_batch_size=ROWS, collator_kwargs=options)  # fmt: skip
    data.set_datasets(**task.splits)
    data.setup()
    prepared = time.perf_counter() - start
    seed_everything(0)
    config = {name: value for name, value in shape("bert", case["model"]).to_diff_dict().items()
              if not name.endswith("token_id")}  # fmt: skip
    module = FinetuningModule(
        task.kind, learning_rate=RATE, weight_decay=DECAY, model_config_kwargs=config
    )
    found = {}

    class Clock(Callback):
        def on_train_start(self, trainer, module) -> None:
            found["meter"] = Meter(module.model)

        def on_train_batch_end(self, *_) -> None:
            found["meter"].step()

    trainer = make_trainer(case["steps"], PRECISIONS[case["precision"]], callbacks=[Clock()])
    trainer.fit(module, data)
    return {"preparation_seconds": prepared, **found["meter"].figures(case["warm"])}


def their_dataset(task, tokenizer):
    "Encoded training rows, as run_glue.py, run_ner.py and run_qa.py make them."
    from datasets import Dataset

    names = {name: number for number, name in enumerate(task.label_names)}
    cut = {"truncation": True, "max_length": task.max_sequence_length}

    def texts(batch: dict) -> dict:
        return {
            **tokenizer(batch["text"], **cut),
            "labels": [names[label] for label in batch["label"]],
        }

    def words(batch: dict) -> dict:
        made = tokenizer(batch["text"], is_split_into_words=True, **cut)
        rows = []
        for number, labels in enumerate(batch["label"]):
            ids = made.word_ids(number)
            rows.append([-100 if w is None or w == before else names[labels[w]]
                         for before, w in zip([None, *ids], ids)])  # fmt: skip
        return {**made, "labels": rows}

    def questions(batch: dict) -> dict:
        made = tokenizer(batch["question"], batch["context"], truncation="only_second", stride=STRIDE,
                         max_length=cut["max_length"], return_overflowing_tokens=True,
                         return_offsets_mapping=True)  # fmt: skip
        starts, ends = [], []
        for number, pair in enumerate(made.pop("overflow_to_sample_mapping")):
            answer, parts = batch["answers"][pair], made.sequence_ids(number)
            first = answer["answer_start"][0] if answer["text"] else -1
            last = first + len(answer["text"][0]) if answer["text"] else -1
            held = [i for i, (low, high) in enumerate(made["offset_mapping"][number])
                    if parts[i] == 1 and high > first and low < last]  # fmt: skip
            starts.append(held[0] if held else 0)
            ends.append(held[-1] if held else 0)
        made.pop("offset_mapping")
        return {**made, "start_positions": starts, "end_positions": ends}

    make = {"classification": texts, "token_classification": words, "question_answering": questions}
    rows = Dataset.from_list(
        [{k: v for k, v in row.items() if k not in ("source", "kind")} for row in task.train]
    )
    return rows.map(make[task.kind], batched=True, remove_columns=rows.column_names)


def their_side(case: dict, task, tokenizer) -> dict:
    "transformers' Trainer."
    from transformers import (DataCollatorForTokenClassification, DataCollatorWithPadding, Trainer,
                              TrainerCallback, TrainingArguments, set_seed)  # fmt: skip

    from bertlab.model.huggingface import to_family_config, their_class

    start = time.perf_counter()
    dataset = their_dataset(task, tokenizer)
    prepared = time.perf_counter() - start
    set_seed(0)
    ending = ENDINGS[task.kind]
    config = to_family_config(shape("bert", case["model"]), "bert", ending)
    if task.label_names:
        config.num_labels = len(task.label_names)
    model = their_class("bert", ending)(config)
    meter = Meter(model)

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__) -> None:
            meter.marks = [meter.mark()]

        def on_step_end(self, *_, **__) -> None:
            meter.step()

    words = task.kind == "token_classification"
    collator = (DataCollatorForTokenClassification if words else DataCollatorWithPadding)(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=ROWS, learning_rate=RATE, weight_decay=DECAY,
            max_steps=case["steps"], lr_scheduler_type="constant", bf16=case["precision"] == "bf16",
            save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no",
            use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        Trainer(model, arguments, collator, dataset, callbacks=[Clock()]).train()
    return {"preparation_seconds": prepared, **meter.figures(case["warm"])}


def measure(case: dict) -> dict:
    "One case, in this process."
    from bertlab.finetuning.tasks import load_builtin_dataset

    _, tokenizer = shared_text(SHAPES[case["model"]][3], case["documents"], Path(case["kept"]))
    sizes = {"train": case["train_rows"], "validation": 50, "test": 50}
    task = load_builtin_dataset(case["task"], sizes={k: v for k, v in sizes.items() if v})
    figures = (our_side if case["side"] == "ours" else their_side)(case, task, tokenizer)
    return {**figures, "rows_per_second": ROWS * figures["steps"] / figures["wall_seconds"]}


def draw(result: dict):
    "How many times Trainer's tokens per second ours are, by task and precision."
    figure, axes = new_axes("", "ours over Trainer, real tokens per second", size=(7, 4))
    names = list(result["ratios"])
    for place, name in enumerate(names):
        found = result["ratios"][name]["wall"]
        ends = [[found["median"] - found["min"]], [found["max"] - found["median"]]]
        colour = ORANGE if name.endswith("fp32") else BLUE
        axes.bar(place, found["median"], yerr=ends, color=colour, capsize=3)
    axes.axhline(1, color="0.3", linewidth=0.8)
    axes.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=7)
    axes.set_title(
        f"{result['machine']['processor']}, {result['machine']['threads']} threads", fontsize=9
    )
    return figure


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "finetuning_trainer", rounds=3)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument(
        "--precisions", nargs="+", default=["fp32", "bf16"], choices=("fp32", "bf16")
    )
    parser.add_argument("--model", default="small", choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=12, help="timed steps (default: 12)")
    parser.add_argument("--train-rows", type=int, help="of a task (default: all)")
    options, warm, documents = parser.parse_args(), 3, None
    if options.case:
        print(json.dumps(measure(json.loads(options.case))))
        return
    if options.quick:
        options.rounds, options.tasks, options.precisions = 1, options.tasks[:1], ["bf16"]
        options.model, options.steps, options.train_rows, warm, documents = "tiny", 2, 100, 1, 2000
    place = machine(options.threads)
    ledger = Ledger(options.kept / "finetuning_trainer.json", fingerprint(__file__), options.fresh)
    shared_text(SHAPES[options.model][3], documents, options.kept)
    base = {"model": options.model, "steps": options.steps + warm, "warm": warm, "documents": documents,
            "train_rows": options.train_rows, "kept": str(options.kept)}  # fmt: skip
    show = lambda f: f"{f['tokens_per_second']:9,.0f} tokens/s, {f['fill']:4.0%} full"  # noqa: E731
    sides, runs, compared = {}, {}, {}
    for task in options.tasks:
        for precision in options.precisions:
            name = f"{task}, {precision}"
            print(name, flush=True)
            cases = {side: {**base, "task": task, "precision": precision, "side": side}
                     for side in ("ours", "Trainer")}  # fmt: skip
            runs[name] = alternate(__file__, cases, options.rounds, options.threads, ledger, show)
            compared[name] = {
                clock: ratios(runs[name]["ours"], runs[name]["Trainer"], figure)
                for clock, figure in (
                    ("wall", "tokens_per_second"),
                    ("processor", "tokens_per_processor_second"),
                )
            }
            sides[name] = {side: {k: spread(f[k] for f in found) for k in found[0]}
                           for side, found in runs[name].items()}  # fmt: skip
            print(f"  ours over Trainer: {compared[name]['wall']['median']:.2f}", flush=True)
    settings = dict(
        rows=ROWS, learning_rate=RATE, weight_decay=DECAY, doc_stride=STRIDE, shapes=SHAPES
    )
    write_result(options.output, {
        "what": __doc__.splitlines()[0], "bertlab": bertlab.__version__, "machine": place,
        "model": options.model, "settings": settings, "judged": [], "ratios": compared, "sides": sides,
        "runs": runs}, draw)  # fmt: skip


if __name__ == "__main__":
    main()
