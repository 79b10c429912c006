"""Writing by unmasking: what minutes of masked diffusion make of the demo's model, beside simple controls.

    python benchmarks/writing.py [--demo bertlab-demo] [--minutes 5] [--seeds 3] [--quick]

For each seed the demo's model goes on training as masked diffusion on the docstrings of the standard
library, for so many minutes. Then half of each held-out docstring is hidden, and the demo's model, the
trained one and two tables of counts fill it: exact matches, and bits per byte of what was hidden. Free
text of every sampler is counted for repeats beside held-out docstrings of the same length and number,
and read by a causal twin that was trained on the same tokens; five texts of a seed are written down
as they come. Tokens per second of every sampler stand beside the twin with and without its cache.
Without --demo a demo is trained first, where figures wait. --quick trains for seconds on little text:
its figures say that the script runs, and nothing else.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from sides import Ledger, common_parser, fingerprint, hash_of, judge, machine, say, write_result

import bertlab
from bertlab.cli.demo import FIRST_RECIPE
from bertlab.cli.pretrain import find_model_directory
from bertlab.core.devices import describe_device
from bertlab.data.corpus import embedded_corpus
from bertlab.data.module import PretrainingDataModule
from bertlab.data.tokenizers import load_tokenizer
from bertlab.model.causal import generate_causal
from bertlab.model.losses import token_bytes
from bertlab.model.sampling import SAMPLERS, SamplingConfig, unmask, gap_log_probs
from bertlab.model.likelihood import (
    causal_nll,
    repetition_stats,
    diffusion_nll_bound,
    generative_perplexity,
    hide_share,
)
from bertlab.model.likelihood import is_expression, library_expressions
from bertlab.model.generation import generate, vocabulary_of
from bertlab.train.history import History
from bertlab.train.modules import CausalModule, PretrainingModule, load_encoder
from bertlab.train.stopping import TimeLimit
from bertlab.train.trainer import make_trainer, seed_everything

LENGTH, FREE = 64, 32  # tokens of a held-out docstring at most, and of a free text
BANDS = {"distinct_2": 0.15, "repeated_4": 0.05, "stutter": 0.03}  # off real docstrings, at most


def train(
    module,
    corpus,
    tokenizer,
    objective: str,
    minutes: float,
    rows: int,
    steps: int | None = None,
    max_ends: int = 0,
    **collating,
) -> dict:
    "Train for minutes, or for steps; say what it took."
    data = PretrainingDataModule(
        corpus,
        tokenizer,
        objective,
        128,
        train_batch_size=rows,
        max_ends=max_ends,
        collator_kwargs=collating,
    )
    history, began = History(), time.perf_counter()
    limit = [] if steps else [TimeLimit(f"{max(1, round(60 * minutes))}s")]
    trainer = make_trainer(
        steps or 100_000, callbacks=[history, *limit], enable_checkpointing=False
    )
    trainer.fit(module, data)
    return {"steps": trainer.global_step, "seconds": time.perf_counter() - began,
            "tokens": int(history.record.rows[-1][4]), "last_loss": float(history.record.column("loss")[-1])}  # fmt: skip


class Counts:
    "Unigram and bigram tables of the training text, as fillers of gaps."

    def __init__(self, rows: list[list[int]], vocabulary):
        V, self.vocabulary = vocabulary.size, vocabulary
        self.one_V = np.bincount(np.concatenate(rows), minlength=V) + 0.1
        self.two_VV = np.zeros((V, V), dtype=np.float32)
        for row in rows:
            np.add.at(self.two_VV, (row[:-1], row[1:]), 1)
        self.one_V[vocabulary.is_special_V] = 0
        self.one_V = self.one_V / self.one_V.sum()

    def law(self, left: int | None) -> np.ndarray:  # (V,)
        "After a word: counts, with as much of the unigrams as Witten and Bell (1991) would give."
        if left is None:
            return self.one_V
        seen = self.two_VV[left] * (self.one_V > 0)
        kinds = (seen > 0).sum()
        return (seen + max(kinds, 1) * self.one_V) / (seen.sum() + max(kinds, 1))


def fill_by_counts(
    counts: Counts, gapped: list[int], ids: list[int], mask: int, bigram: bool
) -> tuple[int, float]:
    "Right words and nats of a text; the bigram table reads a left neighbour that is visible."
    right, nats = 0, 0.0
    for i, token in enumerate(gapped):
        if token == mask:
            left = gapped[i - 1] if bigram and i and gapped[i - 1] != mask else None
            p = counts.law(left)
            right += int(p.argmax() == ids[i])
            nats -= math.log(p[ids[i]])
    return right, nats


def as_rows(rows: list[list[int]], tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    "[CLS] ... [SEP], padded."
    rows = [[tokenizer.cls_token_id, *row, tokenizer.sep_token_id] for row in rows]
    ids_BL = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
    for row, ids in zip(ids_BL, rows):
        row[: len(ids)] = torch.tensor(ids)
    return ids_BL, (ids_BL != tokenizer.pad_token_id).long()


@torch.no_grad()
def fill_by_model(model, gapped, whole, tokenizer, **blocks) -> dict[str, float]:
    "Exact matches of texts filled surest first, and bits per byte of what was hidden, all at once."
    vocabulary = vocabulary_of(tokenizer)
    (ids_BL, mask_BL), (true_BL, _) = as_rows(gapped, tokenizer), as_rows(whole, tokenizer)
    open_BL = ids_BL == tokenizer.mask_token_id
    rule, right, nats = (
        SamplingConfig("confidence", num_steps=LENGTH, temperature=0, **blocks),
        0,
        0.0,
    )
    for part in torch.arange(len(ids_BL)).split(32):
        logp_NV = gap_log_probs(
            model.eval(), ids_BL[part], mask_BL[part], open_BL[part], vocabulary, None
        )
        nats -= logp_NV.gather(1, true_BL[part][open_BL[part]][:, None]).sum().item()
        filled_BL = unmask(model, ids_BL[part], vocabulary, rule, attention_mask=mask_BL[part])
        right += int((filled_BL == true_BL[part])[open_BL[part]].sum())
    num_bytes = float(token_bytes(tokenizer, vocabulary.size)[true_BL[open_BL]].sum())
    return {"exact": right / int(open_BL.sum()), "bits_per_byte": nats / math.log(2) / num_bytes}


def parse_share(model, tokenizer, expressions, seed: int) -> float:
    "The share of expressions that parse when half of their tokens were filled."
    gapped, _ = hide_share(tokenizer, expressions, seed=seed)
    ids_BL, mask_BL = as_rows(gapped, tokenizer)
    rule = SamplingConfig("confidence", num_steps=24, temperature=0)
    filled_BL = unmask(model, ids_BL, vocabulary_of(tokenizer), rule, attention_mask=mask_BL)
    return float(
        np.mean(
            [is_expression(tokenizer.decode(row, skip_special_tokens=True)) for row in filled_BL]
        )
    )


def free_rows(model, tokenizer, count: int, rule: SamplingConfig) -> torch.Tensor:  # (B, L)
    "Texts out of nothing."
    ids_BL, _ = as_rows([[tokenizer.mask_token_id] * FREE] * count, tokenizer)
    return unmask(model, ids_BL, vocabulary_of(tokenizer), rule)


def bare(ids_BL: torch.Tensor) -> list[list[int]]:
    return ids_BL[:, 1 : 1 + FREE].tolist()


def speeds(
    model, twin, tokenizer, count: int, rounds: int, prompts: list[list[int]]
) -> dict[str, float]:
    "Tokens per second, medians of rounds that take turns; once out of nothing, once after long prompts."
    vocabulary, start = vocabulary_of(tokenizer), torch.full((count, 1), tokenizer.cls_token_id)
    ways = {f"{name}, {steps} steps": lambda name=name, steps=steps: free_rows(
                model, tokenizer, count, SamplingConfig(name, num_steps=steps))
            for name in SAMPLERS for steps in (8, FREE)}  # fmt: skip
    long_BL, _ = as_rows(
        [[*ids, *[tokenizer.mask_token_id] * FREE] for ids in prompts[:count]], tokenizer
    )
    for cache in (True, False):
        rule = SamplingConfig("confidence", num_steps=FREE, block_size=8, cache_blocks=cache)
        kind, after = "cached" if cache else "uncached", f"after {len(prompts[0])} tokens"
        ways[f"confidence, 32 steps, blocks of 8, {kind}"] = lambda rule=rule: free_rows(
            model, tokenizer, count, rule
        )
        ways[f"confidence, 32 steps, blocks of 8, {kind}, {after}"] = lambda rule=rule: unmask(
            model, long_BL, vocabulary, rule)  # fmt: skip
        ways[f"causal twin, {kind}"] = lambda cache=cache: generate_causal(
            twin, start, vocabulary, FREE, use_cache=cache
        )
        ways[f"causal twin, {kind}, {after}"] = lambda cache=cache: generate_causal(
            twin, long_BL[:, : -FREE - 1], vocabulary, FREE, use_cache=cache)  # fmt: skip
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            took[name].append(time.perf_counter() - began)
    return {
        name: round(count * FREE / statistics.median(seconds), 1) for name, seconds in took.items()
    }


def one_seed(seed: int, options, corpus, tokenizer, twin, counts, held) -> dict:
    "Train from the demo's model, and measure."
    seed_everything(seed)
    vocabulary = vocabulary_of(tokenizer)
    # The rate falls with the clock, to a quarter of its peak at the end of the minutes.
    module = PretrainingModule(None, options.demo, tokenizer, "diffusion", learning_rate=options.rate, weight_decay=0.05,
                               compile_model=False, plain_mean=not options.weighted, schedule="time_budget",
                               scheduler_kwargs={"budget": 60 * options.minutes, "fall": 0.5})  # fmt: skip
    run = train(module, corpus, tokenizer, "diffusion", options.minutes, options.rows, max_ends=8,
                sampling_eps=0.02, seed=seed)  # fmt: skip
    model, demo = module.model.eval(), load_encoder(options.demo)
    gapped, whole = hide_share(tokenizer, held, 0.5, seed)
    bytes_V = token_bytes(tokenizer, vocabulary.size)
    fills = {
        "trained": fill_by_model(model, gapped, whole, tokenizer),
        "demo": fill_by_model(demo, gapped, whole, tokenizer),
    }
    for name, cached in (("trained, blocks of 8", False), ("trained, blocks of 8, cached", True)):
        fills[name] = fill_by_model(
            model, gapped, whole, tokenizer, block_size=8, cache_blocks=cached
        )
    hidden = [
        (t, g)
        for row, gaps in zip(whole, gapped)
        for t, g in zip(row, gaps)
        if g == tokenizer.mask_token_id
    ]
    num_bytes = float(bytes_V[[t for t, _ in hidden]].sum())
    for name, bigram in (("unigram", False), ("bigram", True)):
        found = [
            fill_by_counts(counts, g, w, tokenizer.mask_token_id, bigram)
            for g, w in zip(gapped, whole)
        ]
        fills[name] = {"exact": sum(r for r, _ in found) / len(hidden),
                       "bits_per_byte": sum(n for _, n in found) / math.log(2) / num_bytes}  # fmt: skip
    ids_BL, mask_BL = as_rows(whole, tokenizer)
    bound = diffusion_nll_bound(
        model, ids_BL, vocabulary, mask_BL, options.draws, seed, tokenizer=tokenizer
    )
    of_demo = diffusion_nll_bound(
        demo, ids_BL, vocabulary, mask_BL, options.draws, seed, tokenizer=tokenizer
    )
    exact = causal_nll(twin, ids_BL, vocabulary, mask_BL, tokenizer)
    long = [
        row
        for row in (tokenizer(t, add_special_tokens=False)["input_ids"] for t in held)
        if len(row) >= FREE
    ]
    count = min(options.texts, len(long))
    real = repetition_stats([row[:FREE] for row in long[:count]])
    free, examples = {}, {}
    for name in SAMPLERS:
        rows_BL = free_rows(
            model, tokenizer, count, SamplingConfig(name, num_steps=FREE, seed=seed)
        )
        free[name] = {
            **repetition_stats(bare(rows_BL)),
            "generative_perplexity": generative_perplexity(twin, rows_BL, vocabulary),
        }
        examples[name] = [tokenizer.decode(row) for row in bare(rows_BL)[:5]]
    real_BL, _ = as_rows([row[:FREE] for row in long[:count]], tokenizer)
    real["generative_perplexity"] = generative_perplexity(twin, real_BL, vocabulary)
    share = {
        name: parse_share(m, tokenizer, options.expressions, seed)
        for name, m in (("trained", model), ("demo", demo))
    }
    score = lambda s: {"nats_per_token": s.nats_per_token, "standard_error": s.standard_error,  # noqa: E731
                       "bits_per_byte": s.bits_per_byte}  # fmt: skip
    prompts = [
        "Return the",
        "If the [GAP] is not found, an error is raised.",
        "Return a [MASK] of the [MASK] [MASK].",
    ]
    return {"seed": seed, "training": run, "half_hidden": fills,
            "whole_text": {"trained, bound": score(bound), "demo, bound": score(of_demo), "causal twin, exact": score(exact)},
            "free_text": free, "real_text": real, "examples": examples, "expressions_that_parse": share,
            "prompted": generate(model, tokenizer, prompts, max_new_tokens=24, ends=True, seed=seed)}  # fmt: skip


def verdicts(seeds: list[dict]) -> list[dict]:
    "The targets of the work, the worst seed of each."
    others, judged = ("demo", "unigram", "bigram"), []
    for other in others:
        gain = min(
            s["half_hidden"]["trained"]["exact"] - s["half_hidden"][other]["exact"] for s in seeds
        )
        judged.append(judge(f"exact matches above {other}, worst seed", gain, at_least=0))
        less = max(
            s["half_hidden"]["trained"]["bits_per_byte"] - s["half_hidden"][other]["bits_per_byte"]
            for s in seeds
        )
        judged.append(judge(f"bits per byte above {other}, worst seed", less, at_most=0))
    for name, band in BANDS.items():
        off = max(
            min(abs(s["free_text"][k][name] - s["real_text"][name]) for k in s["free_text"])
            for s in seeds
        )
        judged.append(
            judge(f"{name} off real docstrings, nearest sampler, worst seed", off, at_most=band)
        )
        off = max(abs(s["free_text"]["ancestral"][name] - s["real_text"][name]) for s in seeds)
        judged.append(
            judge(f"{name} off real docstrings, ancestral, worst seed", off, at_most=band)
        )
    return judged


FIRST = ("num_hidden_layers", "steps", "optimizer", "learning_rate", "warmup_fraction")


def demo_at(folder: Path, quick: bool) -> Path:
    "The demo's run in a folder; trained now where it is not there."
    if not (folder / "metrics.json").exists():  # its last file
        first = {
            name: getattr(FIRST_RECIPE, name) for name in FIRST
        }  # what the committed figures began with
        first |= {"steps": 40, "hidden_size": 64, "vocab_size": 1000} if quick else {}
        words = [word for name, value in first.items() for word in (f"--{name}", str(value))]
        subprocess.run([sys.executable, "-m", "bertlab.cli.main", "demo", "--output", folder, "--overwrite", *words],
                       check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    return folder


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "writing", rounds=1, free=["demo"])
    parser.add_argument(
        "--demo", type=Path, help="directory of a run of bertlab demo (default: one is trained)"
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="of training, for each seed (default: 5)"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=8e-4, help="peak learning rate")
    parser.add_argument(
        "--weighted", action="store_true", help="train with the bound's weights, not the plain mean"
    )
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    parser.add_argument(
        "--texts", type=int, default=200, help="held-out docstrings, and free texts"
    )
    parser.add_argument("--draws", type=int, default=16, help="of the bound")
    parser.add_argument("--twin-steps", type=int, default=1500, help="of the causal twin")
    options: argparse.Namespace = parser.parse_args()
    if options.quick:
        options.minutes, options.texts, options.draws, options.twin_steps = (
            min(options.minutes, 0.5),
            24,
            4,
            20,
        )
    torch.set_num_threads(options.threads)
    place = machine(options.threads)
    options.demo = options.demo or demo_at(
        options.kept / f"writing-demo{'-quick' * options.quick}", options.quick
    )
    ledger = Ledger(options.kept / "writing.json", fingerprint(__file__), options.fresh)
    asked = [hash_of([find_model_directory(options.demo)]), options.minutes, options.rate, options.weighted, options.rows, options.texts,
             options.draws, options.twin_steps, options.threads, options.quick]  # fmt: skip
    tokenizer, corpus = (
        load_tokenizer(options.demo),
        embedded_corpus(max_documents=1200 if options.quick else None),
    )
    vocabulary = vocabulary_of(tokenizer)
    cut = tokenizer(
        corpus.validation_texts, add_special_tokens=False, truncation=True, max_length=LENGTH
    )["input_ids"]
    rng = np.random.default_rng(0)
    kept = [row for row in cut if len(row) >= 12]
    held = [tokenizer.decode(kept[i]) for i in rng.permutation(len(kept))[: options.texts]]
    options.expressions = library_expressions(tokenizer, 40 if options.quick else 200)
    counts = Counts(
        tokenizer(corpus.train_texts, truncation=True, max_length=512)["input_ids"], vocabulary
    )
    seed_everything(0)
    shape = load_encoder(options.demo).config.to_diff_dict()
    own = {
        k: v
        for k, v in shape.items()
        if k not in ("model_type", "architectures", "transformers_version", "dtype")
    }
    twin = CausalModule(own, pretrained_tokenizer_name_or_path=tokenizer, learning_rate=2e-3, weight_decay=0.05,
                        compile_model=False, scheduler_warmup_steps=20)  # fmt: skip
    trained = train(
        twin, corpus, tokenizer, "enhanced_mlm", 0, options.rows, steps=options.twin_steps
    )
    result = {"what": __doc__.splitlines()[0], "bertlab": bertlab.__version__, "machine": place, "device": str(describe_device()),
              "minutes": options.minutes, "twin": {**trained, "parameters": twin.model.num_parameters()},
              "held_out": len(held), "bands": BANDS, "seeds": []}  # fmt: skip
    for seed in range(1 if options.quick else options.seeds):
        found, _ = ledger.ask(json.dumps([*asked, seed]), lambda: one_seed(  # noqa: B023
            seed, options, corpus, tokenizer, twin.model.eval(), counts, held))  # noqa: B023  # fmt: skip
        result["seeds"].append(found)
        print(
            seed,
            {k: {n: round(v, 3) for n, v in f.items()} for k, f in found["half_hidden"].items()},
            flush=True,
        )
    # Prompts that leave room for what is written, of one length.
    room = load_encoder(options.demo).config.max_position_embeddings - FREE - 2
    texts = tokenizer(corpus.train_texts[:2000], add_special_tokens=False)["input_ids"]
    prompts = [row[:room] for row in texts if len(row) >= room]
    result["tokens_per_second"] = speeds(load_encoder(options.demo), twin.model, tokenizer, 4 if options.quick else 16,
                                         1 if options.quick else 5, prompts)  # fmt: skip
    result["judged"] = verdicts(result["seeds"])
    say(result["judged"])
    write_result(options.output, result)


if __name__ == "__main__":
    main()
