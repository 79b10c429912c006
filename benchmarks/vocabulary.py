"""What changing a model's vocabulary costs, and what it saves: extend, trim, transplant beside starting afresh.

    python benchmarks/vocabulary.py [--seeds 3] [--steps 600] [--quick] [--output FILE]

The embedded corpus is parted in two: what speaks of a domain (sockets, threads, coroutines), and the rest. For each seed,
on held-out modules of both:

* trim: the largest difference of any kept score on the text that was kept (target: 0, bit for bit);
* extend: bits per byte of whole hidden words before, after zero steps, and after some (target: +5 % at most at zero);
* transplant: the steps that a model needs, with another tokenizer, to reach the bits per byte that it had, by each method,
  beside the steps of a fresh model with that tokenizer (target: 20 % of them).

A model with a WordPiece vocabulary of the rest is trimmed and extended to the domain. The transplants are of models with
byte-level BPE, for its vocabularies write the same text, letter for letter: WordPiece drops capitals and spaces, so that
its hidden bytes are easier to guess, and no other family could reach its figure. Both ways are judged: from a
vocabulary of the domain, a foreign one that cuts most text into crumbs, to one of all text, and back. The second was
measured first and could not be reached, so that it has one seed alone.
Pieces of a hidden word are guessed one without another, so that crumbs cost bits by themselves, whatever the model knows.

All training is on all text, and every run has a whole schedule of its own: a warmup of 5 %, and a fall to nothing over
the second half. "Steps needed" is the shortest of the lengths of LENGTHS that reaches the goal, and None where the
longest does not. Masks are of whole words, so that tokenizers compare. Rates were tried on seed 0: see RATES.
"""

import json
import time

import torch
from sides import Ledger, common_parser, fingerprint, judge, machine, say, write_result

from bertlab.core.plots import BLUE, GREEN, GREY, ORANGE, RED
from bertlab.data.collators import MaskedLanguageModelingCollator
from bertlab.data.corpus import embedded_corpus
from bertlab.data.packing import PackedDataset, special_token_ids
from bertlab.data.tokenizers import train_tokenizer
from bertlab.data.vocabularies import map_vocabulary, trim_tokenizer
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.vocabulary import (
    TRANSPLANTS,
    extend_vocabulary,
    masked_bits_per_byte,
    transplant_vocabulary,
    trim_vocabulary,
)

LENGTH, ROWS = 128, 16
RATES = {
    "fresh": 2e-3,
    "adapted": 1e-3,
}  # peaks of AdamW: of 1, 2 and 4e-3 the best, for short runs, on seed 0
LENGTHS = {
    "fresh": (0.4, 0.55, 0.75, 1.0),
    "adapted": (0.05, 0.1, 0.2),
}  # of runs, in shares of the old model's steps
WAYS = {
    "to its own": ("away", "all"),
    "to a foreign one": ("all", "away"),
}  # the text of each vocabulary, old and new


