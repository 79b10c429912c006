"""Fine-tuning the built-in tasks beside transformers' Trainer: real tokens per second.

    python benchmarks/finetuning_trainer.py [--tasks docstring-area code-tokens api-questions]

Both sides train the same newly initialized shape on the same rows with the same tokenizer, batch, learning
rate and clipping, without validation. Ours is FinetuningModule, FinetuningDataModule and make_trainer.
Theirs is what transformers' example scripts do: `datasets.map`, then Trainer with a collator that pads to
the longest row of a batch. Tokenizing is not timed.
"""

import json
import tempfile
from itertools import product

import torch
from pretraining import DECAY, PRECISIONS, SHAPES, Meter, load_text, shape
from sides import Ledger, alternate, common_parser, machine, ratios, spreads, write_result

import bertlab
from bertlab.core.plots import BLUE, ORANGE, new_axes

TASKS = ("docstring-area", "code-tokens", "api-questions")
ENDINGS = {"classification": "ForSequenceClassification", "token_classification": "ForTokenClassification",
           "question_answering": "ForQuestionAnswering"}  # fmt: skip
ROWS, RATE, STRIDE = 32, 5e-4, 32


def fit_module(case: dict, module, data) -> dict:
    "Train a FinetuningModule, with a clock."
    from lightning.pytorch.callbacks import Callback

    from bertlab.train.trainer import make_trainer

    meters = []

    class Clock(Callback):
        def on_train_start(self, trainer, module) -> None:
            meters.append(Meter(module.model))

        def on_train_batch_end(self, *_) -> None:
            meters[0].step()

    trainer = make_trainer(case["steps"], PRECISIONS[case["precision"]], callbacks=[Clock()])
    trainer.fit(module, data)
    return meters[0].figures(case["warm"])


def our_side(case: dict, task, tokenizer) -> dict:
    "Train with FinetuningModule."
    from bertlab.finetuning.module import FinetuningModule
    from bertlab.finetuning.data import FinetuningDataModule
    from bertlab.train.trainer import seed_everything

    options = {"doc_stride": STRIDE} if task.task == "question_answering" else None
    data = FinetuningDataModule(task.task, tokenizer, max_sequence_length=task.max_sequence_length,
                                train_batch_size=ROWS, collator_kwargs=options)  # fmt: skip
    data.set_datasets(**task.splits)
    data.setup()
    seed_everything(0)
    config = {name: value for name, value in shape("bert", case["model"]).to_diff_dict().items()
              if not name.endswith("token_id")}  # fmt: skip
    module = FinetuningModule(
        task.task, learning_rate=RATE, weight_decay=DECAY, model_config_kwargs=config
    )
    return fit_module(case, module, data)


def their_dataset(task, tokenizer):
    "Encode the training rows as run_glue.py, run_ner.py and run_qa.py do."
    from datasets import Dataset

    names = {name: index for index, name in enumerate(task.label_names)}
    cut = {"truncation": True, "max_length": task.max_sequence_length}

    def texts(batch: dict) -> dict:
        return {
            **tokenizer(batch["text"], **cut),
            "labels": [names[label] for label in batch["label"]],
        }

    def words(batch: dict) -> dict:
        encoded = tokenizer(batch["text"], is_split_into_words=True, **cut)
        rows = []
        for index, labels in enumerate(batch["label"]):
            ids = encoded.word_ids(index)
            rows.append([-100 if w is None or w == before else names[labels[w]]
                         for before, w in zip([None, *ids], ids)])  # fmt: skip
        return {**encoded, "labels": rows}

    def questions(batch: dict) -> dict:
        encoded = tokenizer(batch["question"], batch["context"], truncation="only_second", stride=STRIDE,
                         max_length=cut["max_length"], return_overflowing_tokens=True,
                         return_offsets_mapping=True)  # fmt: skip
        starts, ends = [], []
        for index, pair in enumerate(encoded.pop("overflow_to_sample_mapping")):
            answer, parts = batch["answers"][pair], encoded.sequence_ids(index)
            first = answer["answer_start"][0] if answer["text"] else -1
            last = first + len(answer["text"][0]) if answer["text"] else -1
            held = [i for i, (low, high) in enumerate(encoded["offset_mapping"][index])
                    if parts[i] == 1 and high > first and low < last]  # fmt: skip
            starts.append(held[0] if held else 0)
            ends.append(held[-1] if held else 0)
        encoded.pop("offset_mapping")
        return {**encoded, "start_positions": starts, "end_positions": ends}

    make = {"classification": texts, "token_classification": words, "question_answering": questions}
    rows = Dataset.from_list(
        [{k: v for k, v in row.items() if k not in ("source", "kind")} for row in task.train]
    )
    return rows.map(make[task.task], batched=True, remove_columns=rows.column_names)


