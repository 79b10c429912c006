"""What a practitioner does in an afternoon: every step is the real command, and its score is compared with a baseline.

    python benchmarks/practitioner.py [--quick] [--steps N]

The text is the documentation and the code of this Python; intents, pairs and questions are made from templates.
The commands run in the environment that users have, in build/benchmarks/practitioner, and their output is kept
beside what they wrote. The script ends with 1 if a command fails or a score is below its baseline.
"""

import csv
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from sides import BUILD, ROOT, common_parser, machine, write_result

import bertlab

FOLDER = BUILD / "practitioner"
OF_BENCHMARKS = "TOKENIZERS_PARALLELISM", "PYTHONWARNINGS", "HF_HUB_OFFLINE", "IN_TEST"
ACTIONS = {  # in a request, and in its answer
    "open": "set up", "close": "end", "start": "begin", "stop": "halt", "order": "buy",
    "cancel": "call off", "move": "shift", "check": "inspect",
}  # fmt: skip
OBJECTS = {"account": "customer record", "delivery": "shipment", "ticket": "support case",
           "meeting": "appointment", "invoice": "bill"}  # fmt: skip
REQUESTS = (  # an action, an object, a name, and an action that is not meant
    "please {0} the {1} for {2}", "can you {0} my {1} on {2}", "i want to {0} a {1} with {2}",
    "{0} the {1} of {2}, do not {3} it", "do not {3} the {1}, {0} it for {2}",
    "{2} said {3}, but i would {0} that {1}", "before you {3} it for {2}, {0} the {1}",
)  # fmt: skip
NAMES = "anna", "ben", "monday", "carla", "the bank", "david", "friday", "my sister", "eve"
FACTS = {"price": "how much does the {} cost?", "owner": "to whom does the {} belong?",
         "weight": "how heavy is the {}?", "maker": "who built the {}?",
         "room": "where does the {} stand?"}  # fmt: skip
THINGS = "lamp", "chair", "table", "clock", "vase", "mirror", "carpet", "shelf"


class Step(NamedTuple):
    "A command, and how its result is judged."

    name: str
    words: str  # after `bertlab`
    score: Callable[
        [str], tuple[str, float, float]
    ]  # of what was printed: measure, score, baseline


# --- files that people have -----------------------------------------------------------------------


def take(texts: Iterable[str], size: int) -> str:
    "Join texts by empty lines, up to a number of characters."
    parts = []
    for text in texts:
        size -= len(text)
        if size < 0:
            break
        parts.append(text)
    return "\n\n".join(parts) + "\n"


