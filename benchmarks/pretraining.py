"""Pretraining beside transformers' Trainer: real tokens per second, and loss after a fixed time.

    python benchmarks/pretraining.py [--models small demo base] [--kinds bert modernbert] [--seconds 180]

Ours is what `bertlab pretrain` runs: PretrainingModule, PretrainingDataModule and its trainer with
history, guards and monitors. Theirs is transformers' Trainer with DataCollatorForLanguageModeling in
its two usual forms: a document a row, padded to the longest of its batch; and documents concatenated
and cut. Architecture, first weights, text, tokenizer, share of masked tokens, optimizer, rate,
clipping and real tokens of a batch are equal. Real tokens are counted where the model meets them.

Each measurement is a process of its own. Preparing data is reported, and not part of the timed steps. Beside each
rate stands the share of the machine's own rate of matrix products that it is worth: operations of real tokens, of
real tokens that they may see, and of labels alone, over what the same process measured before and after.
With `--busy 1 2` the sides are measured once more beside so many other programs that want a core each.
Parts of the result that a call does not measure stay as they are, each with its date. A result of another
machine or of other settings is replaced with --fresh alone.
"""

import json
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path

import torch
from sides import (KEPT, Ledger, alternate, busy_loops, common_parser, fingerprint, judge, machine, ratios, say,
                   spread, write_result)  # fmt: skip

import bertlab
from bertlab.model.config import BertLabConfig, bert_base, modernbert_tiny
from bertlab.core.devices import benchmark_matmul
from bertlab.core.plots import BLUE, GREY, ORANGE, NotebookFigure

SHAPES = {  # layers, width, heads, vocabulary, rows of 128 in a batch
    "demo": (4, 192, 3, 4096, 32),
    "small": (4, 256, 4, 30_522, 32),
    "short": (4, 256, 4, 8192, 32),
    "base": (12, 768, 12, 30_522, 8),
    "tiny": (1, 32, 2, 2048, 4),  # to try the benchmark
}
LENGTH, PROBABILITY, RATE, DECAY, WARMUP, CLIP = 128, 0.15, 1e-3, 0.01, 20, 1.0
FORMS = ("padded", "grouped")  # a document a row; concatenated and cut
KINDS = ("bert", "modernbert")
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "auto": "auto"}
TARGETS = {  # (model, form, same precision?): at least so many times their tokens per second
    ("small", "grouped", True): 2.5, ("small", "padded", True): 6.0,
    ("small", "grouped", False): 4.0, ("small", "padded", False): 10.0,
    ("base", "grouped", True): 1.3, ("base", "padded", True): 3.5,
}  # fmt: skip
ALONE, KEPT_BUSY = (
    ("short", "grouped", "fp32", 2.5),
    0.75,
)  # times theirs; the share of it that is left beside busy loops
USED = {"small": 0.5, "base": 0.7}  # of the machine's rate of matrix products
NATS = 0.3  # by which our loss must be lower after the same time


def shape(kind: str, model: str, **overrides) -> BertLabConfig:
    "One architecture in our words; `to_family_config` says it in theirs."
    layers, width, heads, vocabulary, _ = SHAPES[model]
    sizes = dict(vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, pad_token_id=0,
                 num_attention_heads=heads, max_position_embeddings=512)  # fmt: skip
    if kind == "bert":
        return bert_base(
            **{**sizes, "intermediate_size": 4 * width, "norm_eps": 1e-12, **overrides}
        )
    return modernbert_tiny(**{**sizes, "intermediate_size": 3 * width // 2, "local_attention": 128,
                              "initializer_range": 0.02, **overrides})  # fmt: skip


def shared_text(vocabulary: int, max_documents: int | None, folder: Path = KEPT):
    "The embedded corpus and a tokenizer trained on it, once for all children."
    from bertlab.data.corpus import embedded_corpus
    from bertlab.data.tokenizers import load_tokenizer, train_tokenizer

    corpus = embedded_corpus(max_documents=max_documents)
    path = Path(folder) / f"tokenizer-{vocabulary}-{corpus.sha256[:12]}"
    if not (path / "tokenizer.json").exists():
        train_tokenizer(corpus.train_texts, vocabulary).save_pretrained(path)
    return corpus, load_tokenizer(path)


