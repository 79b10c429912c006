"""Texts per second of bertlab's backends beside sentence-transformers and transformers.

    python benchmarks/inference.py MODEL [--lengths 30 250 512] [--uses encode classify pairs]

MODEL is a directory that sentence-transformers opens, such as all-MiniLM-L6-v2. Both sides read the
same weights and the same exported files. A classifier and a reranker are made of its encoder with a
head of random weights. Lengths beyond the model's positions are left out. sentence-transformers'
other backends need optimum.
"""

import argparse
import json
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
from sides import BUILD, Ledger, alternate, common_parser, machine, ratios, spreads, write_result

from bertlab.core.devices import default_precision, peak_memory_bytes
from bertlab.data.corpus import load_corpus
from bertlab.data.tokenizers import load_tokenizer
from bertlab.embeddings.bi_encoder import BiEncoder, Reranker
from bertlab.finetuning.predictions import load_predictor
from bertlab.model.huggingface import read_config
from bertlab.train.export import FILES, export_model

FOLDER = BUILD / "inference"
COUNTS = {30: 3000, 250: 400, 512: 150, 8192: 6}  # texts by length
USES = ("encode", "classify", "pairs")
OURS = [("torch", "float32"), ("torch", "bfloat16"), ("openvino", "float32"),
        ("openvino", "bfloat16"), ("openvino", "int8"), ("onnx", "float32"), ("onnx", "int8")]  # fmt: skip
THEIRS = dict(zip(USES, ("sentence-transformers", "transformers pipeline", "CrossEncoder")))


def make_texts(length: int, count: int) -> list[str]:
    "Cut the embedded corpus into texts of about so many tokens."
    rng = np.random.default_rng(0)
    words = cycle(word for text in load_corpus().train_texts for word in text.split())
    sizes = np.maximum(3, rng.normal(length / 1.45, length / 5, count)).astype(int)
    return [" ".join(islice(words, int(size))) for size in sizes]


def prepare(model: str, uses: list[str], backends: list[str]) -> None:
    "Write a classifier and a reranker, and export what is measured."
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    texts, make = make_texts(30, 364), AutoModelForSequenceClassification.from_pretrained
    for use in uses:
        directory = Path(model) if use == "encode" else FOLDER / use
        if not directory.exists():
            head = make(model, num_labels={"classify": 2, "pairs": 1}[use])
            head.save_pretrained(directory)
            load_tokenizer(model).save_pretrained(directory)
        for to in {"openvino", "onnx"} & {*backends}:
            if not (FOLDER / f"{use}-{to}").exists():
                calibration = texts if to == "openvino" else None
                export_model(directory, FOLDER / f"{use}-{to}", to=to, calibration=calibration)


def directory_of(case: dict) -> str:
    "Return the exported directory of a backend, or the model's own."
    if case["backend"] == "torch":
        return case["model"] if case["use"] == "encode" else str(FOLDER / case["use"])
    return str(FOLDER / f"{case['use']}-{case['backend']}")


def ours(case: dict) -> Callable[[list[str]], np.ndarray]:
    "Open bertlab's side of a case."
    directory, runtime = directory_of(case), (case["backend"], case["precision"])
    if case["use"] == "encode":
        model = BiEncoder.load(directory, *runtime)
        model.max_sequence_length = case["max_length"]
        return model.encode
    if case["use"] == "classify":
        predictor = load_predictor(directory, case["max_length"], *runtime)
        return lambda texts: np.array(predictor.scores(texts))
    reranker = Reranker.load(directory, *runtime, case["max_length"])
    return lambda texts: reranker.score(list(zip(texts[::2], texts[1::2])))


def theirs(case: dict) -> Callable[[list[str]], np.ndarray]:
    "Open the other side of a case."
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from transformers import pipeline

    directory, backend, precision = directory_of(case), case["backend"], case["precision"]
    if case["use"] == "classify":
        classify = pipeline("text-classification", directory, device=-1, batch_size=32)
        options = {"truncation": True, "max_length": case["max_length"], "top_k": None}
        second = lambda row: max(row, key=lambda label: label["label"])["score"]
        return lambda texts: np.array([second(row) for row in classify(texts, **options)])
    settings = {"dtype": getattr(torch, precision)} if backend == "torch" else {}
    if backend != "torch":
        name = "int8" if precision == "int8" else "float32"
        settings["file_name"] = FILES[backend][name].rpartition("/")[2]
    if backend == "openvino":
        hint = "f32" if precision == "float32" else "bf16"
        settings["ov_config"] = {"INFERENCE_PRECISION_HINT": hint}
    options = {"backend": backend, "model_kwargs": settings, "device": "cpu"}
    if case["use"] == "encode":
        model = SentenceTransformer(directory, **options)
        model.max_seq_length = case["max_length"]
        return lambda texts: np.asarray(model.encode(texts), np.float32)
    scorer = CrossEncoder(directory, max_length=case["max_length"], **options)
    return lambda texts: scorer.predict(list(zip(texts[::2], texts[1::2])))


