"""Text vectors beside sentence-transformers: encoding, training with a cached loss, and quality against counting words.

    bertlab demo --output build/demo
    python benchmarks/embeddings.py build/demo [--only encode train quality] [--quick]

encode   the embedded corpus' short texts (first 120 letters of each docstring's first line) by the same weights in
         float32: `BiEncoder.encode` against `SentenceTransformer.encode`, which sorts by length and pads. Both
         begin at texts and end at numpy arrays of length 1. The largest difference of a number is reported. Then once
         more beside another program that keeps one core busy; and how many texts per second there would be if nothing
         but tokenizing and the matrix products of our side (by a profile) took time.
train    pairs per second of optimizer steps, the same weights, pairs, batch, precision and AdamW: `EmbeddingModule`
         with `gradcache_rows` on packed rows against SentenceTransformerTrainer with
         CachedMultipleNegativesRankingLoss, whose mini-batch is tried at two sizes; the faster one counts.
         Theirs tokenizes each batch within its step, ours all pairs before the first: a twentieth of their step.
quality  from the demo's model, SECONDS of training on the docstring task's training modules, three seeds, beside
         BM25 and TF-IDF on modules that were held out. Rate and temperature were not searched.

Sides take turns in fresh processes; see `sides`. The targets are 3 times, 1.5 times, and a recall at 10 above both
baselines; what misses is said and ends nothing.
"""

import json
import tempfile
import time
import warnings
from pathlib import Path

from sides import (
    Ledger,
    alternate,
    busy_loops,
    common_parser,
    fingerprint,
    hash_of,
    judge,
    machine,
    ratios,
    say,
    spread,
    write_result,
)

import bertlab
from bertlab.core.plots import BLUE, GREY, ORANGE, new_axes

PARTS = ("encode", "train", "quality")
LENGTH, BATCH, CHUNK_ROWS = (
    64,
    256,
    8,
)  # tokens of a text, pairs of a batch, rows whose activations live
MINI_BATCHES = (32, 128)  # texts that the other side's cached loss encodes at once
SECONDS, RATE, TEMPERATURE = 180, 2e-3, 0.05  # of quality


def short_texts(count: int | None) -> list[str]:
    from bertlab.data.corpus import embedded_corpus

    corpus = embedded_corpus()
    texts = [text.split("\n")[0][:120] for text in corpus.train_texts]
    return texts[:count]


def save_bi_encoder(demo: str, place: Path) -> None:
    "The demo's encoder as a directory that both sides open."
    from bertlab.embeddings.bi_encoder import BiEncoder

    BiEncoder.load(demo, max_sequence_length=LENGTH).save(place)


def measure_products(case: dict) -> dict:
    "Texts per second if tokenizing and our side's matrix products alone took time, on all threads of this process."
    import torch
    from torch.profiler import ProfilerActivity, profile

    from bertlab.embeddings.bi_encoder import BiEncoder

    texts, threads, model = (
        short_texts(case["count"]),
        torch.get_num_threads(),
        BiEncoder.load(case["model"]),
    )
    torch.set_num_threads(1)  # the profiler sees this thread
    model.encode(texts[:200])
    begin = time.perf_counter()
    model.tokenize(texts)
    tokenizing = time.perf_counter() - begin
    with profile(activities=[ProfilerActivity.CPU]) as found:
        model.encode(texts)
    spent = {row.key: row.self_cpu_time_total for row in found.key_averages()}  # microseconds
    products = sum(spent.get(f"aten::{name}", 0) for name in ("mm", "addmm", "bmm")) / 1e6
    return {"texts_per_second": len(texts) / (tokenizing + products / threads), "tokenizing_seconds": tokenizing,
            "product_seconds": products, "product_share": products * 1e6 / sum(spent.values())}  # fmt: skip


