"""What a cache of a billion tokens costs to open and to plan, and what a second process gives to tokenizing.

    python benchmarks/shards.py [--tokens 1000000000] [--megabytes 40] [--skip-tokenizing | --skip-cache]

Each figure is taken in a process of its own. Open: until `load_tokens` returns. First batch: from the start of opening
until 32 rows of 128 are there, in a directory where no row was ever counted ("first time") and again ("after that").
Memory: the largest resident size of that process, and what is its own (not shared pages of files). Tokenizing: the same
embedded text, repeated to a size, by `tokenize_dataset` with 1 and 2 processes in turns, the median of three. One terabyte
on paper: from the tokens per second of processor time of one process, which is what a core gives that nobody shares.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from sides import BenchmarkParser, machine, write_result

READ = """
import json, resource, sys, time
from bertlab.data.shards import BlockedDataset, load_tokens
def own():
    lines = open("/proc/self/smaps_rollup").read().splitlines()[1:]
    found = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return (found["Private_Clean"] + found["Private_Dirty"]) / 1024
before = own()
start = time.perf_counter()
documents = load_tokens(sys.argv[1])
opened = time.perf_counter()
rows = BlockedDataset(documents, 128, pad_token_id=0, cls_token_id=2, sep_token_id=3)
rows.build([(0, n) for n in range(32)])
batch = time.perf_counter()
for n in range(0, 100_000, 32):
    rows.build([(0, n + k) for k in range(32)])
later = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"open_s": opened - start, "first_batch_s": batch - start, "rows": len(rows),
    "rows_per_s_after": 100_000 / (later - batch), "largest_resident_mb": peak, "own_mb": own(),
    "own_before_mb": before, "efficiency": rows.efficiency}))
"""

TOKENIZE = """
import json, os, sys, time
from bertlab.data.tokenize import tokenize_dataset
processor = lambda: sum(os.times()[:4])  # of this process and of workers that have ended
start, before = time.perf_counter(), processor()
manifest = tokenize_dataset(sys.argv[1], sys.argv[2], sys.argv[3], workers=int(sys.argv[4]), progress=False)
print(json.dumps({"seconds": time.perf_counter() - start, "processor_seconds": processor() - before,
    "tokens": manifest["tokens"]}))
"""


def in_process(code: str, *words: str, **variables: str) -> dict:
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True,
                          env={**os.environ, **variables})  # fmt: skip
    return json.loads(done.stdout.strip().splitlines()[-1])


def repeated(directory: Path, num_tokens: int) -> dict:
    "Shards of so many tokens: the same million documents' lengths and ids, over and over."
    from bertlab.data.shards import finish_shards, write_part

    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5.5, 1, 4000).astype(np.int64)
    ids = rng.integers(5, 4096, lengths.sum()).astype(np.int32)
    parts = 4
    times = -(-num_tokens // len(ids) // parts)
    start = time.perf_counter()
    for part in range(parts):
        write_part(
            directory,
            part,
            lambda first: ((ids, lengths) for _ in range(times)),
            "repeated",
            "uint16",
        )
    manifest = finish_shards(directory, parts, "repeated")
    return {
        "tokens": manifest["tokens"],
        "documents": manifest["documents"],
        "shards": len(manifest["shards"]),
        "blocks": manifest["blocks"]["count"],
        "write_s": time.perf_counter() - start,
    }


def tokenizing(folder: Path, megabytes: float) -> dict:
    "Seconds of 1 and 2 processes on the same files, each way three times in turn."
    from bertlab.data.corpus import embedded_corpus
    from bertlab.data.tokenizers import train_tokenizer

    texts = embedded_corpus().train_texts
    train_tokenizer(texts, 4096).save_pretrained(folder / "tokenizer")
    text = "\n".join(json.dumps({"text": one}) for one in texts) + "\n"
    (folder / "text").mkdir()
    # As many files for each size: parts are what processes share out.
    copies = max(1, round(megabytes * 1e6 / len(text) / 8))
    for n in range(8):
        (folder / "text" / f"{n}.jsonl").write_text(text * copies)
    # A tokenizer has threads of its own, so that one process is more than one core.
    ways = {"1 process of one thread": (1, {"RAYON_NUM_THREADS": "1"}), "1 process": (1, {}),
            "2 processes": (2, {}), "2 processes of one thread": (2, {"RAYON_NUM_THREADS": "1"})}  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(3):
        for name, (workers, variables) in ways.items():
            target = folder / f"out-{round_}-{name.replace(' ', '-')}"
            places = (str(folder / "text"), str(folder / "tokenizer"), str(target), str(workers))
            found = in_process(TOKENIZE, *places, **variables)
            seconds[name].append(found["seconds"])
            processor[name].append(found["processor_seconds"])
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    one = "1 process of one thread"
    return {
        "megabytes": len(text) * copies * 8 / 1e6,
        "tokens": found["tokens"],
        "seconds": seconds,
        "processor_seconds": processor,
        "tokens_per_processor_second": found["tokens"] / statistics.median(processor[one]),
        "tokens_per_s_of_one": found["tokens"] / middle[one],
        "times_as_fast": middle[one]
        / min(middle["2 processes"], middle["2 processes of one thread"]),
    }


CORES = 16  # of each machine on paper


def on_paper(tokens_per_s: float, bytes_per_token: float) -> dict:
    "Hours for 1 TB of text on machines of 16 cores, if cores are the bottleneck, and the rate that storage must give."
    found = {}
    for machines in (1, 16, 256):
        rate = tokens_per_s * CORES * machines
        read = rate * bytes_per_token / 1e6
        found[machines] = {
            "hours": 1e12 / bytes_per_token / rate / 3600,
            "read_mb_per_s": read,
            "read_mb_per_s_of_each": read / machines,
            "write_mb_per_s": rate * 2 / 1e6,
        }
    return found


def main() -> None:
    parser = BenchmarkParser("shards", free=["skip_cache"], description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000_000)
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--skip-tokenizing", action="store_true")
    parser.add_argument(
        "--skip-cache", action="store_true", help="keep the cache's figures of the run before"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a hundredth of the tokens, to see that it runs"
    )
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.megabytes = options.tokens // 100, min(options.megabytes, 2)
    kept = json.loads(options.output.read_text()) if options.skip_cache and options.output else {}
    result = {**kept, "python": platform.python_version(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0],
              "machine": machine(threads=1)}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "shards")
        if not options.skip_cache:
            result["cache"] = repeated(directory, options.tokens)
            result["first_time"] = in_process(READ, str(directory))
            result["after_that"] = in_process(READ, str(directory))
        if not options.skip_tokenizing:
            found = result["tokenizing"] = tokenizing(Path(folder), options.megabytes)
            rate = found["tokens_per_processor_second"]
            result["one_terabyte"] = on_paper(rate, found["megabytes"] * 1e6 / found["tokens"])
    result["load_after"] = os.getloadavg()[0]
    write_result(options.output, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
