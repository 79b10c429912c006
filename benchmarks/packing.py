"""How full packed rows are, how fast they are planned and built, and what memory that takes.

    python benchmarks/packing.py [--output benchmarks/results/packing.json]

Each stream of lengths is packed by padding, next-fit, the rule of ModernBERT's packer, bertlab's
stream with a buffer of 1,000 documents, and bertlab's plan. Documents longer than a row are split
first, for all of them. A picture is drawn beside the JSON file.
"""

import argparse
import json
import subprocess
import sys
import time
import tracemalloc
from collections import deque
from pathlib import Path

import numpy as np
from sides import machine

import bertlab
from bertlab.data.corpus import embedded_corpus
from bertlab.data.tokenizers import train_tokenizer
from bertlab.core.files import atomic_write
from bertlab.data.packing import (
    EpochShuffle,
    PackedDataset,
    TokenizedDocuments,
    pack_best_fit,
    split_into_windows,
)
from bertlab.core.plots import BLUE, GREEN, GREY, ORANGE, RED, new_axes
from bertlab.data.streaming import BestFitBuffer, PackedStream, StreamWindow

BUFFER, SPECIAL = 1000, {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3}
COLOURS = {
    "padding": RED,
    "next-fit": ORANGE,
    "ModernBERT, batch 64": GREY,
    "ModernBERT, batch 200": GREY,
    "bertlab, stream": BLUE,
    "bertlab, plan": GREEN,
}


def next_fit(lengths: list[int], capacity: int) -> int:
    "Rows needed when a row is closed as soon as a document does not fit."
    rows, used = 1, 0
    for length in lengths:
        if used + length > capacity:
            rows, used = rows + 1, 0
        used += length
    return rows


def greedy_best_fit(lengths: list[int], capacity: int, batch: int) -> tuple[int, int]:
    """Rows and tokens that ModernBERT's packer gives (src/sequence_packer.py, rows of one length).

    A batch of rows is open at a time. A document goes into the fullest row that has room, or is set
    aside. Documents come `batch` at a time, when the buffer is empty, while buffer and those set
    aside stay within 5 batches. Those set aside come first, in reverse, for the next batch of rows.
    A batch with an empty row ends it all: what is left is never seen.
    """
    source, buffer, num_rows, num_tokens, limit = iter(lengths), deque(), 0, 0, 5 * batch
    while True:
        space, aside = np.full(batch, capacity), []
        while True:
            added = 0
            while not buffer or (added and limit - len(buffer) > batch):
                if added + batch > limit - len(aside):
                    break
                arrived = [length for length, _ in zip(source, range(batch))]
                if not arrived:
                    break
                buffer.extend(arrived)
                added += len(arrived)
            if not buffer:
                break
            length = buffer.popleft()
            room = np.where(space >= length, space, capacity + 1)
            best = int(room.argmin())
            if room[best] > capacity:
                aside.append(length)
            else:
                space[best] -= length
        buffer.extendleft(aside)
        if (space == capacity).any():
            return num_rows, num_tokens
        num_rows, num_tokens = num_rows + batch, num_tokens + int((capacity - space).sum())


def stream_rows(lengths: list[int], capacity: int) -> int:
    "Rows of bertlab's buffer, on lengths alone."
    buffer, num_rows, token = BestFitBuffer(capacity), 0, np.zeros(capacity, np.int8)
    for length in lengths:
        buffer.push(StreamWindow(token[:length]))
        if len(buffer) == BUFFER:
            buffer.fill_row()
            num_rows += 1
    return num_rows + len(buffer.plan_rest())


def log_normal(mean: float, num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(np.log(mean) - 0.5, 1.0, num).astype(np.int64) + 1


def compare(sizes: np.ndarray, capacity: int) -> tuple[dict[str, float], dict[str, int]]:
    "Share of positions in use and tokens placed a second, by packer. `sizes` are in the stream's order."
    lengths = (
        split_into_windows(np.append(0, np.cumsum(sizes)), capacity - 2).lengths + 2
    ).tolist()
    total, shares, rates = sum(lengths), {}, {}
    for name in COLOURS:
        start = time.perf_counter()
        if name.startswith("ModernBERT"):
            rows, tokens = greedy_best_fit(lengths, capacity, int(name.split()[-1]))
        else:
            tokens, rows = total, {
                "padding": len, "next-fit": lambda n: next_fit(n, capacity),
                "bertlab, stream": lambda n: stream_rows(n, capacity),
                "bertlab, plan": lambda n: len(pack_best_fit(n, capacity)),
            }[name](lengths)  # fmt: skip
        rates[name] = round(total / (time.perf_counter() - start))
        shares[name] = (
            round(tokens / (rows * capacity), 5) if rows else 0.0
        )  # no full batch of rows
    return shares, rates


def time_planning(num: int = 1_000_000) -> dict[str, float]:
    "Seconds and megabytes for the plan of a million documents, and for the order of an epoch."
    offsets = np.append(0, np.cumsum(log_normal(134, num)))

    def plan() -> tuple[float, float]:
        start = time.perf_counter()
        windows = split_into_windows(offsets, 510)
        order = EpochShuffle(pack_best_fit(windows.lengths + 2, 512), windows.lengths + 2)
        planned = time.perf_counter()
        order(0)
        return planned - start, time.perf_counter() - planned

    plan_seconds, epoch_seconds = plan()
    tracemalloc.start()  # slows down what it watches, so it watches a second run
    plan()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "documents": num,
        "plan_seconds": round(plan_seconds, 2),
        "epoch_seconds": round(epoch_seconds, 2),
        "peak_megabytes": round(peak / 1e6, 1),
    }


