"""Pretraining beside transformers' Trainer: real tokens per second.

    python benchmarks/pretraining.py [--models small demo base] [--kinds bert modernbert]

Ours is what `bertlab pretrain` runs. Theirs is transformers' Trainer with DataCollatorForLanguageModeling
in its two usual forms: one document per row, padded to the longest of its batch; and documents
concatenated and cut. Architecture, first weights, text, tokenizer, share of masked tokens, optimizer,
learning rate, clipping and real tokens per batch are equal. Preparing the data is not timed.
"""

import json
import statistics
import tempfile
import time
from itertools import product

import torch
from sides import BUILD, Ledger, alternate, common_parser, machine, ratios, spreads, write_result

import bertlab
from bertlab.core.plots import BLUE, GREY, ORANGE, NotebookFigure
from bertlab.model.config import BertLabConfig, bert_base, modernbert_tiny

SHAPES = {  # layers, width, heads, vocabulary, rows of 128 in a batch
    "demo": (4, 192, 3, 4096, 32),
    "small": (4, 256, 4, 30_522, 32),
    "short": (4, 256, 4, 8192, 32),
    "base": (12, 768, 12, 30_522, 8),
    "tiny": (1, 32, 2, 2048, 4),  # for --quick
}
LENGTH, PROBABILITY, RATE, DECAY, WARMUP, CLIP = 128, 0.15, 1e-3, 0.01, 20, 1.0
FORMS = ("padded", "grouped")  # one document per row; concatenated and cut
KINDS = ("bert", "modernbert")
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "auto": "auto"}


def shape(family: str, model: str, **overrides) -> BertLabConfig:
    "Return an architecture as our config; `to_family_config` converts it."
    layers, width, heads, vocabulary, _ = SHAPES[model]
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
    }
    if family == "bert":
        return bert_base(**{**sizes, "intermediate_size": 4 * width, "norm_eps": 1e-12} | overrides)
    sizes |= {"intermediate_size": 3 * width // 2, "local_attention": 128}
    return modernbert_tiny(**{**sizes, "initializer_range": 0.02} | overrides)


def load_text(vocabulary: int, max_documents: int | None = None, kind: str = "wordpiece"):
    "Return the embedded corpus and a tokenizer trained on it, which is kept for all children."
    from bertlab.data.corpus import embedded_corpus
    from bertlab.data.tokenizers import load_tokenizer, train_tokenizer

    corpus = embedded_corpus(max_documents=max_documents)
    path = BUILD / f"tokenizer-{kind}-{vocabulary}-{corpus.sha256[:12]}"
    if not (path / "tokenizer.json").exists():
        train_tokenizer(corpus.train_texts, vocabulary, kind=kind).save_pretrained(path)
    return corpus, load_tokenizer(path)


class Meter:
    "Counts the real tokens that reach the model, and notes both clocks after each step."

    def __init__(self, model: torch.nn.Module):
        self.real = self.positions = 0
        self.marks = [self.mark()]
        model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, module, args, kwargs) -> None:
        if module.training:
            self.real += int((kwargs["attention_mask"] > 0).sum())
            self.positions += kwargs["attention_mask"].numel()

    def mark(self) -> tuple[float, float, int, int]:
        return time.perf_counter(), time.process_time(), self.real, self.positions

    def start(self) -> None:
        self.marks = [self.mark()]

    def step(self) -> None:
        self.marks.append(self.mark())

    def figures(self, warm: int) -> dict[str, float]:
        "Return the figures of the steps after the first `warm`."
        differences = [b - a for a, b in zip(self.marks[warm], self.marks[-1])]
        wall, cpu, real, positions = differences
        return {
            "wall_seconds": wall,
            "processor_seconds": cpu,
            "real_tokens": real,
            "steps": len(self.marks) - 1 - warm,
            "fill": real / positions,
            "tokens_per_second": real / wall,
            "tokens_per_processor_second": real / cpu,
        }


