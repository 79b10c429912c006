"""Fine-tuning three families on short texts beside Trainer with length grouping: real tokens per second.

    python benchmarks/finetuning_families.py [--families xlm-roberta deberta-v2 distilbert]

Both sides load the same directory: a small model of the family with random weights, and a tokenizer of the
family's kind. The texts have the lengths of AG News. XLM-R and DistilBERT run in our encoder; DeBERTa-v3 runs as
transformers' own class on padded rows. Trainer pads to the longest row of a batch and groups rows by length.
"""

import json
import tempfile
from itertools import product

import numpy as np
import torch
from finetuning_trainer import DECAY, RATE, ROWS, draw, fit_module, fit_trainer
from pretraining import load_text
from sides import Ledger, alternate, common_parser, machine, ratios, spreads, write_result

import bertlab

SIZES = {"small": (4, 128, 4), "tiny": (1, 32, 2)}  # layers, width, heads
VOCABULARY, LENGTH, LABELS = 8192, 256, 4
KINDS = {"xlm-roberta": "unigram", "deberta-v2": "unigram", "distilbert": "wordpiece"}
DEBERTA_V3 = {
    "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip


def draw_rows(texts: list[str], count: int) -> list[dict]:
    "Cut the corpus into texts as long as AG News': 38 words on average, and at most 170."
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(3.6, 0.27, count)).round().clip(8, 170).astype(int)
    words, ends = [], np.cumsum(lengths)
    for text in texts:
        words += text.split()
        if len(words) >= ends[-1]:
            break
    pieces = [" ".join(words[end - n : end]) for n, end in zip(lengths, ends)]
    return [{"text": text, "label": f"class {n % LABELS}"} for n, text in enumerate(pieces) if text]


def write_model(family: str, size: str, tokenizer, directory: str) -> None:
    "Write a random model of a family, with its tokenizer."
    import transformers

    layers, width, heads = SIZES[size]
    config = transformers.AutoConfig.for_model(
        family, vocab_size=len(tokenizer), hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=heads, intermediate_size=4 * width, max_position_embeddings=514,
        pad_token_id=tokenizer.pad_token_id, **(DEBERTA_V3 if family == "deberta-v2" else {}),
    )  # fmt: skip
    if family == "distilbert":
        config.hidden_dim = 4 * width
    torch.manual_seed(0)
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def our_side(case: dict, rows: list[dict], directory: str) -> dict:
    from bertlab.finetuning.data import FinetuningDataModule
    from bertlab.finetuning.module import FinetuningModule
    from bertlab.train.trainer import seed_everything

    data = FinetuningDataModule(
        "classification", directory, max_sequence_length=LENGTH, train_batch_size=ROWS
    )
    data.set_datasets(train=rows, val=rows[:64])
    data.setup()
    seed_everything(0)
    options = {"learning_rate": RATE, "weight_decay": DECAY}
    return fit_module(case, FinetuningModule("classification", directory, **options), data)


def their_side(case: dict, rows: list[dict], directory: str) -> dict:
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers import DataCollatorWithPadding, set_seed

    tokenizer = AutoTokenizer.from_pretrained(directory)

    def encode(batch: dict) -> dict:
        labels = [int(label.split()[1]) for label in batch["label"]]
        return {**tokenizer(batch["text"], truncation=True, max_length=LENGTH), "labels": labels}

    dataset = Dataset.from_list(rows).map(encode, batched=True, remove_columns=["text", "label"])
    set_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=LABELS)
    grouping = {"train_sampling_strategy": "group_by_length"}
    return fit_trainer(case, model, dataset, DataCollatorWithPadding(tokenizer), **grouping)


def measure(case: dict) -> dict[str, float]:
    "Measure one case in this process."
    corpus, tokenizer = load_text(VOCABULARY, case["documents"], KINDS[case["family"]])
    rows = draw_rows(corpus.train_texts, case["rows"])
    with tempfile.TemporaryDirectory() as directory:
        write_model(case["family"], case["model"], tokenizer, directory)
        return (our_side if case["side"] == "ours" else their_side)(case, rows, directory)


def main() -> None:
    parser = common_parser(__doc__, "finetuning_families", rounds=3)
    add = parser.add_argument
    add("--families", nargs="+", default=list(KINDS), choices=KINDS)
    add("--precisions", nargs="+", default=["fp32", "bf16"], choices=("fp32", "bf16"))
    add("--steps", type=int, default=12, help="timed steps (default: 12)")
    options, warm, documents, rows, model = parser.parse_args(), 3, None, 2000, "small"
    if options.case:
        return print(json.dumps(measure(options.case)))
    if options.quick:
        options.rounds, options.precisions, options.steps = 1, ["fp32"], 2
        options.families, warm, documents, rows, model = ["deberta-v2"], 1, 2000, 200, "tiny"
    where, ledger = machine(options.threads), Ledger("finetuning_families", options.fresh)
    for kind in {KINDS[family] for family in options.families}:
        load_text(VOCABULARY, documents, kind)
    base = {
        "model": model,
        "steps": options.steps + warm,
        "warm": warm,
        "documents": documents,
        "rows": rows,
    }
    show = lambda f: f"{f['tokens_per_second']:9,.0f} tokens/s, {f['fill']:4.0%} full"
    sides, compared = {}, {}
    for family, precision in product(options.families, options.precisions):
        name = f"{family}, {precision}"
        print(name, flush=True)
        case = {**base, "family": family, "precision": precision}
        cases = {side: {**case, "side": side} for side in ("ours", "Trainer")}
        runs = alternate(__file__, cases, options, ledger, show)
        pair = runs["ours"], runs["Trainer"]
        compared[name] = {
            "wall": ratios(*pair, "tokens_per_second"),
            "processor": ratios(*pair, "tokens_per_processor_second"),
        }
        sides[name] = spreads(runs)
    content = {"bertlab": bertlab.__version__, "machine": where, "model": model}
    write_result(options, {**content, "ratios": compared, "sides": sides}, draw)


if __name__ == "__main__":
    main()