class Meter:
    "Counts real tokens where the model meets them, and notes both clocks after each step."

    def __init__(self, model: torch.nn.Module):
        self.real = self.positions = self.seen = 0
        self.marks = [self.mark()]
        model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, module, positional, named) -> None:
        if module.training:
            mask = named["attention_mask"]
            self.real += int((mask > 0).sum())
            self.positions += mask.numel()
            documents = (
                torch.arange(len(mask))[:, None] * (int(mask.max()) + 1) + mask
            )  # a number for each
            self.seen += int(
                documents[mask > 0].bincount().square().sum()
            )  # a token sees its document

    def mark(self) -> tuple[float, float, int, int, int]:
        return time.perf_counter(), time.process_time(), self.real, self.positions, self.seen

    def step(self) -> None:
        self.marks.append(self.mark())

    def figures(self, warm: int) -> dict[str, float]:
        "Of the steps after the first so many."
        parts = [b - a for a, b in zip(self.marks[warm], self.marks[-1])]
        wall, cpu, real, positions, seen = parts
        return {"wall_seconds": wall, "processor_seconds": cpu, "real_tokens": real,
                "steps": len(self.marks) - 1 - warm, "fill": real / positions, "mean_context": seen / real,
                "tokens_per_second": real / wall, "tokens_per_processor_second": real / cpu}  # fmt: skip


def our_side(case: dict, corpus, tokenizer, folder: str) -> dict:
    "What `bertlab pretrain` does."
    from lightning.pytorch.callbacks import Callback

    from bertlab.cli.main import silence_libraries
    from bertlab.data.module import PretrainingDataModule
    from bertlab.train.modules import PretrainingModule
    from bertlab.cli.pretrain import PretrainRunConfig, run_trainer
    from bertlab.train.trainer import seed_everything

    silence_libraries()
    start, rows = time.perf_counter(), case.get("rows") or SHAPES[case["model"]][-1]
    data = PretrainingDataModule(corpus, tokenizer, max_sequence_length=LENGTH, train_batch_size=rows,
                                 collator_kwargs={"mlm_probability": PROBABILITY}, seed=case["seed"])  # fmt: skip
    data.setup()
    prepared = time.perf_counter() - start
    seed_everything(case["seed"])
    config = shape(case["kind"], case["model"]).to_diff_dict()
    config = {name: value for name, value in config.items() if not name.endswith("token_id")}
    module = PretrainingModule(config, None, tokenizer, learning_rate=RATE, weight_decay=DECAY,
                               scheduler_warmup_steps=case["warmup"], **case.get("module", {}))  # fmt: skip
    module.configure_model()
    meter = Meter(module.model)

    class Clock(Callback):
        def on_train_start(self, *_) -> None:
            meter.marks = [meter.mark()]

        def on_train_batch_end(self, trainer, *_) -> None:
            meter.step()
            if case["seconds"] and meter.marks[-1][0] - meter.marks[0][0] >= case["seconds"]:
                trainer.should_stop = True

    steps = case["steps"] if not case["seconds"] else 10**6
    run = PretrainRunConfig(
        output=folder, progress="none", val_every_steps=10**9, checkpoint_every_steps=10**9
    )
    options = {"max_steps": steps, "precision": PRECISIONS[case["precision"]], "callbacks": [Clock()],
               "gradient_clip_val": CLIP, "limit_val_batches": 0, **case.get("trainer", {})}  # fmt: skip
    trainer = run_trainer(run, options, module, "")
    trainer.fit(module, data)
    return {
        "preparation_seconds": prepared,
        "precision": trainer.precision,
        **meter.figures(case["warm"]),
    }, module.model


