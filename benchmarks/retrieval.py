"""What retrieval gains by training, mined negatives, words beside vectors, and a reranker, on the docstring task.

    python benchmarks/retrieval.py --model DIRECTORY [--seeds 0 1 2] [--epochs 1] [--stages dense mined] [--quick]

Every stage is the real command and begins with the same model; no module of the task's test is in training. The
model is a sentence encoder, such as all-MiniLM-L6-v2; with --quick or without --model it is a tiny one of random
weights. The accuracies of a run do not depend on the machine's load; its seconds do, and its core-seconds less. A
stage that was stopped continues at its last checkpoint. Memory stays below 4 GB: gradients are cached.
"""

import contextlib
import io
import json
import sys
import time
from pathlib import Path

from sides import BUILD, Ledger, common_parser, machine, run_child, spread, write_result

import bertlab

STAGES = "dense", "mined", "reranker", "distilled"  # that are trained, in this order
CHECKPOINT_STEPS = 10
MEASURES = "recall_1", "recall_10", "recall_100", "mrr_10", "ndcg_10"


def command(*words) -> float:  # seconds
    "Run a command of bertlab in this process; its output is shown if it fails."
    from bertlab.cli.main import main

    start, printed = time.perf_counter(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main([*map(str, words)])
    if status:
        raise SystemExit(f"bertlab {' '.join(map(str, words))}\n{printed.getvalue()[-3000:]}")
    return time.perf_counter() - start


def load_task(quick: bool):
    from bertlab.data.corpus import embedded_corpus
    from bertlab.embeddings.retrieval import load_retrieval_task

    return load_retrieval_task("docstring", embedded_corpus(max_documents=800) if quick else None)


def write_tiny_model(directory: Path) -> Path:
    "Write a sentence encoder of random weights."
    import torch

    from bertlab.data.corpus import embedded_corpus
    from bertlab.data.tokenizers import train_tokenizer
    from bertlab.embeddings.bi_encoder import BiEncoder
    from bertlab.model.config import bert_tiny
    from bertlab.model.encoder import BertLabModel

    torch.manual_seed(0)
    tokenizer = train_tokenizer(embedded_corpus(max_documents=800).train_texts, 800)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = bert_tiny(vocab_size=len(tokenizer), num_attention_heads=2, **shape)
    return BiEncoder(BertLabModel(config), tokenizer).save(directory)


def mine(case: dict, folder: Path, name: str, count: int, *words) -> Path:
    "Mine negatives with the model that was trained on pairs alone, once for each such model."
    output = folder / f"{name}-{count}-{case['margin']}.jsonl"
    trained = (folder / "dense" / "model.safetensors").stat().st_mtime
    if output.exists() and output.stat().st_mtime > trained:
        return output
    output.unlink(missing_ok=True)
    limits = ["--num_negatives", count, "--relative_margin", case["margin"]]
    command(
        "embed",
        "mine",
        folder / "pairs.jsonl",
        folder / "dense",
        "--output",
        output,
        *limits,
        *words,
    )
    return output


def start_or_resume(case: dict, output: Path) -> list:
    "Return the options that continue the same case in a directory, or start anew."
    record = output.with_suffix(".case.json")
    is_same = record.exists() and json.loads(record.read_text()) == case
    record.write_text(json.dumps(case))
    return ["--resume"] if is_same and (output / "checkpoints").exists() else ["--overwrite"]


def train(case: dict, folder: Path) -> dict[str, float]:
    "Train one stage by its command, and return its seconds, mining included."
    from bertlab.core.devices import peak_memory_bytes

    stage, output = case["stage"], folder / case["stage"]
    words = ["--model.pretrained_model_name_or_path", case["model"], "--run.output", output,
             "--run.progress", "none", "--run.num_epochs", case["epochs"],
             "--run.checkpoint_every_steps", CHECKPOINT_STEPS, *start_or_resume(case, output)]  # fmt: skip
    start, core_start = time.perf_counter(), time.process_time()
    if stage == "reranker":
        table = mine(case, folder, "labeled", case["labeled_negatives"], "--labeled")
        words += ["--run.seeds", f"[{case['seed']}]", "--run.baselines", "false"]
        words += ["--data.max_sequence_length", case["pair_length"]]
        words += ["--model.problem_type", "regression"]
        words += ["--model.model_kwargs", "{classifier_pooling: mean}"]  # as its vectors
        command("finetune", table, *words)
    else:
        table = folder / "pairs.jsonl"
        if stage != "dense":
            table = mine(case, folder, "mined", case["negatives"])
        if stage == "distilled":
            words += ["--data.teacher", folder / "reranker", "--model.distillation", "kl"]
        words += ["--model.gradcache_rows", case["gradcache_rows"]]
        command("embed", "finetune", table, *words, "--seed_everything", case["seed"])
    seconds, core_seconds = time.perf_counter() - start, time.process_time() - core_start
    return {"seconds": seconds, "core_seconds": core_seconds, "peak_bytes": peak_memory_bytes()}


def fuse_ranks(*scores_QN, k: float = 60):  # -> (Q, N)
    "Combine rankings (reciprocal rank fusion, Cormack et al. 2009, eq. 1); equal scores share a rank."
    from scipy.stats import rankdata

    return sum(1 / (k + rankdata(-scores, "max", axis=1)) for scores in scores_QN)


def character_scores(queries, documents):  # -> (Q, N)
    "Return cosines of TF-IDF vectors of 3 to 5 characters within words."
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), sublinear_tf=True)
    d_NV = vectorizer.fit_transform(documents)
    return (vectorizer.transform(queries) @ d_NV.T).toarray()


