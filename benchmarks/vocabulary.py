"""What changing a model's vocabulary costs, and what it saves: extend, trim, transplant beside starting afresh.

    python benchmarks/vocabulary.py [--seeds 3] [--steps 600] [--quick] [--output FILE]

For each seed a small model is trained on the part of the embedded corpus that does not speak of a domain, with a
WordPiece vocabulary of its own. Then, on held-out modules:

* trim: the largest difference of any kept score on the text that was kept (target: 0, bit for bit);
* extend: bits per byte of whole hidden words before, after zero steps, and after some (target: +5 % at most at zero);
* transplant: the steps that a byte-level BPE tokenizer on the old body needs to reach the old bits per byte, by each
  method, beside the steps of a fresh model with that tokenizer (target: 20 % of them). A model that does not get there
  within --steps is written as None.

All models of a seed see the same batches. Masks are of whole words, so that tokenizers compare.
"""

import copy
import json
import time

import torch
from sides import Ledger, common_parser, fingerprint, machine, write_result

from bertlab.data.collators import MaskedLanguageModelingCollator
from bertlab.data.corpus import embedded_corpus
from bertlab.data.packing import PackedDataset, special_ids
from bertlab.data.tokenizers import train_tokenizer
from bertlab.data.vocabularies import trim_tokenizer
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.vocabulary import (
    TRANSPLANTS,
    extend_vocabulary,
    masked_bits_per_byte,
    transplant_vocabulary,
    trim_vocabulary,
)

LENGTH, ROWS, RATE, EVERY = 128, 16, 2e-3, 20
TARGETS = {"extension": 0.05, "transplant": 0.2}


def fresh(tokenizer, seed, quick):
    "A model that knows nothing."
    torch.manual_seed(seed)
    width = 64 if quick else 128
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "cls", "sep", "mask")}
    return BertLabForMaskedLM(modernbert_tiny(
        vocab_size=len(tokenizer), hidden_size=width, num_attention_heads=width // 32, num_hidden_layers=2 if quick else 4,
        intermediate_size=width * 3 // 2, max_position_embeddings=LENGTH, local_attention=32, **special))  # fmt: skip


def batches(tokenizer, texts, seed):
    "Batches without end; a function of the seed."
    rows = PackedDataset(tokenizer(texts, add_special_tokens=False, verbose=False).input_ids, LENGTH, seed=seed,
                         **special_ids(tokenizer))  # fmt: skip
    collate = MaskedLanguageModelingCollator.from_tokenizer(tokenizer, seed=seed, max_sequence_length=LENGTH, unit="word")
    epoch = 0
    while True:
        for start in range(0, len(rows) - ROWS + 1, ROWS):
            yield collate([rows[epoch, start + i] for i in range(ROWS)])
        epoch += 1


def train(model, tokenizer, texts, held_out, steps, seed, goal=None):
    "Train, and score every few steps; ends at a goal. Returns bits per byte by step."
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    source, curve = batches(tokenizer, texts, seed), {0: masked_bits_per_byte(model, tokenizer, held_out, LENGTH)}
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, step / 20)
        loss = model.train()(**next(source)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % EVERY == 0 or step == steps:
            curve[step] = masked_bits_per_byte(model, tokenizer, held_out, LENGTH)
            if goal is not None and curve[step] <= goal:
                break
    return {str(step): value for step, value in curve.items()}  # as a file of kept figures gives them back


def first_below(curve, goal):
    "The first step at which a curve is at or below a goal; None where it never is."
    return next((int(step) for step, value in curve.items() if value <= goal), None)


def measure_seed(seed, steps, quick):
    "All three operations on one model."
    corpus = embedded_corpus()
    is_away = lambda document: any(word in document.text for word in ("async", "corout", "socket", "thread"))
    home = [d.text for d in corpus.train if not is_away(d)][: 1000 if quick else None]
    away = [d.text for d in corpus.train if is_away(d)][: 300 if quick else None]
    held_out = [d.text for d in corpus.validation if is_away(d)][: 60 if quick else None]
    old = train_tokenizer(home, 1600 if quick else 4096)
    model = fresh(old, seed, quick)
    curve = train(model, old, home + away, held_out, steps, seed)
    reached = list(curve.values())[-1]
    small, fewer = trim_vocabulary(model, old, away)
    kept = trim_tokenizer(old, away).kept
    options = dict(padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    with torch.no_grad():
        full, less = model.eval()(**old(away[:100], **options)).logits, small.eval()(**fewer(away[:100], **options)).logits
    found = {"old": reached, "old_curve": curve,
             "trim": {"rows": [model.config.vocab_size, small.config.vocab_size],
                      "largest_difference": float((full[..., kept] - less[..., : len(kept)]).abs().max())}}  # fmt: skip
    found["extend"] = {}
    for number in (50, 200) if quick else (50, 200, 800):
        longer, more = extend_vocabulary(model, old, away, number)
        found["extend"][len(more) - len(old)] = train(longer, more, away, held_out, steps // 10, seed + 100)
    new = train_tokenizer(home + away, 1600 if quick else 4096, kind="bpe")
    found["transplant"] = {}
    for method in (*TRANSPLANTS, "fresh"):
        if method == "fresh":
            moved = fresh(new, seed + 1, quick)
        else:
            moved = copy.deepcopy(transplant_vocabulary(model, old, new, method, home + away).model)
        curve = train(moved, new, home + away, held_out, steps * 2, seed + 200, goal=reached)
        found["transplant"][method] = {"steps": first_below(curve, reached), "curve": curve}
    return found


def summarise(seeds):
    "Every target beside its worst seed."
    zero = [curve["0"] / one["old"] - 1 for one in seeds for curve in one["extend"].values()]
    shares = {method: [one["transplant"][method]["steps"] / one["transplant"]["fresh"]["steps"]
                       if one["transplant"][method]["steps"] is not None and one["transplant"]["fresh"]["steps"]
                       else None for one in seeds] for method in TRANSPLANTS}  # fmt: skip
    return {"trim_largest_difference": max(one["trim"]["largest_difference"] for one in seeds),
            "extend_worst_rise_at_zero_steps": max(zero), "transplant_share_of_fresh_steps": shares}  # fmt: skip


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "vocabulary", rounds=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    steps, count = (60, 1) if asked.quick else (asked.steps, asked.seeds)
    ledger = Ledger(asked.kept / "vocabulary.json", fingerprint(__file__), asked.fresh)
    start, seeds = time.perf_counter(), []
    for seed in range(count):
        key = json.dumps([seed, steps, asked.quick, asked.threads])
        found, known = ledger.ask(key, lambda: measure_seed(seed, steps, asked.quick))  # noqa: B023
        seeds.append(found)
        print(seed, f"{time.perf_counter() - start:.0f} s{' (kept)' * known}", summarise(seeds), flush=True)
    write_result(asked.output, {"what": __doc__.splitlines()[0], "machine": machine(asked.threads), "steps": steps,
                                "summary": summarise(seeds), "targets": TARGETS, "seeds": seeds})  # fmt: skip


if __name__ == "__main__":
    main()