def fresh(tokenizer, seed, quick):
    "A model that knows nothing."
    torch.manual_seed(seed)
    width = 64 if quick else 128
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id")
        for name in ("pad", "cls", "sep", "mask")
    }
    return BertLabForMaskedLM(modernbert_tiny(
        vocab_size=len(tokenizer), hidden_size=width, num_attention_heads=width // 32, num_hidden_layers=2 if quick else 4,
        intermediate_size=width * 3 // 2, max_position_embeddings=LENGTH, local_attention=32, **special))  # fmt: skip


def batches(tokenizer, texts, seed):
    "Batches without end; a function of the seed."
    rows = PackedDataset(tokenizer(texts, add_special_tokens=False, verbose=False).input_ids, LENGTH, seed=seed,
                         **special_token_ids(tokenizer))  # fmt: skip
    collate = MaskedLanguageModelingCollator.from_tokenizer(
        tokenizer, seed=seed, max_sequence_length=LENGTH, unit="word"
    )
    epoch = 0
    while True:
        for start in range(0, len(rows) - ROWS + 1, ROWS):
            yield collate([rows[epoch, start + i] for i in range(ROWS)])
        epoch += 1


def train(model, tokenizer, texts, held_out, steps, seed, rate):
    "Train with a whole schedule; bits per byte at its end."
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    source = batches(tokenizer, texts, seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / max(1, 0.05 * steps), 2 * (1 - step / steps))
        loss = model.train()(**next(source)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return masked_bits_per_byte(model, tokenizer, held_out, LENGTH)


def first_below(curve, goal):
    "The least number of steps whose run ends at or below a goal; None where there is none."
    return next((int(steps) for steps, value in curve.items() if value <= goal), None)


def parts_of_corpus(quick):
    "Texts of the domain, of the rest, and held-out ones of both."
    corpus = embedded_corpus()
    is_away = lambda document: any(
        word in document.text for word in ("async", "corout", "socket", "thread")
    )
    home = [d.text for d in corpus.train if not is_away(d)][: 1000 if quick else None]
    away = [d.text for d in corpus.train if is_away(d)][: 300 if quick else None]
    held_out = [d.text for d in corpus.validation if is_away(d)][: 30 if quick else None]
    held_out += [d.text for d in corpus.validation if not is_away(d)][: 30 if quick else 270]
    return home, away, held_out


def measure_seed(seed, steps, quick):
    "All three operations."
    home, away, held_out = parts_of_corpus(quick)
    size = 1600 if quick else 4096
    old = train_tokenizer(home, size)
    model = fresh(old, seed, quick)
    goal = train(model, old, home + away, held_out, steps, seed, RATES["fresh"])
    small, fewer = trim_vocabulary(model, old, away)
    kept = trim_tokenizer(old, away).kept
    options = dict(padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    with torch.no_grad():
        full, less = (
            model.eval()(**old(away[:100], **options)).logits,
            small.eval()(**fewer(away[:100], **options)).logits,
        )
    found = {"old": goal, "trim": {"rows": [model.config.vocab_size, small.config.vocab_size],
                                   "largest_difference": float((full[..., kept] - less[..., : len(kept)]).abs().max())},
             "extend": {}, "transplant": {}}  # fmt: skip
    for number in (50, 200) if quick else (50, 200, 800):
        longer, more = extend_vocabulary(model, old, away, number)
        zero = masked_bits_per_byte(longer, more, held_out, LENGTH)
        after = train(
            longer, more, home + away, held_out, steps // 10, seed + 100, RATES["adapted"]
        )
        found["extend"][len(more) - len(old)] = {"0": zero, str(steps // 10): after}
    texts = {"away": away, "all": home + away}
    for way, (before, behind) in list(WAYS.items())[: 2 if seed == 0 else 1]:
        pair = (train_tokenizer(texts[name], size, kind="bpe") for name in (before, behind))
        found["transplant"][way] = measure_transplants(
            *pair, texts["all"], held_out, seed, steps, quick
        )
        print(f"  seed {seed}, {way}: {found['transplant'][way]}", flush=True)
    return found


def measure_transplants(old, new, texts, held_out, seed, steps, quick):
    "Bits per byte by steps with another tokenizer, by each method and afresh."
    model = fresh(old, seed, quick)
    goal = train(model, old, texts, held_out, steps, seed, RATES["fresh"])
    found = {
        "goal": goal,
        "entries": len(new),
        "twins": len(map_vocabulary(old, new).twins),
        "methods": {},
    }
    for method in (*TRANSPLANTS, "fresh"):
        kind = "fresh" if method == "fresh" else "adapted"
        curve = {}
        for length in (0, *(max(2, round(share * steps)) for share in LENGTHS[kind])):
            moved = fresh(new, seed + 1, quick) if kind == "fresh" else (
                transplant_vocabulary(model, old, new, method, texts).model)  # fmt: skip
            curve[str(length)] = train(moved, new, texts, held_out, length, seed + 200, RATES[kind])
        found["methods"][method] = {"steps": first_below(curve, goal), "curve": curve}
    return found


def shares(way):
    "Steps of each method over those of a fresh model; None where the goal was not reached in as many as were tried."
    methods = way["methods"]
    fresh_steps = methods["fresh"]["steps"] or max(
        map(int, methods["fresh"]["curve"])
    )  # or more than all that were tried
    steps = {method: methods[method]["steps"] for method in TRANSPLANTS}
    return {
        method: None if number is None else number / fresh_steps for method, number in steps.items()
    }


def summarise(seeds):
    "Every target beside its worst seed."
    zero = [curve["0"] / one["old"] - 1 for one in seeds for curve in one["extend"].values()]
    by_seed = {
        way: [shares(one["transplant"][way]) for one in seeds if way in one["transplant"]]
        for way in WAYS
    }
    return {"trim_largest_difference": max(one["trim"]["largest_difference"] for one in seeds),
            "extend_worst_rise_at_zero_steps": max(zero),
            "transplant_share_of_fresh_steps": {way: {method: [one[method] for one in found] for method in TRANSPLANTS}
                                                for way, found in by_seed.items()}}  # fmt: skip


def verdicts(summary):
    "Targets and what came out; of the transplants the method whose worst seed is best."
    judged = [judge("trim: largest difference of a kept score", summary["trim_largest_difference"], at_most=0.0),
              judge("extend: rise of bits per byte at zero steps", summary["extend_worst_rise_at_zero_steps"],
                    at_most=0.05)]  # fmt: skip
    for way, found in summary["transplant_share_of_fresh_steps"].items():
        worst = min(
            max(99.0 if one is None else one for one in by_seed) for by_seed in found.values()
        )
        what = f"transplant {way}: share of a fresh model's steps, worst seed of the best method"
        judged.append(judge(what, worst, at_most=0.2))
    return judged


def draw(result):
    "Bits per byte by the length of a run, for each way to begin with another tokenizer."
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(WAYS), figsize=(9, 3.8), sharey=True, layout="constrained")
    for axes, way in zip(panels, WAYS):
        for number, one in enumerate(seed for seed in result["seeds"] if way in seed["transplant"]):
            found = one["transplant"][way]
            for (name, method), colour in zip(
                found["methods"].items(), (BLUE, GREEN, ORANGE, RED, GREY)
            ):
                curve = {
                    int(steps): value
                    for steps, value in method["curve"].items()
                    if name != "fresh" or steps != "0"
                }
                axes.plot(
                    list(curve),
                    list(curve.values()),
                    "o-",
                    color=colour,
                    lw=1,
                    ms=3,
                    label=name if number == 0 else None,
                )
            axes.axhline(
                found["goal"],
                color="0.3",
                ls=":",
                lw=0.9,
                label="the old model" if number == 0 else None,
            )
        axes.set_title(
            {"to its own": "to a vocabulary of its own text"}.get(
                way, "to a vocabulary of other text"
            ),
            fontsize=10,
        )
        axes.set_xlabel("steps of the run")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("bits per byte of hidden words")
    panels[-1].legend(frameon=False, fontsize=8)
    return figure


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
        print(
            seed,
            f"{time.perf_counter() - start:.0f} s{' (kept)' * known}",
            summarise(seeds),
            flush=True,
        )
    judged = verdicts(summary := summarise(seeds))
    say(judged)
    write_result(asked.output, {"what": __doc__.splitlines()[0], "machine": machine(asked.threads), "steps": steps,
                                "judged": judged, "summary": summary, "seeds": seeds}, draw)  # fmt: skip


if __name__ == "__main__":
    main()