def evaluate(case: dict, folder: Path) -> dict[str, dict]:
    "Measure every pipeline on the same queries: system: measure: mean and interval."
    import numpy as np

    from bertlab.cli.embed import load_bi_encoder, load_reranker
    from bertlab.embeddings import retrieval

    task, systems = load_task(case["quick"]), {}
    sides = task.queries, task.documents
    systems["BM25"] = words = retrieval.bm25_scores(*sides)
    systems["TF-IDF"] = retrieval.tfidf_scores(*sides)
    systems["TF-IDF of characters"] = characters = character_scores(*sides)
    models = {"untrained": case["model"]}
    models |= {name: folder / name for name in case["stages"] if name != "reranker"}
    for name, directory in models.items():
        scores = retrieval.similarity_scorer(load_bi_encoder(str(directory)))(*sides)
        systems[name] = scores
        systems[f"{name}, ranks with BM25's"] = fuse_ranks(scores, words)
        for weight in case["words_weights"]:
            fused = retrieval.fuse_scores(scores, words, weight)
            systems[f"{name} + {weight:g} BM25"] = fused
        both = (retrieval.fuse_scores(scores, counts, 0.2) for counts in (words, characters))
        systems[f"{name} + 0.1 BM25 + 0.1 characters"] = sum(both) / 2
    if "reranker" in case["stages"]:
        first_QN = systems[f"dense + {case['words_weights'][0]:g} BM25"]
        best_QK = np.argsort(-first_QN, axis=1, kind="stable")[:, : case["rerank_k"]]
        pairs = [(q, task.documents[n]) for q, best in zip(task.queries, best_QK) for n in best]
        read_QK = load_reranker(str(folder / "reranker")).score(pairs).reshape(best_QK.shape)
        for weight in case["rerank_weights"]:
            first_QK = np.take_along_axis(first_QN, best_QK, 1)
            systems[f"reranked, weight {weight:g}"] = reranked = first_QN - 10  # below the best
            fused_QK = retrieval.fuse_scores(first_QK, read_QK, weight)
            np.put_along_axis(reranked, best_QK, fused_QK, 1)
    results = retrieval.evaluate_retrieval(task, systems)
    for base, name in (("dense", "mined"), ("mined", "distilled")):
        if {base, name} <= systems.keys():
            results |= retrieval.paired_differences(results, base, [name])
    return {
        name: {measure: retrieval.bootstrap_ci(values[measure]) for measure in MEASURES}
        for name, values in results.items()
    }


