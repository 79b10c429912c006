"""What changing a model's vocabulary costs, and what it saves: extend, trim, transplant beside starting afresh.

    python benchmarks/vocabulary.py [--seeds 3] [--steps 1500] [--quick] [--output FILE]

The embedded corpus is parted in two: what speaks of a domain (sockets, threads, coroutines), and the rest. For each seed,
on held-out modules of both:

* trim: the largest difference of any kept score on the text that was kept (target: 0, bit for bit);
* extend: bits per byte of whole hidden words before, after zero steps, and after some (target: +5 % at most at zero);
* transplant: the steps that a model needs, with another tokenizer, to reach the bits per byte that it had, by each method,
  beside the steps of a fresh model with that tokenizer (target: 20 % of them). A transplant that does not get there
  within --steps is written as None; so is a fresh model within twice as many, which then stand for its steps.

A model with a WordPiece vocabulary of the rest is trimmed and extended to the domain. The transplants go from a byte-level
BPE of the rest to one of the domain alone, for both write the same text, letter for letter: WordPiece drops capitals and
spaces, so that its hidden bytes are easier to guess, and no other family could reach its figure. All models of a seed see
the same batches. Masks are of whole words, so that tokenizers compare.
"""

import json
import time

import torch
from sides import Ledger, common_parser, fingerprint, judge, machine, say, write_result

from bertlab.core.plots import BLUE, GREEN, GREY, ORANGE, RED, new_axes
from bertlab.data.collators import MaskedLanguageModelingCollator
from bertlab.data.corpus import embedded_corpus
from bertlab.data.packing import PackedDataset, special_ids
from bertlab.data.tokenizers import train_tokenizer
from bertlab.data.vocabularies import find_counterparts, trim_tokenizer
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
    "All three operations."
    corpus = embedded_corpus()
    is_away = lambda document: any(word in document.text for word in ("async", "corout", "socket", "thread"))
    home = [d.text for d in corpus.train if not is_away(d)][: 1000 if quick else None]
    away = [d.text for d in corpus.train if is_away(d)][: 300 if quick else None]
    held_out = [d.text for d in corpus.validation if is_away(d)][: 30 if quick else None]
    held_out += [d.text for d in corpus.validation if not is_away(d)][: 30 if quick else 270]
    size = 1600 if quick else 4096
    old = train_tokenizer(home, size)
    model = fresh(old, seed, quick)
    curve = train(model, old, home + away, held_out, steps, seed)
    small, fewer = trim_vocabulary(model, old, away)
    kept = trim_tokenizer(old, away).kept
    options = dict(padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    with torch.no_grad():
        full, less = model.eval()(**old(away[:100], **options)).logits, small.eval()(**fewer(away[:100], **options)).logits
    found = {"old": list(curve.values())[-1], "old_curve": curve,
             "trim": {"rows": [model.config.vocab_size, small.config.vocab_size],
                      "largest_difference": float((full[..., kept] - less[..., : len(kept)]).abs().max())}}  # fmt: skip
    found["extend"] = {}
    for number in (50, 200) if quick else (50, 200, 800):
        longer, more = extend_vocabulary(model, old, away, number)
        found["extend"][len(more) - len(old)] = train(longer, more, away, held_out, steps // 15, seed + 100)
    return {**found, "transplant": measure_transplants(home, away, held_out, size, seed, steps, quick)}


def measure_transplants(home, away, held_out, size, seed, steps, quick):
    "Steps to the old bits per byte with another tokenizer, by each method and afresh."
    old, new = train_tokenizer(home, size, kind="bpe"), train_tokenizer(away, size, kind="bpe")
    model = fresh(old, seed, quick)
    goal = list(train(model, old, home + away, held_out, steps, seed).values())[-1]
    found = {"goal": goal, "entries": len(new), "twins": len(find_counterparts(old, new).twins), "methods": {}}
    for method in (*TRANSPLANTS, "fresh"):
        if method == "fresh":
            moved, most = fresh(new, seed + 1, quick), 2 * steps
        else:
            moved, most = transplant_vocabulary(model, old, new, method, home + away).model, steps
        curve = train(moved, new, home + away, held_out, most, seed + 200, goal)
        found["methods"][method] = {"steps": first_below(curve, goal), "curve": curve}
    return found


def summarise(seeds):
    "Every target beside its worst seed."
    zero = [curve["0"] / one["old"] - 1 for one in seeds for curve in one["extend"].values()]
    ways = [one["transplant"]["methods"] for one in seeds]
    most = [max(map(int, one["fresh"]["curve"])) for one in ways]  # steps to the goal, or all that were tried
    shares = {method: [None if one[method]["steps"] is None else one[method]["steps"] / max(1, steps)
                       for one, steps in zip(ways, most)] for method in TRANSPLANTS}  # fmt: skip
    return {"trim_largest_difference": max(one["trim"]["largest_difference"] for one in seeds),
            "extend_worst_rise_at_zero_steps": max(zero), "transplant_share_of_fresh_steps": shares}  # fmt: skip


def verdicts(summary):
    "Targets and what came out; of the transplants the method whose worst seed is best."
    worst = min(max(99.0 if one is None else one for one in found)
                for found in summary["transplant_share_of_fresh_steps"].values())  # fmt: skip
    return [judge("trim: largest difference of a kept score", summary["trim_largest_difference"], at_most=0.0),
            judge("extend: rise of bits per byte at zero steps", summary["extend_worst_rise_at_zero_steps"], at_most=0.05),
            judge("transplant: share of a fresh model's steps, worst seed of the best method", worst, at_most=0.2)]  # fmt: skip


def draw(result):
    "Bits per byte by step, for each way to begin with another tokenizer."
    figure, axes = new_axes("steps with the new tokenizer", "bits per byte of hidden words", size=(7, 4))
    for number, one in enumerate(result["seeds"]):
        for (name, way), colour in zip(one["transplant"]["methods"].items(), (BLUE, GREEN, ORANGE, RED, GREY)):
            axes.plot([int(step) for step in way["curve"]], list(way["curve"].values()), color=colour, lw=1,
                      label=name if number == 0 else None)  # fmt: skip
        axes.axhline(one["transplant"]["goal"], color="0.3", ls=":", lw=0.9, label="the old model" if number == 0 else None)
    axes.legend(frameon=False)
    return figure


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "vocabulary", rounds=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500)
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
    judged = verdicts(summary := summarise(seeds))
    say(judged)
    write_result(asked.output, {"what": __doc__.splitlines()[0], "machine": machine(asked.threads), "steps": steps,
                                "judged": judged, "summary": summary, "seeds": seeds}, draw)  # fmt: skip


if __name__ == "__main__":
    main()
