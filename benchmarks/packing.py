"""How full packed rows are, and how fast they are planned, beside the rules of other packers.

    python benchmarks/packing.py [--documents 40000]

Every rule gets the same documents in the same order; documents longer than a row are split first.
"""

import time
from collections import deque

import numpy as np
from pretraining import load_text
from sides import common_parser, machine, write_result

import bertlab
from bertlab.core.plots import GREEN, GREY, ORANGE, RED, new_axes
from bertlab.data.packing import pack_best_fit, split_into_windows

COLOURS = {"padding": RED, "next-fit": ORANGE, "ModernBERT": GREY, "bertlab": GREEN}
BATCH = 64  # rows that ModernBERT's packer holds open


def next_fit(lengths: list[int], capacity: int) -> int:
    "Count the rows if a row is closed as soon as a document does not fit."
    rows, used = 1, 0
    for length in lengths:
        if used + length > capacity:
            rows, used = rows + 1, 0
        used += length
    return rows


def greedy_best_fit(lengths: list[int], capacity: int, batch: int = BATCH) -> tuple[int, int]:
    """Count the rows and tokens that ModernBERT's packer gives (src/sequence_packer.py).

    A batch of rows is open at a time. A document goes into the fullest row that has room, or is set
    aside for the next batch of rows. Documents come `batch` at a time while buffer and those set aside
    stay within 5 batches. A batch with an empty row ends it: what is left is never seen.
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


def log_normal(mean: float, count: int) -> np.ndarray:
    draws = np.random.default_rng(0).lognormal(np.log(mean) - 0.5, 1.0, count)
    return draws.astype(np.int64) + 1


def compare(sizes: np.ndarray, capacity: int) -> tuple[dict[str, float], dict[str, int]]:
    "Return the share of positions in use and the tokens placed per second, by packer."
    offsets = np.append(0, np.cumsum(sizes))
    lengths = (split_into_windows(offsets, capacity - 2).lengths + 2).tolist()
    total = sum(lengths)
    packers = {
        "padding": lambda: (len(lengths), total),
        "next-fit": lambda: (next_fit(lengths, capacity), total),
        "ModernBERT": lambda: greedy_best_fit(lengths, capacity),
        "bertlab": lambda: (len(pack_best_fit(lengths, capacity)), total),
    }
    shares, rates = {}, {}
    for name, pack in packers.items():
        start = time.perf_counter()
        rows, tokens = pack()
        rates[name] = round(total / (time.perf_counter() - start))
        shares[name] = round(tokens / (rows * capacity), 5) if rows else 0.0
    return shares, rates


def embedded_lengths() -> np.ndarray:
    "Return the tokens of the embedded corpus's documents, in random order."
    corpus, tokenizer = load_text(8192)
    ids = tokenizer(corpus.train_texts, add_special_tokens=False, verbose=False)["input_ids"]
    return np.random.default_rng(0).permutation(np.array(list(map(len, ids))))


def draw(result: dict):
    "Draw the share of positions that each packer wastes, on a logarithmic scale."
    shares = result["share_of_positions_in_use"]
    figure, axes = new_axes("", "positions wasted (%)", size=(8.5, 4.2))
    for column, (name, colour) in enumerate(COLOURS.items()):
        waste = [100 * (1 - by_packer[name]) for by_packer in shares.values()]
        positions = np.arange(len(shares)) + (column - 1.5) * 0.18
        axes.bar(positions, waste, 0.16, color=colour, label=name)
    axes.set_yscale("log")
    axes.set_xticks(range(len(shares)), [name.replace(", rows", ",\nrows") for name in shares])
    axes.legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    parser = common_parser(__doc__, "packing", rounds=1)
    parser.add_argument("--documents", type=int, default=40_000, help="of the log-normal streams")
    options = parser.parse_args()
    if options.quick:
        options.documents = 2000
    embedded = np.arange(1, 200) if options.quick else embedded_lengths()
    streams = {
        "embedded corpus, rows of 128": (embedded, 128),
        "embedded corpus, rows of 512": (embedded, 512),
        "log-normal, mean 134, rows of 512": (log_normal(134, options.documents), 512),
        "log-normal, mean 560, rows of 1024": (log_normal(560, options.documents), 1024),
    }
    compared = {name: compare(*stream) for name, stream in streams.items()}
    for name, (shares, _) in compared.items():
        print(name, *(f"{packer} {share:.2%}" for packer, share in shares.items()), sep="  ")
    content = {
        "bertlab": bertlab.__version__,
        "machine": machine(1),
        "share_of_positions_in_use": {name: shares for name, (shares, _) in compared.items()},
        "tokens_placed_per_second": {name: rates for name, (_, rates) in compared.items()},
    }
    write_result(options, content, draw)


if __name__ == "__main__":
    main()