def their_tokens(form: str, texts: list[str], tokenizer):
    "Tokenized documents, as transformers' run_mlm.py makes them in its two forms."
    from datasets import Dataset

    cut = {"truncation": True, "max_length": LENGTH} if form == "padded" else {}

    def tokenize(batch: dict) -> dict:
        return tokenizer(batch["text"], return_special_tokens_mask=True, **cut)

    return Dataset.from_dict({"text": texts}).map(tokenize, batched=True, remove_columns=["text"])


def grouped_rows(tokens):
    "Documents concatenated and cut into full rows, as run_mlm.py does it."

    def group(batch: dict) -> dict:
        joined = {name: [x for row in rows for x in row] for name, rows in batch.items()}
        end = len(joined["input_ids"]) // LENGTH * LENGTH
        return {
            name: [v[i : i + LENGTH] for i in range(0, end, LENGTH)] for name, v in joined.items()
        }

    return tokens.map(group, batched=True)


def their_rows(form: str, texts: list[str], tokenizer):
    "Rows ready for the collator."
    tokens = their_tokens(form, texts, tokenizer)
    return tokens if form == "padded" else grouped_rows(tokens)


def their_side(case: dict, corpus, tokenizer, folder: str) -> dict:
    "transformers' Trainer."
    from transformers import (DataCollatorForLanguageModeling, Trainer, TrainerCallback,
                              TrainingArguments, set_seed)  # fmt: skip

    from bertlab.model.huggingface import to_family_config, their_class

    start, rows = time.perf_counter(), SHAPES[case["model"]][-1]
    dataset = their_rows(case["side"], corpus.train_texts, tokenizer)
    if case["side"] == "padded":  # as many real tokens a batch as full rows hold
        mean = statistics.mean(map(len, dataset["input_ids"]))
        rows = max(1, round(rows * LENGTH / mean))
    prepared = time.perf_counter() - start
    set_seed(case["seed"])
    config = to_family_config(shape(case["kind"], case["model"]), case["kind"], "ForMaskedLM")
    if case["kind"] == "modernbert":
        config.sparse_prediction = (
            True  # scores at labels alone, as ours; off where nobody asks for it
        )
    model = their_class(case["kind"], "ForMaskedLM")(config)
    meter = Meter(model)

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__) -> None:
            meter.marks = [meter.mark()]

        def on_step_end(self, args, state, control, **_) -> None:
            meter.step()
            if case["seconds"] and meter.marks[-1][0] - meter.marks[0][0] >= case["seconds"]:
                control.should_training_stop = True

    arguments = TrainingArguments(
        folder, per_device_train_batch_size=rows, learning_rate=RATE, weight_decay=DECAY,
        warmup_steps=case["warmup"], lr_scheduler_type="constant_with_warmup", max_grad_norm=CLIP,
        max_steps=10**6 if case["seconds"] else case["steps"], bf16=case["precision"] == "bf16",
        seed=case["seed"], save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), logging_strategy="no",
    )  # fmt: skip
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=PROBABILITY)
    Trainer(model, arguments, collator, dataset, callbacks=[Clock()]).train()
    return {
        "preparation_seconds": prepared,
        "precision": PRECISIONS[case["precision"]],
        **meter.figures(case["warm"]),
    }, model


def held_out_losses(directory: str, batches) -> dict[str, float]:
    """Nats per hidden token, of weights of either side.

    `apart`: each document alone, its positions from 0. `joined`: the row as one text, as rows of
    concatenated texts are trained on.
    """
    from bertlab.train.modules import load_encoder

    model, sums = load_encoder(directory).eval(), {"apart": [0.0, 0], "joined": [0.0, 0]}
    for batch in batches:
        mask = batch["attention_mask"]
        places = torch.arange(mask.shape[1]).expand_as(mask)
        ways = {"apart": (mask, batch["position_ids"]), "joined": ((mask > 0).long(), places)}
        for way, (documents, positions) in ways.items():
            with torch.no_grad():
                out = model(batch["input_ids"], documents, positions, labels=batch["labels"],
                            label_positions=batch.get("label_positions"))  # fmt: skip
            sums[way][0] += out.loss_sum.item()
            sums[way][1] += int(out.num_labels)
    return {way: total / count for way, (total, count) in sums.items()}