def make_stream(num: int, **options) -> PackedStream:
    def source(epoch: int):
        rng = np.random.default_rng(epoch)
        while True:  # chunks, so that making lengths costs next to nothing
            for length in rng.lognormal(np.log(134) - 0.5, 1.0, 1000).astype(int) + 1:
                yield np.zeros(min(length, 5000), np.int32)

    def some(epoch: int):
        return (document for document, _ in zip(source(epoch), range(num)))

    return PackedStream(some, 512, **SPECIAL, **options)


def time_rows(num: int = 30_000) -> dict[str, int]:
    "Tokens a second: of a stream, of the share of one process in eight, and of a plan."
    speeds = {}
    for name, options in {"stream": {}, "stream, 1 of 8 processes": {"world_size": 8}}.items():
        stream, start = make_stream(num, **options), time.perf_counter()
        for _ in stream:
            pass
        tokens = stream.describe()["tokens"]
        speeds[f"{name}, tokens packed"] = round(tokens / (time.perf_counter() - start))
    sizes = log_normal(134, num)
    documents = TokenizedDocuments(np.zeros(sizes.sum(), np.int32), np.append(0, np.cumsum(sizes)))
    dataset, start = PackedDataset(documents, 512, **SPECIAL), time.perf_counter()
    for index in range(len(dataset)):
        dataset[1, index]
    speeds["plan, tokens built"] = round(int(sizes.sum()) / (time.perf_counter() - start))
    return speeds


def stream_memory(num: int) -> float:
    "Peak megabytes of a fresh process that reads a stream of so many documents to its end."
    # VmHWM begins anew with the program; getrusage would hand down the peak of this process.
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parent)!r}); import packing\n"
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        f"for row in packing.make_stream({num}, world_size=1000): pass\nprint(peak())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return round(int(done.stdout) * 1024 / 1e6, 1)


def embedded_lengths() -> np.ndarray:
    "Tokens of the embedded corpus's documents, in their order, with a vocabulary of 8,192."
    texts = embedded_corpus().train_texts
    tokenizer = train_tokenizer(texts, vocab_size=8192)
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return np.array([len(ids) for ids in encoded])


def draw(shares: dict[str, dict[str, float]], path: Path) -> None:
    "One group of bars a stream: the share of positions that is wasted, on a logarithmic scale."
    figure, axes = new_axes("", "positions wasted (%)", size=(8.5, 4.2))
    for place, (name, colour) in enumerate(COLOURS.items()):
        waste = [100 * (1 - by_packer[name]) for by_packer in shares.values()]
        at = np.arange(len(shares)) + (place - 2.5) * 0.13
        axes.bar(
            at, waste, 0.12, color=colour, label=name, alpha=0.5 if name.endswith("200") else 1
        )
    axes.set_yscale("log")
    axes.set_xticks(range(len(shares)), [name.replace(", rows", ",\nrows") for name in shares])
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.2))
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--documents", type=int, default=40_000, help="of the log-normal streams")
    options = parser.parse_args()
    embedded = np.random.default_rng(0).permutation(embedded_lengths())
    streams = {
        "embedded corpus, rows of 128": (embedded, 128),
        "embedded corpus, rows of 512": (embedded, 512),
        "log-normal, mean 134, rows of 512": (log_normal(134, options.documents), 512),
        "log-normal, mean 560, rows of 1024": (log_normal(560, options.documents), 1024),
    }
    compared = {name: compare(*stream) for name, stream in streams.items()}
    shares = {name: share for name, (share, _) in compared.items()}
    for name, by_packer in shares.items():
        print(f"{name} ({len(streams[name][0]):,} documents)")
        print(
            "".join(f"    {packer:24}{share:9.3%}\n" for packer, share in by_packer.items()), end=""
        )
    result = {
        "bertlab": bertlab.__version__,
        "machine": machine(1),
        "documents": {name: len(sizes) for name, (sizes, _) in streams.items()},
        "share_of_positions_in_use": shares,
        "tokens_placed_per_second": {name: rate for name, (_, rate) in compared.items()},
        "planning": time_planning(),
        "tokens_per_second": time_rows(),
        "stream_peak_megabytes": {
            f"{n:,} documents": stream_memory(n) for n in (0, 100_000, 1_000_000)
        },
    }
    print(json.dumps({name: result[name] for name in list(result)[5:]}, indent=2))
    if options.output:
        with atomic_write(options.output) as path:
            Path(path).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        draw(shares, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