def write_csv(path: Path, rows: list[dict]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def requests(count: int, seed: int) -> list[dict]:
    "Make requests with one of 40 intents; half of them name an action that is not meant."
    generator, rows = random.Random(seed), []
    for _ in range(count):
        action, item = generator.choice(list(ACTIONS)), generator.choice(list(OBJECTS))
        other = generator.choice([name for name in ACTIONS if name != action])
        words = action, item, generator.choice(NAMES), other
        text = generator.choice(REQUESTS).format(*words)
        rows.append({"text": text, "label": f"{action} {item}"})
    return rows


def first_of_each(rows: list[dict], count: int) -> list[dict]:
    "Return the first rows of each label."
    seen, first = Counter(), []
    for row in rows:
        seen[row["label"]] += 1
        first += [row] * (seen[row["label"]] <= count)
    return first


def answer_to(intent: str) -> str:
    "Answer a request of an intent in other words."
    action, item = intent.split()
    return f"our staff will {ACTIONS[action]} the {OBJECTS[item]} within one day"


def scored_pairs(count: int, seed: int) -> list[dict]:
    "Pair requests with answers; the score is the share of action and object that they have in common."
    generator, rows = random.Random(seed), []
    for request in requests(count, seed):
        action, item = request["label"].split()
        other = (
            generator.choice((action, generator.choice(list(ACTIONS)))),
            generator.choice((item, generator.choice(list(OBJECTS)))),
        )
        score = ((action == other[0]) + (item == other[1])) / 2
        answer = answer_to(" ".join(other))
        rows.append({"sentence1": request["text"], "sentence2": answer, "score": score})
    return rows


def questions(count: int, seed: int) -> list[dict]:
    "Ask for one fact of a short description, in other words than its own, in the form of SQuAD."
    generator, rows = random.Random(seed), []
    for _ in range(count):
        thing, facts = generator.choice(THINGS), generator.sample(list(FACTS), 3)
        fact, context = generator.choice(facts), f"this is a {thing}."
        for name in facts:
            value = generator.choice(NAMES)
            context += f" its {name} is "
            if name == fact:
                answers = {"text": [value], "answer_start": [len(context)]}
            context += f"{value}."
        question = FACTS[fact].format(thing)
        rows.append({"question": question, "context": context, "answers": answers})
    return rows


def write_files(folder: Path, quick: bool) -> None:
    "Write the texts, tables and questions that the commands read."
    from bertlab.data.corpus import embedded_corpus
    from bertlab.finetuning.builtin import load_builtin_dataset, stdlib_functions

    size, count = (60_000, 280) if quick else (300_000, 1200)
    documents = embedded_corpus(validation_fraction=0).train_texts
    code = (function.code for function in stdlib_functions())
    (folder / "docs.txt").write_text(take(documents, size), encoding="utf-8")
    (folder / "code.txt").write_text(take(code, size // 2), encoding="utf-8")
    splits = {"train": count, "dev": count // 4, "test": count // 4}
    tags = load_builtin_dataset("code-tokens", sizes={"train": count // 2, "validation": count // 8,
                                                      "test": count // 8})  # fmt: skip
    by_split = zip(splits.items(), (tags.train, tags.validation, tags.test))
    for seed, ((split, rows), tagged) in enumerate(by_split):
        asked = requests(rows, seed)
        write_csv(folder / f"intents-{split}.csv", asked)
        if split == "train":
            write_csv(folder / "few.csv", first_of_each(asked, 8))
        answers = [{"query": row["text"], "answer": answer_to(row["label"])} for row in asked]
        write_csv(folder / f"answers-{split}.csv", answers)
        write_jsonl(folder / f"similar-{split}.jsonl", scored_pairs(rows, seed))
        write_jsonl(folder / f"questions-{split}.jsonl", questions(rows, seed))
        tagged = [{"tokens": row["text"], "tags": row["label"]} for row in tagged]
        write_jsonl(folder / f"tags-{split}.jsonl", tagged)
    faq = [f"{action} {item}" for action in ACTIONS for item in OBJECTS]
    (folder / "faq.txt").write_text("\n".join(map(answer_to, faq)) + "\n", encoding="utf-8")


# --- scores ---------------------------------------------------------------------------------------


def metrics_of(run: str) -> dict:
    return json.loads((FOLDER / run / "metrics.json").read_text(encoding="utf-8"))


def language_model(run: str) -> tuple[str, float, float]:
    metrics = metrics_of(run)
    return "val_loss", metrics["val_loss"], metrics["unigram_entropy"]


def finetuned(run: str) -> tuple[str, float, float]:
    "Compare a run's score on the test split with its best baseline."
    metrics = metrics_of(run)
    name = metrics["monitor"].replace("val_", "test_")
    baselines = [scores[name] for scores in metrics["baselines"].values() if name in scores]
    chance = 0.1 if name.endswith("spearman") else 0.0
    return name, metrics["mean"][name], max(chance, *baselines)


def predicted() -> tuple[str, float, float]:
    "Score the predictions of a labelled file, beside the score of the run's own test."
    with open(FOLDER / "predicted.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    accuracy = sum(row["predicted_label"] == row["label"] for row in rows) / len(rows)
    return "accuracy", accuracy, finetuned("intents")[2]


def embedded(run: str, measure: str) -> tuple[str, float, float]:
    metrics = metrics_of(run)
    return measure, metrics[measure], max(b[measure] for b in metrics["baselines"].values())


def searched(printed: str, queries: list[dict]) -> tuple[str, float, float]:
    "Count the queries whose first hit is their answer; the baseline is BM25."
    from bertlab.embeddings.retrieval import bm25_scores

    lines = [json.loads(line) for line in printed.splitlines()]
    faq = (FOLDER / "faq.txt").read_text(encoding="utf-8").splitlines()
    best = bm25_scores([row["query"] for row in queries], faq).argmax(1)
    share = lambda found: (
        sum(text == row["answer"] for text, row in zip(found, queries)) / len(queries)
    )
    return "first hit", share([line["text"] for line in lines]), share([faq[n] for n in best])


def carded(printed: str, baseline: str) -> tuple[str, float, float]:
    "Count what a reader looks for in the card whose path was printed."
    text = (FOLDER / printed.strip()).read_text(encoding="utf-8")
    parts = "pipeline_tag:", "tags:", "model-index:", baseline
    return "parts of card", sum(part in text for part in parts), len(parts)


def plan(quick: bool, steps: int) -> list[Step]:
    "Return the steps of the afternoon, in order."
    short = " --run.num_epochs 1" * quick
    tasks = {"intents": ("csv", ""), "tags": ("jsonl", " --model.task token_classification"),
             "similar": ("jsonl", " --model.task regression"),
             "questions": ("jsonl", " --model.task question_answering")}  # fmt: skip
    listed = [
        Step("pretrain", f"pretrain docs.txt --trainer.max_steps {steps} --run.output base",
             lambda _: language_model("base")),
        Step("continue", "pretrain code.txt --model.pretrained_model_name_or_path base "
             f"--trainer.max_steps {steps // 3} --run.output continued",
             lambda _: language_model("continued")),
    ]  # fmt: skip
    for name, (suffix, options) in tasks.items():
        files = " ".join(f"{name}-{split}.{suffix}" for split in ("train", "dev", "test"))
        words = f"finetune {files} --model.pretrained_model_name_or_path base{options}{short} --run.output {name}"
        listed.append(Step(name, words, lambda _, name=name: finetuned(name)))
    with open(FOLDER / "answers-test.csv", newline="", encoding="utf-8") as file:
        queries = list(csv.DictReader(file))[:40]
    asked = shlex.join(row["query"] for row in queries)
    vectors = "--model.pretrained_model_name_or_path base --data.validation_name_or_path"
    few = "finetune few.csv intents-dev.csv intents-test.csv --run.method probe --run.output few"
    return listed + [
        Step("few labels", f"{few} --model.pretrained_model_name_or_path base", lambda _: finetuned("few")),
        Step("predict", "predict intents intents-test.csv --output predicted.csv --overwrite",
             lambda _: predicted()),
        Step("embed finetune", f"embed finetune answers-train.csv {vectors} answers-dev.csv{short} "
             "--run.output vectors", lambda _: embedded("vectors", "val_mrr")),
        Step("embed scored", f"embed finetune similar-train.jsonl {vectors} similar-dev.jsonl{short} "
             "--run.output scored", lambda _: embedded("scored", "val_spearman")),
        Step("embed encode", "embed encode vectors faq.txt --sample_by line --output index --overwrite",
             lambda printed: ("texts", int(re.match(r"([\d,]+) texts", printed)[1]), 40)),
        Step("embed search", f"embed search vectors index {asked} --top_k 1 --as_json",
             lambda printed: searched(printed, queries)),
        *(Step(f"card {name}", f"card {name}", lambda printed, baseline=baseline: carded(printed, baseline))
          for name, baseline in (("base", "unigrams"), ("intents", "bag of words"), ("vectors", "BM25"))),
    ]  # fmt: skip


# --- the afternoon --------------------------------------------------------------------------------


def run_step(step: Step) -> dict:
    "Run a command as a user does, keep what it prints, and judge what it wrote."
    environment = {k: v for k, v in os.environ.items() if k not in OF_BENCHMARKS}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "bertlab.cli", *shlex.split(step.words)]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    log = FOLDER / f"{step.name.replace(' ', '-')}.log"
    log.write_text(f"$ bertlab {step.words}\n{done.stdout}{done.stderr}", encoding="utf-8")
    if done.returncode:
        print(f"{done.stdout[-1500:]}{done.stderr[-1500:]}", file=sys.stderr)
        measure, score, baseline, is_good = "exit code", done.returncode, 0, False
    else:
        measure, score, baseline = step.score(done.stdout)
        is_good = score < baseline if measure.endswith("loss") else score >= baseline
    return {"step": step.name, "command": f"bertlab {step.words}"[:200], "seconds": round(seconds, 1),
            "measure": measure, "score": round(score, 4), "baseline": round(baseline, 4),
            "ok": is_good}  # fmt: skip


def main() -> int:
    parser = common_parser(__doc__, "practitioner", rounds=1)
    parser.add_argument("--steps", type=int, default=300, help="of the pretraining (default: 300)")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    where = machine(options.threads)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    write_files(FOLDER, options.quick)
    rows = []
    for step in plan(options.quick, 6 if options.quick else options.steps):
        row = run_step(step)
        rows.append(row)
        sign = "ok" if row["ok"] else "BELOW ITS BASELINE"
        print(f"{row['step']:15} {row['seconds']:7.1f} s  {row['measure']:15} {row['score']:8.3f}  "
              f"baseline {row['baseline']:8.3f}  {sign}", flush=True)  # fmt: skip
    write_result(options, {"bertlab": bertlab.__version__, "machine": where, "steps": rows})
    failed = [row for row in rows if row["measure"] == "exit code"]
    return int(bool(failed if options.quick else [row for row in rows if not row["ok"]]))


if __name__ == "__main__":
    sys.exit(main())