def measure(case: dict) -> dict:
    "Time one side on one kind of text; its values are kept for comparison."
    texts = make_texts(case["length"], case["count"])
    compute = {"bertlab": ours}.get(case["side"], theirs)(case)
    compute(texts[: max(4, len(texts) // 10)])
    start = time.perf_counter()
    values = compute(texts)
    rate = len(texts) / (time.perf_counter() - start)
    np.save(FOLDER / f"{case['key']}.npy", np.asarray(values, np.float32))
    return {"texts_per_second": rate, "peak_bytes": peak_memory_bytes()}


def cases_of(use: str, length: int, options: argparse.Namespace) -> dict[str, dict]:
    "Return the cases of all sides, by name."
    count = 12 if options.quick else COUNTS.get(length, max(4, 90_000 // length))
    fields = {"use": use, "length": length, "count": count, "model": str(options.model),
              "max_length": min(2 * length if length < 200 else length, options.positions)}  # fmt: skip
    sides = [("bertlab", *runtime) for runtime in options.runtimes]
    packages = {"openvino": "optimum.intel", "onnx": "optimum.onnxruntime"}
    for backend, precision in options.runtimes:
        is_installed = backend == "torch" or find_spec("optimum") and find_spec(packages[backend])
        if is_installed and (use != "classify" or (backend, precision) == ("torch", "float32")):
            sides.append((THEIRS[use], backend, precision))
    return {
        f"{side} {backend} {precision}": {
            **fields, "side": side, "backend": backend, "precision": precision,
            "key": f"{use}-{length}-{side}-{backend}-{precision}".replace(" ", "-"),
        }
        for side, backend, precision in sides
    }  # fmt: skip


def summarize(use: str, runs: dict[str, list[dict]], cases: dict[str, dict]) -> dict:
    "Return rates, ratios of ours to their default and to their best of equal precision, differences."
    base, rate = f"{THEIRS[use]} torch float32", "texts_per_second"
    load = lambda case: np.load(FOLDER / f"{case['key']}.npy")
    result = {"figures": spreads(runs), "times_default": {}, "times_best": {}, "difference": {}}
    for name, case in cases.items():
        result["difference"][name] = float(np.abs(load(case) - load(cases[base])).max())
        if case["side"] != "bertlab":
            continue
        result["times_default"][name] = ratios(runs[name], runs[base], rate)
        equal = [other for other, theirs in cases.items() if theirs["side"] != "bertlab"
                 and theirs["precision"] == case["precision"]]  # fmt: skip
        if equal:
            best = max(equal, key=lambda other: result["figures"][other][rate]["median"])
            result["times_best"][name] = {"of": best, **ratios(runs[name], runs[best], rate)}
    return result


def main() -> None:
    parser = common_parser(__doc__, "inference", rounds=5)
    add, lengths, backends = (
        parser.add_argument,
        [30, 250, 512, 8192],
        ["torch", "openvino", "onnx"],
    )
    add("model", nargs="?", help="directory of a bi-encoder")
    add("--lengths", type=int, nargs="*", default=lengths, help="tokens, about")
    add("--uses", nargs="*", default=list(USES), choices=USES, help="(default: all)")
    add("--backends", nargs="*", default=backends, choices=backends, help="(default: all)")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case)))
        return
    if options.model is None:
        parser.error("name the directory of a model")
    options.rounds = 1 if options.quick else options.rounds
    FOLDER.mkdir(parents=True, exist_ok=True)
    options.positions = read_config(options.model).max_position_embeddings
    has_bfloat16 = default_precision("cpu")[0] == "bf16-mixed"
    options.runtimes = [
        (backend, precision) for backend, precision in OURS
        if backend in options.backends and (has_bfloat16 or precision != "bfloat16")
    ]  # fmt: skip
    prepare(options.model, options.uses, options.backends)
    ledger, compared = Ledger("inference", options.fresh), {}
    for use in options.uses:
        for length in (
            n for n in options.lengths[: 1 if options.quick else None] if n <= options.positions
        ):
            print(f"{use}, {length} tokens", flush=True)
            cases, show = (
                cases_of(use, length, options),
                lambda f: f"{f['texts_per_second']:8.1f}/s",
            )
            runs = alternate(__file__, cases, options, ledger, show)
            compared[f"{use}, {length} tokens"] = summarize(use, runs, cases)
    names = ("sentence-transformers", "openvino", "onnxruntime")
    versions = {name: version(name) for name in names if find_spec(name.replace("-", "_"))}
    write_result(options, {"machine": machine(options.threads) | versions, "compared": compared})


if __name__ == "__main__":
    main()
