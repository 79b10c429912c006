"""Peak memory of a training step beside transformers' model, as the vocabulary grows.

    python benchmarks/memory.py [--vocabularies 4096 30522 128000]

One step (forward, backward, AdamW) of the small shape on 32 full rows of 128, each in a fresh process,
in bfloat16 where bertlab chooses it. Transformers' model scores every position. Ours is dense too, or
sparse, or sparse in chunks, or scores labels alone as `bertlab pretrain` does on a CPU, or recomputes
all activations. On a CPU: resident memory above what the process held before the step. On a GPU: the
peak of allocated memory.
"""

import json
from pathlib import Path

from pretraining import LENGTH, PROBABILITY, shape
from sides import Ledger, alternate, common_parser, machine, ratios, spread, write_result

import bertlab
from bertlab.core.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, new_axes

WAYS = {
    "transformers": GREY,
    "ours, dense": ORANGE,
    "ours, sparse": BLUE,
    "ours, sparse in chunks": GREEN,
    "ours, labels alone": RED,
    "ours, sparse, recomputed": PURPLE,
}
CHUNK = 128  # labels whose scores exist at once


def resident_bytes() -> int:
    "Return what this process holds now; needs Linux."
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def build(way: str, vocabulary: int, model: str):
    "Build the same architecture on either side."
    from bertlab.model.activation_checkpointing import checkpoint_activations
    from bertlab.model.heads import BertLabForMaskedLM
    from bertlab.model.families import FAMILIES, to_family_config

    config = shape("bert", model, vocab_size=vocabulary)
    if way == "transformers":
        return FAMILIES["bert"].get_class("ForMaskedLM")(
            to_family_config(config, "bert", "ForMaskedLM")
        )
    encoder = BertLabForMaskedLM(config)
    if way.endswith("recomputed"):
        checkpoint_activations(encoder, "full")
    return encoder


def measure(case: dict) -> dict:
    "Take one step in this process."
    import torch

    from bertlab.core.devices import describe_device, peak_memory_bytes, retain_freed_memory
    from bertlab.model.losses import LossConfig

    torch.manual_seed(0)
    way, device = case["way"], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if way.endswith("alone") and device.type == "cpu":
        retain_freed_memory()  # as training does
    model = build(way, case["vocabulary"], case["model"]).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids_BL = torch.randint(case["vocabulary"], (case["rows"], LENGTH), device=device)
    positions_BM = torch.rand(ids_BL.shape, device=device).argsort(1)
    positions_BM = positions_BM[:, : int(PROBABILITY * LENGTH)]
    labels_BL = torch.full_like(ids_BL, -100)
    labels_BL = labels_BL.scatter(1, positions_BM, ids_BL.gather(1, positions_BM))
    options = {}
    if way != "transformers":
        chunk = CHUNK if way.endswith("chunks") else None
        options["loss_config"] = LossConfig(chunk_size=chunk, loss_only=way.endswith("alone"))
        options["label_positions"] = None if "dense" in way else positions_BM
    precision = describe_device().precision
    before = resident_bytes() if device.type == "cpu" else torch.cuda.memory_allocated()
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
        loss = model(ids_BL, labels=labels_BL, **options).loss
    loss.backward()
    optimizer.step()
    peak = peak_memory_bytes() if device.type == "cpu" else torch.cuda.max_memory_allocated()
    return {"bytes_above_start": peak - before, "device": device.type, "precision": precision}


def draw(result: dict):
    "Draw the memory of a step against the size of the vocabulary."
    figure, axes = new_axes("entries in the vocabulary", "memory of a step (GiB)", size=(7, 4))
    sizes = sorted({int(name.split(",")[0]) for name in result["cases"]})
    for way, colour in WAYS.items():
        cases = (result["cases"][f"{size}, {way}"]["median"] for size in sizes)
        amounts = [case["bytes_above_start"] / 2**30 for case in cases]
        width = 5 if way == "transformers" else 1.5  # our dense head lies on the same line
        axes.plot(sizes, amounts, "o-", color=colour, label=way, linewidth=width)
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_title(f"{result['machine']['processor']}, {result['device']}", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    parser = common_parser(__doc__, "memory", rounds=3)
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[4096, 30_522, 128_000])
    parser.add_argument("--model", default="small")
    parser.add_argument("--rows", type=int, default=32)
    options = parser.parse_args()
    if options.case:
        return print(json.dumps(measure(options.case)))
    if options.quick:
        options.rounds, options.vocabularies, options.model, options.rows = 1, [2048], "tiny", 4
    base = {"model": options.model, "rows": options.rows}
    cases = {
        f"{size}, {way}": {**base, "way": way, "vocabulary": size}
        for size in options.vocabularies
        for way in WAYS
    }
    show = lambda f: f"{f['bytes_above_start'] / 2**20:8,.0f} MiB"
    ledger, where = Ledger("memory", options.fresh), machine(options.threads)
    runs = alternate(__file__, cases, options, ledger, show)
    figure = "bytes_above_start"
    medians = {
        name: {"median": {figure: spread(f[figure] for f in figures)["median"]}}
        for name, figures in runs.items()
    }
    compared = {
        f"{size}, transformers over {way}": ratios(
            runs[f"{size}, transformers"], runs[f"{size}, {way}"], figure
        )
        for size in options.vocabularies
        for way in WAYS
        if way != "transformers"
    }
    first = next(iter(runs.values()))[0]
    content = {"bertlab": bertlab.__version__, "machine": where, "device": first["device"]}
    content |= {"precision": first["precision"], "ratios": compared, "cases": medians}
    write_result(options, content, draw)


if __name__ == "__main__":
    main()