def measure_encode(case: dict) -> dict:
    "Texts per second, and vectors for the comparison."
    import numpy as np

    texts = short_texts(case["count"])
    if case["side"] == "ours":
        from bertlab.embeddings.bi_encoder import BiEncoder

        model = BiEncoder.load(case["model"])
        encode = model.encode
    else:
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(case["model"], device="cpu")
        encode = lambda some: model.encode(some, batch_size=case["batch"], show_progress_bar=False)  # noqa: E731
    encode(texts[:200])  # warm
    with busy_loops(int(case.get("busy", False))):
        begin = time.perf_counter()
        vectors = encode(texts)
        seconds = time.perf_counter() - begin
    sample = np.asarray(vectors)[:: max(1, len(texts) // 50)][:50]
    return {
        "texts_per_second": len(texts) / seconds,
        "texts": len(texts),
        "sample": sample.round(8).tolist(),
    }


def training_pairs():
    from bertlab.embeddings.retrieval import load_retrieval_task

    return load_retrieval_task("docstring")


def measure_train(case: dict) -> dict:
    "Pairs per second over the steps after the first two."
    pairs = training_pairs().train
    steps, size = case["steps"], case["batch"]
    if case["side"] == "ours":
        from lightning.pytorch.callbacks import Callback

        from bertlab.embeddings.module import EmbeddingModule
        from bertlab.embeddings.pairs import EmbeddingDataModule
        from bertlab.train.trainer import make_trainer, seed_everything

        class Watch(Callback):
            times: list[float] = []

            def on_train_batch_end(self, *args) -> None:
                self.times.append(time.perf_counter())

        seed_everything(0)
        watch, module = (
            Watch(),
            EmbeddingModule(case["model"], gradcache_rows=CHUNK_ROWS, learning_rate=1e-4),
        )
        data = EmbeddingDataModule(
            module.tokenizer,
            max_sequence_length=LENGTH,
            train_batch_size=size,
            validation_fraction=0,
        )
        data.set_datasets(pairs)
        make_trainer(steps, "32-true", accelerator="cpu", callbacks=[watch]).fit(module, data)
        times = watch.times
    else:
        times = their_training(case, pairs, steps, size)
    return {
        "pairs_per_second": size * (len(times) - 2) / (times[-1] - times[1]),
        "steps": len(times),
    }


def their_training(case: dict, pairs, steps: int, size: int) -> list[float]:
    import datasets
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss
    from transformers import TrainerCallback

    times: list[float] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *args, **kwargs) -> None:
            times.append(time.perf_counter())

    model = SentenceTransformer(case["model"], device="cpu")
    loss = CachedMultipleNegativesRankingLoss(model, scale=20.0, mini_batch_size=case["mini_batch"])
    rows = datasets.Dataset.from_dict({"anchor": pairs.queries, "positive": pairs.positives})
    with tempfile.TemporaryDirectory() as place:
        arguments = SentenceTransformerTrainingArguments(
            place, max_steps=steps, per_device_train_batch_size=size, learning_rate=1e-4, report_to="none", use_cpu=True,
            save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_drop_last=True, weight_decay=0.01,
        )  # fmt: skip
        SentenceTransformerTrainer(
            model, arguments, train_dataset=rows, loss=loss, callbacks=[Watch()]
        ).train()
    return times


def measure_quality(case: dict) -> dict:
    "One seed: train for so many seconds, then the held-out modules, once."
    from lightning.pytorch.callbacks import Timer

    from bertlab.embeddings.bi_encoder import BiEncoder
    from bertlab.embeddings.module import EmbeddingModule
    from bertlab.embeddings.pairs import EmbeddingDataModule
    from bertlab.embeddings.retrieval import (
        EncoderScorer,
        bm25_scores,
        evaluate_retrieval,
        tfidf_scores,
    )
    from bertlab.train.trainer import make_trainer, seed_everything

    task = training_pairs()
    if case["seed"] is None:
        scorers = {
            "BM25": bm25_scores,
            "TF-IDF": tfidf_scores,
            "not trained": EncoderScorer(BiEncoder.load(case["model"])),
        }
        found = evaluate_retrieval(task, scorers)
        return {
            name: {k: float(v.mean()) for k, v in values.items()} for name, values in found.items()
        }
    seed_everything(case["seed"])
    module = EmbeddingModule(
        case["demo"], learning_rate=RATE, temperature=TEMPERATURE, symmetric=True
    )
    data = EmbeddingDataModule(module.tokenizer, max_sequence_length=128, train_batch_size=128, validation_fraction=0,
                               seed=case["seed"])  # fmt: skip
    data.set_datasets(task.train)
    limit = Timer(duration={"seconds": case["seconds"]})
    begin = time.perf_counter()
    trainer = make_trainer(case["steps"], "32-true", accelerator="cpu", callbacks=[limit])
    trainer.fit(module, data)
    seconds = time.perf_counter() - begin
    scores = evaluate_retrieval(task, {"x": EncoderScorer(module.model)})["x"]
    return {**{k: float(v.mean()) for k, v in scores.items()}, "seconds": seconds, "steps": trainer.global_step,
            "finished": trainer.global_step >= case["steps"]}  # fmt: skip


MEASURES = {
    "encode": measure_encode,
    "products": measure_products,
    "train": measure_train,
    "quality": measure_quality,
}


def encode_part(options, ledger, model: dict) -> tuple[dict, list[dict]]:
    import numpy as np

    base = {"part": "encode", **model, "count": 400 if options.quick else None}
    cases = {"bertlab": {**base, "side": "ours"}}
    cases |= {
        f"sentence-transformers, batches of {n}": {**base, "side": "theirs", "batch": n}
        for n in (32, 128)
    }
    show = lambda f: f"{f['texts_per_second']:,.0f} texts/s"  # noqa: E731
    runs = alternate(__file__, cases, options.rounds, options.threads, ledger, show)
    best = max(
        list(cases)[1:],
        key=lambda name: spread(f["texts_per_second"] for f in runs[name])["median"],
    )
    apart = max(float(np.abs(np.array(f["sample"]) - np.array(runs["bertlab"][0]["sample"])).max())
                for found in runs.values() for f in found)  # fmt: skip
    busy = {f"{name}, one core busy": {**cases[name], "busy": True} for name in ("bertlab", best)}
    runs |= alternate(__file__, busy, options.rounds, options.threads, ledger, show)
    alone = {"tokenizing and products alone": {**base, "part": "products"}}
    ceiling = alternate(__file__, alone, options.rounds, options.threads, ledger, show)[
        "tokenizing and products alone"
    ]
    for found in runs.values():
        for figures in found:
            figures.pop("sample")
    ratio = ratios(runs["bertlab"], runs[best], "texts_per_second")
    beside = ratios(*(runs[name] for name in busy), "texts_per_second")
    judged = [judge(f"texts per second over {best}", ratio["median"], at_least=3),
              judge("largest difference of a number", apart, at_most=1e-5)]  # fmt: skip
    return {
        "runs": runs,
        "ratio": ratio,
        "best_of_theirs": best,
        "largest_difference": apart,
        "one_core_busy": beside,
        "products_alone": {
            "runs": ceiling,
            "ratio": ratios(ceiling, runs[best], "texts_per_second"),
        },
    }, judged


def train_part(options, ledger, model: dict) -> tuple[dict, list[dict]]:
    size, steps = (32, 4) if options.quick else (BATCH, 12)
    base = {"part": "train", **model, "steps": steps, "batch": size}
    cases = {"bertlab": {**base, "side": "ours"}}
    cases |= {
        f"sentence-transformers, mini-batches of {n}": {**base, "side": "theirs", "mini_batch": n}
        for n in MINI_BATCHES
    }
    show = lambda f: f"{f['pairs_per_second']:,.1f} pairs/s"  # noqa: E731
    runs = alternate(__file__, cases, options.rounds, options.threads, ledger, show)
    best = max(
        list(cases)[1:],
        key=lambda name: spread(f["pairs_per_second"] for f in runs[name])["median"],
    )
    ratio = ratios(runs["bertlab"], runs[best], "pairs_per_second")
    return {"runs": runs, "ratio": ratio, "best_of_theirs": best}, [
        judge(f"pairs per second over {best}", ratio["median"], at_least=1.5)
    ]


def quality_part(options, ledger, model: dict) -> tuple[dict, list[dict]]:
    seconds, steps = (20, 5) if options.quick else (SECONDS, options.steps)
    base = {"part": "quality", **model, "demo": options.demo, "seconds": seconds, "steps": steps}
    cases = {"baselines": {**base, "seed": None}} | {
        f"seed {n}": {**base, "seed": n} for n in range(1 if options.quick else 3)
    }
    show = lambda f: json.dumps({k: round(v, 3) for k, v in f.items()} if "mrr" in f else f)  # noqa: E731
    runs = alternate(__file__, cases, 1, options.threads, ledger, show)
    baselines = runs.pop("baselines")[0]
    recalls = [found[0]["recall_10"] for found in runs.values()]
    best = max(baselines[name]["recall_10"] for name in ("BM25", "TF-IDF"))
    return {"baselines": baselines, "seeds": runs, "recall_10": spread(recalls)}, [
        judge(
            "recall at 10, least of the seeds, over the better of BM25 and TF-IDF",
            min(recalls) - best,
            at_least=0,
        )
    ]


def draw(result: dict):
    figure, axes = new_axes("", "recall at 10 on held-out modules")
    quality = result["parts"].get("quality")
    if quality is None:
        axes.set_ylabel("times as fast")
        found = {name: part["ratio"]["median"] for name, part in result["parts"].items()}
        axes.bar(list(found), list(found.values()), color=BLUE)
        return figure
    bars = {name: values["recall_10"] for name, values in quality["baselines"].items()}
    axes.bar(list(bars), list(bars.values()), color=[ORANGE, ORANGE, GREY])
    axes.plot(
        ["trained"] * len(quality["seeds"]),
        [s[0]["recall_10"] for s in quality["seeds"].values()],
        "o",
        color=BLUE,
    )
    return figure


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "embeddings", rounds=5, free=["demo"])
    parser.add_argument("demo", nargs="?", help="directory of bertlab demo")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--steps",
        type=int,
        default=300,
        help="of quality, at most; its schedule ends there (default: 300)",
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.case:
        case = json.loads(options.case)
        print(json.dumps(MEASURES[case["part"]](case)))
        return
    if options.demo is None:
        parser.error("name the directory of bertlab demo")
    options.rounds = 1 if options.quick else options.rounds
    place, parts, judged = machine(options.threads), {}, []
    ledger = Ledger(options.kept / "embeddings.json", fingerprint(__file__), options.fresh)
    shared = options.kept / "embeddings-model"
    save_bi_encoder(options.demo, shared)
    model = {"model": str(shared), "weights": hash_of([shared])}  # another demo has other figures
    for name, work in (("encode", encode_part), ("train", train_part), ("quality", quality_part)):
        if name in options.only:
            print(name, flush=True)
            parts[name], found = work(options, ledger, model)
            judged += found
    say(judged)
    write_result(options.output, {
        "what": __doc__.splitlines()[0], "bertlab": bertlab.__version__, "machine": place, "judged": judged,
        "settings": {"max_tokens": LENGTH, "batch": BATCH, "gradcache_rows": CHUNK_ROWS, "rate": RATE}, "parts": parts}, draw)  # fmt: skip


if __name__ == "__main__":
    main()
