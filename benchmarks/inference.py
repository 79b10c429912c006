"""Texts per second of bertlab's backends beside sentence-transformers and transformers.

    python benchmarks/inference.py MODEL [--lengths 30 250 512] [--uses encode classify pairs]
                                   [--others PYTHON]

MODEL is a directory that sentence-transformers opens, such as all-MiniLM-L6-v2. Both sides read the
same weights and the same exported files. A classifier and a reranker are made of its encoder with a
head of random weights. Lengths beyond the model's positions are left out. sentence-transformers'
other backends need optimum, which needs an older transformers than bertlab: --others names the Python
of an environment that has them.

A process of each package takes its backends in turns, and the packages take turns, too. On a machine
that others use, seconds of the clock say little: --cpu_time counts those of the processor, on one core.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "benchmarks" / "inference"
COUNTS = {30: 1500, 250: 200, 512: 100, 8192: 4}  # texts by length
USES = ("encode", "classify", "pairs")
OURS = [("torch", "float32"), ("torch", "bfloat16"), ("openvino", "float32"),
        ("openvino", "bfloat16"), ("openvino", "int8"), ("onnx", "float32"), ("onnx", "int8")]  # fmt: skip
THEIRS = dict(zip(USES, ("sentence-transformers", "transformers pipeline", "CrossEncoder")))
# Names of files that others open; `bertlab.train.export.FILES` has them, too.
NAMES = {
    ("openvino", "float32"): "openvino_model.xml",
    ("openvino", "bfloat16"): "openvino_model.xml",
    ("openvino", "int8"): "openvino_model_qint8_quantized.xml",
    ("onnx", "float32"): "model.onnx",
    ("onnx", "int8"): "model_quantized.onnx",
}


def make_texts(length: int, count: int) -> list[str]:
    "Cut the embedded corpus into texts of about so many tokens."
    rng = np.random.default_rng(0)
    from itertools import cycle, islice

    from bertlab.data.corpus import load_corpus

    words = cycle(word for text in load_corpus().train_texts for word in text.split())
    sizes = np.maximum(3, rng.normal(length / 1.45, length / 5, count)).astype(int)
    return [" ".join(islice(words, int(size))) for size in sizes]


def prepare(model: str, uses: list[str], backends: list[str]) -> None:
    "Write a classifier and a reranker, and export what is measured."
    from transformers import AutoModelForSequenceClassification

    from bertlab.data.tokenizers import load_tokenizer
    from bertlab.train.export import export_model

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
    from bertlab.embeddings.bi_encoder import BiEncoder, Reranker
    from bertlab.finetuning.predictions import load_predictor

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
        settings["file_name"] = NAMES[backend, precision]
    if backend == "openvino":
        hint = "bf16" if case["has_bfloat16"] and precision != "float32" else "f32"
        settings["ov_config"] = {"INFERENCE_PRECISION_HINT": hint}
    options = {"backend": backend, "model_kwargs": settings, "device": "cpu"}
    if case["use"] == "encode":
        model = SentenceTransformer(directory, **options)
        model.max_seq_length = case["max_length"]
        return lambda texts: np.asarray(model.encode(texts), np.float32)
    scorer = CrossEncoder(directory, max_length=case["max_length"], **options)
    return lambda texts: scorer.predict(list(zip(texts[::2], texts[1::2])))


def measure(package: dict) -> list[list[dict]]:  # figures of each turn, by case
    "Time the cases of a package in turns on the same texts; values are kept for comparison."
    texts = json.loads(Path(package["texts"]).read_text(encoding="utf-8"))
    if package["cpu_time"]:  # threads that spin while they wait would count
        os.sched_setaffinity(0, {os.getpid() % os.cpu_count()})
    clock = time.process_time if package["cpu_time"] else time.perf_counter
    opened = [ours if case["side"] == "bertlab" else theirs for case in package["cases"]]
    computes = [open_side(case) for open_side, case in zip(opened, package["cases"])]
    rates: list[list[float]] = [[] for _ in computes]
    for n in range(1 + package["turns"]):  # the first is for warming up
        for compute, case, of_case in zip(computes, package["cases"], rates):
            start = clock()
            values = compute(texts[: max(4, len(texts) // 10)] if n == 0 else texts)
            of_case += [len(texts) / (clock() - start)] * (n > 0)
            if n == 1:
                np.save(FOLDER / f"{case['key']}.npy", np.asarray(values, np.float32))
    return [[{"texts_per_second": rate} for rate in of_case] for of_case in rates]


def cases_of(use: str, length: int, options: argparse.Namespace) -> dict[str, dict]:
    "Return the cases of all sides, by name."
    fields = {"use": use, "length": length, "model": str(options.model),
              "has_bfloat16": options.has_bfloat16,
              "max_length": min(2 * length if length < 200 else length, options.positions)}  # fmt: skip
    sides = [("bertlab", *runtime) for runtime in options.runtimes]
    for backend, precision in options.runtimes:
        is_installed = backend == "torch" or options.others
        if is_installed and (use != "classify" or (backend, precision) == ("torch", "float32")):
            sides.append((THEIRS[use], backend, precision))
    return {
        f"{side} {backend} {precision}": {
            **fields, "side": side, "backend": backend, "precision": precision,
            "key": f"{use}-{length}-{side}-{backend}-{precision}".replace(" ", "-"),
        }
        for side, backend, precision in sides
    }  # fmt: skip


def run_package(
    cases: dict[str, dict], options: argparse.Namespace, count: int
) -> dict[str, list[dict]]:
    "Measure the cases of one package in a process of their own, by name."
    from sides import environment

    (length,), package = {case["length"] for case in cases.values()}, {"cases": [*cases.values()]}
    path = FOLDER / f"texts-{length}.json"
    path.write_text(json.dumps(make_texts(length, count)), encoding="utf-8")
    package |= {"texts": str(path), "cpu_time": options.cpu_time, "turns": options.turns}
    is_ours = all(case["side"] == "bertlab" for case in cases.values())
    python = sys.executable if is_ours or not options.others else options.others
    done = subprocess.run(
        [python, __file__, "--case", json.dumps(package)],
        env=environment(options.threads), capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{[*cases]} failed:\n{done.stderr[-3000:]}")
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1])))


def take_turns(
    use: str, length: int, cases: dict[str, dict], options: argparse.Namespace
) -> dict[str, list[dict]]:  # figures of each round, by name
    "Measure both packages in turns."
    from sides import in_turns

    count = options.count or COUNTS.get(length, max(4, 90_000 // length))
    runs: dict[str, list[dict]] = {name: [] for name in cases}
    is_ours = [name for name in cases if name.startswith("bertlab ")]
    packages = {"ours": is_ours, "theirs": [name for name in cases if name not in is_ours]}
    for n, package in in_turns(packages, options.rounds):
        figures = run_package({name: cases[name] for name in packages[package]}, options, count)
        for name, rows in figures.items():
            rates = " ".join(f"{row['texts_per_second']:8.1f}/s" for row in rows)
            print(f"  {n + 1}/{options.rounds} {name:44} {rates}", flush=True)
            runs[name] += rows
    return runs


def summarize(use: str, runs: dict[str, list[dict]], cases: dict[str, dict]) -> dict:
    "Return rates, ratios of ours to their default and to their best of equal precision, differences."
    from sides import ratios, spreads

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


def _versions(options: argparse.Namespace) -> dict[str, str]:
    "Return the versions of the runtimes, and of the others' packages."
    script = (
        "import json, sys; from importlib.metadata import version\n"
        "print(json.dumps({n: version(n) for n in sys.argv[1:]}))"
    )
    names = ["sentence-transformers", "openvino", "onnxruntime", "transformers"]
    names += ["optimum", "optimum-intel"] * bool(options.others)
    command = [options.others or sys.executable, "-c", script, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
    return {f"{name} of the others": value for name, value in json.loads(done.stdout).items()}


def main() -> None:
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(measure(json.loads(sys.argv[2]))))
        return
    from sides import common_parser, machine, write_result

    from bertlab.core.devices import default_precision
    from bertlab.model.huggingface import read_config

    parser, backends = common_parser(__doc__, "inference", rounds=5), ["torch", "openvino", "onnx"]
    add = parser.add_argument
    add("model", nargs="?", help="directory of a bi-encoder")
    add("--lengths", type=int, nargs="*", default=[30, 250, 512, 8192], help="tokens, about")
    add("--uses", nargs="*", default=list(USES), choices=USES, help="(default: all)")
    add("--backends", nargs="*", default=backends, choices=backends, help="(default: all)")
    add("--others", help="Python of an environment with sentence-transformers and optimum")
    add("--cpu_time", action="store_true", help="count seconds of the processor, not of the clock")
    add("--turns", type=int, default=1, help="of each backend in a process (default: 1)")
    add("--count", type=int, help="texts (default: by length)")
    options = parser.parse_args()
    if options.model is None:
        parser.error("name the directory of a model")
    if options.quick:
        options.rounds, options.count, options.lengths = 1, 12, options.lengths[:1]
    FOLDER.mkdir(parents=True, exist_ok=True)
    options.positions = read_config(options.model).max_position_embeddings
    options.has_bfloat16 = default_precision("cpu")[0] == "bf16-mixed"
    options.runtimes = [
        (backend, precision) for backend, precision in OURS
        if backend in options.backends and (options.has_bfloat16 or precision != "bfloat16")
    ]  # fmt: skip
    prepare(options.model, options.uses, options.backends)
    compared = {}
    for use in options.uses:
        for length in (n for n in options.lengths if n <= options.positions):
            print(f"{use}, {length} tokens", flush=True)
            cases = cases_of(use, length, options)
            runs = take_turns(use, length, cases, options)
            compared[f"{use}, {length} tokens"] = summarize(use, runs, cases)
    shared = "of the processor, on one core: other programs used the machine"
    seconds = shared if options.cpu_time else "of the clock"
    result = {"machine": machine(options.threads) | _versions(options), "seconds": seconds}
    write_result(options, result | {"compared": compared})


if __name__ == "__main__":
    main()