def held_out_rows(corpus, tokenizer):
    "The same packed rows of held-out text and the same masks for all."
    from bertlab.data.module import PretrainingDataModule

    data = PretrainingDataModule(corpus, tokenizer, max_sequence_length=LENGTH, val_batch_size=32,
                                 collator_kwargs={"mlm_probability": PROBABILITY}, seed=0)  # fmt: skip
    data.setup()
    return data.val_dataloader()


def validation_loss(directory: str, corpus, tokenizer) -> dict[str, float]:
    "Loss on held-out text."
    return {
        f"loss_{way}": loss
        for way, loss in held_out_losses(directory, held_out_rows(corpus, tokenizer)).items()
    }


def unigram_loss(corpus, tokenizer) -> float:
    "Of a guesser who reads nothing and knows how often each token stands in the training text, one added to each count."
    from bertlab.model.losses import unigram_counts

    texts = tokenizer(corpus.train_texts, add_special_tokens=False)["input_ids"]
    counts = (
        unigram_counts(torch.tensor([token for ids in texts for token in ids]), len(tokenizer))
        + 1.0
    )
    labels = torch.cat([batch["labels"].flatten() for batch in held_out_rows(corpus, tokenizer)])
    return -(counts / counts.sum()).log()[labels[labels >= 0]].mean().item()


def measure(case: dict) -> dict:
    "One case, in this process."
    corpus, tokenizer = shared_text(SHAPES[case["model"]][3], case["documents"], Path(case["kept"]))
    side = our_side if case["side"] == "ours" else their_side
    chosen = PRECISIONS[case["precision"]]  # of "auto" the side itself says what it was
    with tempfile.TemporaryDirectory() as folder:
        names = ("32-true", "bf16-mixed") if chosen == "auto" else (chosen,)
        rates = {name: [benchmark_matmul(name)] for name in names}
        with busy_loops(case.get("busy", 0)):
            figures, model = side(case, corpus, tokenizer, folder)
        found = rates[figures["precision"]] + [benchmark_matmul(figures["precision"])]
        operations = shape(case["kind"], case["model"]).flops_per_token(
            figures["mean_context"], PROBABILITY
        )
        figures["useful_share"] = figures["tokens_per_second"] * operations / statistics.mean(found)
        figures["num_params"] = sum(p.numel() for p in model.parameters())
        if case["seconds"]:
            if hasattr(model.config, "sparse_prediction"):
                model.config.sparse_prediction = False  # the judge asks for all scores
            model.float().save_pretrained(Path(folder, "model"))
            figures |= validation_loss(str(Path(folder, "model")), corpus, tokenizer)
    return figures