def our_side(case: dict, corpus, tokenizer, folder: str) -> dict[str, float]:
    "Train with PretrainingModule and PretrainingDataModule."
    from lightning.pytorch.callbacks import Callback

    from bertlab.data.module import PretrainingDataModule
    from bertlab.train.modules import PretrainingModule
    from bertlab.train.trainer import make_trainer, seed_everything

    rows = case.get("rows") or SHAPES[case["model"]][-1]
    data = PretrainingDataModule(
        corpus,
        tokenizer,
        max_sequence_length=LENGTH,
        train_batch_size=rows,
        collator_kwargs={"mlm_probability": PROBABILITY},
    )
    data.setup()
    seed_everything(0)
    config = shape(case["kind"], case["model"]).to_diff_dict()
    config = {name: value for name, value in config.items() if not name.endswith("token_id")}
    module = PretrainingModule(
        config,
        None,
        tokenizer,
        learning_rate=RATE,
        weight_decay=DECAY,
        scheduler_warmup_steps=min(WARMUP, case["steps"]),
    )
    module.configure_model()
    meter = Meter(module.model)

    class Clock(Callback):
        def on_train_start(self, *_) -> None:
            meter.start()

        def on_train_batch_end(self, *_) -> None:
            meter.step()

    trainer = make_trainer(
        case["steps"],
        PRECISIONS[case["precision"]],
        callbacks=[Clock()],
        gradient_clip_val=CLIP,
        limit_val_batches=0,
        default_root_dir=folder,
        **case.get("trainer", {}),
    )
    trainer.fit(module, data)
    return meter.figures(case["warm"])


def their_tokens(form: str, texts: list[str], tokenizer):
    "Tokenize documents as transformers' run_mlm.py does in its two forms."
    from datasets import Dataset

    cut = {"truncation": True, "max_length": LENGTH} if form == "padded" else {}

    def tokenize(batch: dict) -> dict:
        return tokenizer(batch["text"], return_special_tokens_mask=True, **cut)

    return Dataset.from_dict({"text": texts}).map(tokenize, batched=True, remove_columns=["text"])


def grouped_rows(tokens):
    "Concatenate documents and cut them into full rows, as run_mlm.py does."

    def group(batch: dict) -> dict:
        joined = {name: [x for row in rows for x in row] for name, rows in batch.items()}
        end = len(joined["input_ids"]) // LENGTH * LENGTH
        return {
            name: [v[i : i + LENGTH] for i in range(0, end, LENGTH)] for name, v in joined.items()
        }

    return tokens.map(group, batched=True)


def their_side(case: dict, corpus, tokenizer, folder: str) -> dict[str, float]:
    "Train with transformers' Trainer."
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback
    from transformers import TrainingArguments, set_seed

    from bertlab.model.families import FAMILIES, to_family_config

    dataset, rows = (
        their_tokens(case["side"], corpus.train_texts, tokenizer),
        SHAPES[case["model"]][-1],
    )
    if case["side"] == "grouped":
        dataset = grouped_rows(dataset)
    else:  # as many real tokens per batch as full rows hold
        mean = statistics.mean(map(len, dataset["input_ids"]))
        rows = max(1, round(rows * LENGTH / mean))
    set_seed(0)
    config = to_family_config(shape(case["kind"], case["model"]), case["kind"], "ForMaskedLM")
    if case["kind"] == "modernbert":
        config.sparse_prediction = True  # scores at labels alone, as ours
    model = FAMILIES[case["kind"]].get_class("ForMaskedLM")(config)
    meter = Meter(model)

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__) -> None:
            meter.start()

        def on_step_end(self, *_, **__) -> None:
            meter.step()

    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=rows,
        learning_rate=RATE,
        weight_decay=DECAY,
        warmup_steps=min(WARMUP, case["steps"]),
        lr_scheduler_type="constant_with_warmup",
        max_grad_norm=CLIP,
        max_steps=case["steps"],
        bf16=case["precision"] == "bf16",
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=PROBABILITY)
    Trainer(model, arguments, collator, dataset, callbacks=[Clock()]).train()
    return meter.figures(case["warm"])


def measure(case: dict) -> dict[str, float]:
    "Measure one case in this process."
    corpus, tokenizer = load_text(SHAPES[case["model"]][3], case["documents"])
    side = our_side if case["side"] == "ours" else their_side
    with tempfile.TemporaryDirectory() as folder:
        return side(case, corpus, tokenizer, folder)