def run_case(case: dict) -> dict:
    folder = Path(case["folder"])
    return evaluate(case, folder) if case["stage"] == "evaluate" else train(case, folder)


def main() -> None:
    parser = common_parser(__doc__, "retrieval", rounds=1)
    add = parser.add_argument
    add("--model", help="directory of a sentence encoder")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of order and new weights")
    add("--epochs", type=int, default=1, help="of each stage")
    add("--negatives", type=int, default=1, help="mined for each pair, for the vectors")
    add("--labeled_negatives", type=int, default=3, help="mined for each pair, for the reranker")
    add("--margin", type=float, default=0.05, help="share of its positive that a negative is below")
    add("--gradcache_rows", type=int, default=32, help="rows of 128 tokens in memory at once")
    add(
        "--words_weights",
        type=float,
        nargs="+",
        default=[0.3, 0.1, 1],
        help="of BM25's scores beside the vectors'; the reranker reads the best by the first",
    )
    add("--rerank_weights", type=float, nargs="+", default=[0.1, 0.3, 1, 10],
        help="of the reranker's scores beside those of the first search")  # fmt: skip
    add("--pair_length", type=int, default=128, help="tokens of a pair in training")
    add("--rerank_k", type=int, default=20, help="documents that the reranker reads")
    add("--stages", nargs="*", choices=STAGES, default=STAGES, help="that are trained")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(options.case)))
        return
    if "distilled" in options.stages and not {"reranker", "mined"} <= {*options.stages}:
        parser.error("the stage distilled needs mined and reranker")
    folder = BUILD / "retrieval"
    folder.mkdir(parents=True, exist_ok=True)
    if options.quick or options.model is None:
        options.model, options.seeds = str(write_tiny_model(folder / "tiny")), options.seeds[:1]
        options.margin = 0.0  # its cosines are all alike
    names = (
        "model",
        "epochs",
        "negatives",
        "labeled_negatives",
        "margin",
        "gradcache_rows",
        "pair_length",
        "quick",
    )
    shared = {name: getattr(options, name) for name in names}
    measured = {
        name: getattr(options, name)
        for name in ("words_weights", "rerank_weights", "rerank_k", "stages")
    }
    ledger, runs = Ledger("retrieval", options.fresh), {}
    train_pairs = load_task(options.quick).train
    rows = [{"query": row.query, "positive": row.positive} for row in train_pairs.rows()]
    for seed in options.seeds:
        path = folder / ("quick" if options.quick else f"seed-{seed}")
        path.mkdir(exist_ok=True)
        (path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs[seed] = {}
        for stage in (*options.stages, "evaluate"):
            case = {**shared, "stage": stage, "seed": seed, "folder": str(path)}
            case |= measured if stage == "evaluate" else {}
            measure = lambda case=case: run_child(__file__, case, options.threads)
            figures = ledger.get(json.dumps([case, options.threads], sort_keys=True), measure)
            runs[seed][stage] = figures
            print(f"  seed {seed}  {stage:9}", "" if stage == "evaluate" else figures, flush=True)
        for name, values in runs[seed]["evaluate"].items():
            print(f"  {name:22}", *(f"{measure} {values[measure][0]:.3f}" for measure in MEASURES))
    systems = next(iter(runs.values()))["evaluate"]
    means = {
        name: {m: spread(run["evaluate"][name][m][0] for run in runs.values()) for m in MEASURES}
        for name in systems
    }
    shared["model"] = Path(options.model).name
    content = {
        "bertlab": bertlab.__version__,
        "machine": machine(options.threads),
        "settings": shared | measured,
    }
    write_result(options, {**content, "means": means, "seeds": runs})


if __name__ == "__main__":
    sys.exit(main())