def rate_cases(model: str, kind: str, options) -> dict[str, dict]:
    "Ours in both precisions and as it chooses; theirs in both forms and precisions."
    steps = options.steps or {"base": 3}.get(model, 8)
    warm = options.warm if options.warm is not None else 2
    base = {"model": model, "kind": kind, "steps": steps + warm, "warm": warm, "seconds": 0, "seed": 0,
            "warmup": min(WARMUP, steps), "documents": options.documents, "kept": str(options.kept)}  # fmt: skip
    cases = {f"ours, {p}": {**base, "side": "ours", "precision": p} for p in options.precisions}
    for precision in options.precisions:
        for form in FORMS if precision != "auto" else ():
            # A padded step lasts three times as long: half as many say as much.
            few = {"steps": -(-steps // 2) + warm} if form == "padded" else {}
            cases[f"{form}, {precision}"] = {**base, "side": form, "precision": precision, **few}
    return cases


def show(figures: dict) -> str:
    loss = f", loss {figures['loss_apart']:.3f}" if "loss_apart" in figures else ""
    return (f"{figures['tokens_per_second']:9,.0f} tokens/s, "
            f"{figures['tokens_per_processor_second']:9,.0f} a processor second, "
            f"{figures['fill']:4.0%} full, {figures['useful_share']:4.0%} of the products{loss}")  # fmt: skip


def compare_rates(runs: dict[str, list[dict]]) -> dict[str, dict]:
    "Ours over theirs, at equal precision and of our choice against each of theirs."
    found = {}
    for name in runs:
        form, _, precision = name.partition(", ")
        if form == "ours":
            continue
        for ours in dict.fromkeys((precision, "auto")):
            if f"ours, {ours}" in runs:
                pair = runs[f"ours, {ours}"], runs[name]
                found[f"ours in {ours} over {form} in {precision}"] = {
                    clock: ratios(*pair, figure) for clock, figure in
                    (("wall", "tokens_per_second"), ("processor", "tokens_per_processor_second"))}  # fmt: skip
    return found


def judge_rates(model: str, kind: str, compared: dict[str, dict]) -> list[dict]:
    "Rates beside their targets; at equal precision the weaker of the two counts."
    judged = []
    for form in FORMS:
        equal = [r["wall"]["median"] for name, r in compared.items()
                 if f"over {form}" in name and name.split()[2] == name.split()[-1]]  # fmt: skip
        default = compared.get(f"ours in auto over {form} in fp32")
        for same, values in (
            (True, equal),
            (False, [default["wall"]["median"]] if default else []),
        ):
            if values and (target := TARGETS.get((model, form, same))):
                how = "equal precision, the lesser of both" if same else "auto against fp32"
                judged.append(
                    judge(f"{model}, {kind}, {form}: {how}", min(values), at_least=target)
                )
    return judged


def judge_shares(model: str, kind: str, sides: dict[str, dict]) -> list[dict]:
    "What our side uses of the machine, in each precision."
    return [judge(f"{model}, {kind}: share of the products, {name}", found["useful_share"]["median"], at_least=USED[model])
            for name, found in sides.items() if model in USED and name in ("ours, fp32", "ours, bf16")
            and "useful_share" in found]  # fmt: skip


def race(kind: str, options, ledger: Ledger) -> dict:
    "Loss after the same time, a round for each seed."
    base = {"model": options.race_model, "kind": kind, "steps": 0, "warm": 0, "seconds": options.seconds,
            "warmup": WARMUP, "documents": options.documents, "kept": str(options.kept),
            "precision": options.race_precision}  # fmt: skip
    losses, runs = {}, {side: [] for side in ("ours", *FORMS)}
    for number, seed in enumerate(options.seeds):
        cases = {side: {**base, "side": side, "seed": seed} for side in runs}
        if number % 2:
            cases = dict(reversed(cases.items()))
        for side, found in alternate(__file__, cases, 1, options.threads, ledger, show).items():
            runs[side] += found
    losses = {
        side: spread(min(f["loss_apart"], f["loss_joined"]) for f in runs[side]) for side in runs
    }
    gaps = {form: spread(min(b["loss_apart"], b["loss_joined"]) - a["loss_apart"]
                         for a, b in zip(runs["ours"], runs[form])) for form in FORMS}  # fmt: skip
    text = shared_text(SHAPES[options.race_model][3], options.documents, options.kept)
    return {"seconds": options.seconds, "precision": options.race_precision, "seeds": options.seeds,
            "unigram": unigram_loss(*text), "loss": losses, "nats_below": gaps, "runs": runs}  # fmt: skip


def beside_loops(model: str, kind: str, options, ledger: Ledger) -> dict:
    "Ours over theirs, alone and beside programs that want a core each, all in turns."
    cases = {f"{name}, {loops} busy": {**case, "busy": loops} for loops in (0, *options.busy)
             for name, case in rate_cases(model, kind, options).items()}  # fmt: skip
    runs = alternate(__file__, cases, options.rounds, options.threads, ledger, show)
    parts = {loops: {name.rpartition(", ")[0]: found for name, found in runs.items() if name.endswith(f", {loops} busy")}
             for loops in (0, *options.busy)}  # fmt: skip
    return {
        str(loops): {"ratios": compare_rates(part), "runs": part} for loops, part in parts.items()
    }


def judge_busy(name: str, found: dict) -> list[dict]:
    "The advantage alone beside its target, and what is left of it beside busy loops."
    model, form, precision, times = ALONE
    pair = f"ours in {precision} over {form} in {precision}"
    if not name.startswith(f"{model},") or pair not in found["0"]["ratios"]:
        return []
    middle = {loops: part["ratios"][pair]["wall"]["median"] for loops, part in found.items()}
    return [judge(f"{name}: {pair}, nothing beside it", middle["0"], at_least=times), *(
        judge(f"{name}: of this advantage, beside busy loops: {loops}", ratio / middle["0"], at_least=KEPT_BUSY)
        for loops, ratio in middle.items() if loops != "0")]  # fmt: skip


def earlier_parts(
    output: Path | None, place: dict, settings: dict, fresh: bool = False
) -> dict[str, dict]:
    "The parts of the file that is there. What was measured elsewhere or otherwise goes with `fresh` alone."
    parts: dict[str, dict] = {name: {} for name in ("rates", "races", "busy")}
    if output is None or not output.exists():
        return parts
    old = json.loads(output.read_text(encoding="utf-8"))
    settings, before = json.loads(json.dumps(settings)), dict(old.get("settings", {}))
    shapes = before.pop("shapes", {})  # one that is new spoils no figure of the others
    same = (
        all(settings["shapes"].get(name) == one for name, one in shapes.items())
        and before == {name: value for name, value in settings.items() if name != "shapes"}
        and all(
            place[name] == old["machine"][name]
            for name in ("processor", "cores", "threads", "torch", "transformers")
        )
    )
    if not same and not fresh:
        raise SystemExit(f"{output} is of another machine or other settings: choose another --output, or --fresh to "
                         "replace all of it")  # fmt: skip
    if not same:
        return parts
    for name in parts:
        parts[name] = {
            case: {"machine": old["machine"], **part} for case, part in old.get(name, {}).items()
        }
    return parts


def judge_race(kind: str, found: dict) -> list[dict]:
    "Loss beside its target: every seed counts."
    return [judge(f"{kind}: nats below {form} after {found['seconds']:g} s, the least of "
                  f"{len(found['seeds'])} seeds", gap["min"], at_least=NATS)
            for form, gap in found["nats_below"].items()]  # fmt: skip


def draw(result: dict):
    "Real tokens per second of each side, a panel for each shape and architecture."
    rates, colours = result["rates"], {"ours": BLUE, "grouped": ORANGE, "padded": GREY}
    columns, rows = min(2, len(rates)), -(-len(rates) // 2)
    figure = NotebookFigure(
        figsize=(4.6 * columns, 0.5 + 2.2 * rows), layout="constrained", dpi=100
    )
    for place, (name, found) in enumerate(rates.items(), 1):
        axes = figure.add_subplot(rows, columns, place, title=name)
        figures = {side: values["tokens_per_second"] for side, values in found["sides"].items()}
        least = min(f["median"] for f in figures.values())
        for side, f in figures.items():
            ends = [[f["median"] - f["min"]], [f["max"] - f["median"]]]
            axes.barh(side, f["median"], xerr=ends, color=colours[side.split(",")[0]], capsize=2)
            axes.annotate(f"{f['median'] / least:.1f} times", (f["max"], side), xytext=(4, 0),
                          textcoords="offset points", va="center", fontsize=8)  # fmt: skip
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * max(f["max"] for f in figures.values()))
        axes.locator_params(axis="x", nbins=5)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(
        "real tokens per second (median, least and most), and as multiples of the slowest"
    )
    figure.suptitle(
        f"{result['machine']['processor']}, {result['machine']['threads']} threads", fontsize=9
    )
    return figure


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "pretraining", rounds=3,
                           merged=["models", "kinds", "race_kinds", "seconds", "busy"])  # fmt: skip
    parser.add_argument(
        "--models", nargs="*", default=["small", "base", "demo"], choices=list(SHAPES)
    )
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument(
        "--precisions", nargs="+", default=["fp32", "bf16", "auto"], choices=list(PRECISIONS)
    )
    parser.add_argument("--steps", type=int, help="timed steps (default: 8, of the base shape 3)")
    parser.add_argument("--warm", type=int, help="steps before (default: 2)")
    parser.add_argument("--documents", type=int, help="of the corpus (default: all)")
    parser.add_argument(
        "--busy",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="also beside so many busy loops",
    )
    parser.add_argument(
        "--seconds", type=float, default=180.0, help="of each race; 0: none (default: 180)"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the races")
    parser.add_argument(
        "--race-kinds",
        nargs="+",
        default=["modernbert"],
        choices=KINDS,
        help="BERT's norms want a longer warm-up",
    )
    parser.add_argument("--race-model", default="small", choices=list(SHAPES))
    parser.add_argument("--race-precision", default="bf16", choices=("fp32", "bf16"))
    parser.add_argument("--no-picture", action="store_true", help="write the figures alone")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(json.loads(options.case))))
        return
    if options.quick:
        options.models, options.kinds, options.rounds, options.seeds = ["tiny"], ["bert"], 1, [0]
        options.steps, options.warm, options.documents, options.seconds = (
            2,
            1,
            2000,
            min(options.seconds, 1),
        )
        options.race_model, options.precisions = "tiny", ["bf16", "auto"]
    place, ledger = machine(options.threads), Ledger(
        options.kept / "pretraining.json", fingerprint(__file__), options.fresh)  # fmt: skip
    settings = dict(row_length=LENGTH, masked_share=PROBABILITY, learning_rate=RATE, weight_decay=DECAY,
                    warmup_steps=WARMUP, gradient_clip=CLIP, shapes=SHAPES)  # fmt: skip
    settings |= {"documents": options.documents} if options.documents else {}
    rates, races, busy = earlier_parts(options.output, place, settings, options.fresh).values()
    for vocabulary in {SHAPES[model][3] for model in (*options.models, options.race_model)}:
        shared_text(vocabulary, options.documents, options.kept)  # before the children need it
    for model, kind in product(options.models, options.kinds):
        print(f"{model}, {kind}", flush=True)
        runs = alternate(
            __file__,
            rate_cases(model, kind, options),
            options.rounds,
            options.threads,
            ledger,
            show,
        )
        sides = {
            side: {k: spread(f[k] for f in found) for k in found[0] if k != "precision"}
            for side, found in runs.items()
        }
        rates[f"{model}, {kind}"] = {"machine": place, "ratios": compare_rates(runs),
                                     "sides": sides, "runs": runs}  # fmt: skip
    for model, kind in product(options.models, options.kinds) if options.busy else ():
        print(f"{model}, {kind}, beside busy loops", flush=True)
        busy[f"{model}, {kind}"] = {
            "machine": place,
            "loops": beside_loops(model, kind, options, ledger),
        }
    for kind in options.race_kinds if options.seconds else ():
        print(f"race, {kind}", flush=True)
        races[kind] = {"machine": place, **race(kind, options, ledger)}
    rates = {f"{model}, {kind}": rates[f"{model}, {kind}"] for model, kind in product(SHAPES, KINDS)
             if f"{model}, {kind}" in rates}  # fmt: skip
    judged = [
        one
        for name, found in rates.items()
        for one in judge_rates(*name.split(", "), found["ratios"])
    ]
    judged += [
        one
        for name, found in rates.items()
        for one in judge_shares(*name.split(", "), found["sides"])
    ]
    judged += [one for kind, found in races.items() for one in judge_race(kind, found)]
    judged += [one for name, found in busy.items() for one in judge_busy(name, found["loops"])]
    say(judged)
    write_result(options.output, {"what": __doc__.splitlines()[0], "bertlab": bertlab.__version__,
                                  "machine": place, "settings": settings, "judged": judged,
                                  "rates": rates, "races": races, "busy": busy},
                 draw if rates and not options.no_picture else None)  # fmt: skip


if __name__ == "__main__":
    main()