def rate_cases(model: str, family: str, options) -> dict[str, dict]:
    "Return ours in each precision, and theirs in each form and precision."
    steps = options.steps or {"base": 3}.get(model, 8)
    base = {"model": model, "kind": family, "warm": options.warm, "documents": options.documents}
    cases = {}
    for precision in options.precisions:
        for side in ("ours", *FORMS) if precision != "auto" else ("ours",):
            # A padded step takes three times as long, so half as many are timed.
            timed = -(-steps // 2) if side == "padded" else steps
            case = {**base, "side": side, "precision": precision, "steps": timed + options.warm}
            cases[f"{side}, {precision}"] = case
    return cases


def compare(runs: dict[str, list[dict]]) -> dict[str, dict]:
    "Return ours over theirs, at equal precision and with the precision that bertlab chooses."
    compared = {}
    for name in runs:
        form, _, precision = name.partition(", ")
        for chosen in dict.fromkeys((precision, "auto")) if form != "ours" else ():
            if f"ours, {chosen}" in runs:
                pair = runs[f"ours, {chosen}"], runs[name]
                compared[f"ours in {chosen} over {form} in {precision}"] = {
                    "wall": ratios(*pair, "tokens_per_second"),
                    "processor": ratios(*pair, "tokens_per_processor_second"),
                }
    return compared


def draw(result: dict):
    "Draw the real tokens per second of each side, one panel per shape and architecture."
    rates, colours = result["rates"], {"ours": BLUE, "grouped": ORANGE, "padded": GREY}
    columns, rows = min(2, len(rates)), -(-len(rates) // 2)
    size = (4.6 * columns, 0.5 + 2.2 * rows)
    figure = NotebookFigure(figsize=size, layout="constrained", dpi=100)
    for position, (name, rate) in enumerate(rates.items(), 1):
        axes = figure.add_subplot(rows, columns, position, title=name)
        figures = {side: values["tokens_per_second"] for side, values in rate["sides"].items()}
        slowest = min(f["median"] for f in figures.values())
        for side, f in figures.items():
            ends = [[f["median"] - f["min"]], [f["max"] - f["median"]]]
            axes.barh(side, f["median"], xerr=ends, color=colours[side.split(",")[0]], capsize=2)
            text = f" {f['median'] / slowest:.1f} times"
            axes.annotate(text, (f["max"], side), va="center", fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * max(f["max"] for f in figures.values()))
    figure.supxlabel("real tokens per second (median, minimum and maximum)")
    where = result["machine"]
    figure.suptitle(f"{where['processor']}, {where['threads']} threads", fontsize=9)
    return figure


def main() -> None:
    parser = common_parser(__doc__, "pretraining", rounds=3)
    add = parser.add_argument
    add("--models", nargs="+", default=["small", "base", "demo"], choices=SHAPES)
    add("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    add("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    add("--steps", type=int, help="timed steps (default: 8, of the base shape 3)")
    add("--warm", type=int, default=2, help="steps before them (default: 2)")
    add("--documents", type=int, help="of the corpus (default: all)")
    options = parser.parse_args()
    if options.case:
        return print(json.dumps(measure(options.case)))
    if options.quick:
        options.models, options.kinds, options.precisions = ["tiny"], ["bert"], ["bf16"]
        options.rounds, options.steps, options.warm, options.documents = 1, 2, 1, 2000
    ledger, rates = Ledger("pretraining", options.fresh), {}
    for model in options.models:
        load_text(SHAPES[model][3], options.documents)  # before the children need it
    show = lambda f: f"{f['tokens_per_second']:9,.0f} tokens/s, {f['fill']:4.0%} full"
    where = machine(options.threads)
    for model, family in product(options.models, options.kinds):
        print(f"{model}, {family}", flush=True)
        runs = alternate(__file__, rate_cases(model, family, options), options, ledger, show)
        part = {"machine": where, "ratios": compare(runs), "sides": spreads(runs)}
        rates[f"{model}, {family}"] = part
    version = bertlab.__version__
    write_result(options, {"bertlab": version, "machine": where, "rates": rates}, draw)


if __name__ == "__main__":
    main()