def fit_trainer(case: dict, model, dataset, collator, **options) -> dict:
    "Train with transformers' Trainer, with a clock."
    from transformers import Trainer, TrainerCallback, TrainingArguments

    meter = Meter(model)

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__) -> None:
            meter.start()

        def on_step_end(self, *_, **__) -> None:
            meter.step()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=ROWS, learning_rate=RATE, weight_decay=DECAY,
            max_steps=case["steps"], lr_scheduler_type="constant", bf16=case["precision"] == "bf16",
            save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no",
            use_cpu=not torch.cuda.is_available(), **options,
        )  # fmt: skip
        Trainer(model, arguments, collator, dataset, callbacks=[Clock()]).train()
    return meter.figures(case["warm"])


def their_side(case: dict, task, tokenizer) -> dict:
    "Train a task with Trainer."
    from transformers import DataCollatorForTokenClassification, DataCollatorWithPadding, set_seed

    from bertlab.model.families import FAMILIES, to_family_config

    dataset = their_dataset(task, tokenizer)
    set_seed(0)
    ending = ENDINGS[task.task]
    config = to_family_config(shape("bert", case["model"]), "bert", ending)
    if task.label_names:
        config.num_labels = len(task.label_names)
    model = FAMILIES["bert"].get_class(ending)(config)
    words = task.task == "token_classification"
    collator = (DataCollatorForTokenClassification if words else DataCollatorWithPadding)(tokenizer)
    return fit_trainer(case, model, dataset, collator)


def measure(case: dict) -> dict[str, float]:
    "Measure one case in this process."
    from bertlab.finetuning.builtin import load_builtin_dataset

    _, tokenizer = load_text(SHAPES[case["model"]][3], case["documents"])
    sizes = {"validation": 50, "test": 50}
    sizes |= {"train": case["train_rows"]} if case["train_rows"] else {}
    task = load_builtin_dataset(case["task"], sizes=sizes)
    return (our_side if case["side"] == "ours" else their_side)(case, task, tokenizer)


def draw(result: dict):
    "Draw our tokens per second over Trainer's, by task and precision."
    figure, axes = new_axes("", "ours over Trainer, real tokens per second", size=(7, 4))
    names = list(result["ratios"])
    for column, name in enumerate(names):
        ratio = result["ratios"][name]["wall"]
        ends = [[ratio["median"] - ratio["min"]], [ratio["max"] - ratio["median"]]]
        colour = ORANGE if name.endswith("fp32") else BLUE
        axes.bar(column, ratio["median"], yerr=ends, color=colour, capsize=3)
    axes.axhline(1, color="0.3", linewidth=0.8)
    axes.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=7)
    where = result["machine"]
    axes.set_title(f"{where['processor']}, {where['threads']} threads", fontsize=9)
    return figure


def main() -> None:
    parser = common_parser(__doc__, "finetuning_trainer", rounds=3)
    add = parser.add_argument
    add("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    add("--precisions", nargs="+", default=["fp32", "bf16"], choices=("fp32", "bf16"))
    add("--model", default="small", choices=SHAPES)
    add("--steps", type=int, default=12, help="timed steps (default: 12)")
    add("--train-rows", type=int, help="of a task (default: all)")
    options, warm, documents = parser.parse_args(), 3, None
    if options.case:
        return print(json.dumps(measure(options.case)))
    if options.quick:
        options.rounds, options.tasks, options.precisions = 1, options.tasks[:1], ["bf16"]
        options.model, options.steps, options.train_rows, warm, documents = "tiny", 2, 100, 1, 2000
    where, ledger = machine(options.threads), Ledger("finetuning_trainer", options.fresh)
    load_text(SHAPES[options.model][3], documents)
    base = {
        "model": options.model,
        "steps": options.steps + warm,
        "warm": warm,
        "documents": documents,
        "train_rows": options.train_rows,
    }
    show = lambda f: f"{f['tokens_per_second']:9,.0f} tokens/s, {f['fill']:4.0%} full"
    sides, compared = {}, {}
    for task, precision in product(options.tasks, options.precisions):
        name = f"{task}, {precision}"
        print(name, flush=True)
        case = {**base, "task": task, "precision": precision}
        cases = {side: {**case, "side": side} for side in ("ours", "Trainer")}
        runs = alternate(__file__, cases, options, ledger, show)
        pair = runs["ours"], runs["Trainer"]
        compared[name] = {
            "wall": ratios(*pair, "tokens_per_second"),
            "processor": ratios(*pair, "tokens_per_processor_second"),
        }
        sides[name] = spreads(runs)
    content = {"bertlab": bertlab.__version__, "machine": where, "model": options.model}
    write_result(options, {**content, "ratios": compared, "sides": sides}, draw)


if __name__ == "__main__":
    main()
