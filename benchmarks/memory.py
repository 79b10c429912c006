"""Peak memory of a training step beside transformers' model, as the vocabulary grows.

    python benchmarks/memory.py [--vocabularies 4096 30522 128000]

One step (forward, backward, AdamW) of the small shape on 32 full rows of 128, in bfloat16 where `auto`
takes it, each in a fresh process. Theirs scores every position; ours is dense too, or sparse, or sparse
in chunks, or as `bertlab pretrain` takes it on a CPU (labels alone), or with all activations computed
anew. On a CPU: the most resident memory of the process above what it held before the step. On a GPU:
the most allocated memory. Heads by themselves and all modes of checkpointing are measured on a CPU by
heads.py and checkpointing.py.
"""

import json

from pretraining import LENGTH, PROBABILITY, shape
from sides import (
    Ledger,
    alternate,
    common_parser,
    fingerprint,
    machine,
    ratios,
    spread,
    write_result,
)

import bertlab
from bertlab.core.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, new_axes

WAYS = {"transformers": GREY, "ours, dense": ORANGE, "ours, sparse": BLUE,
        "ours, sparse in chunks": GREEN, "ours, labels alone": RED, "ours, sparse, recomputed": PURPLE}  # fmt: skip
CHUNK = 128  # labels whose scores exist at once


def build(way: str, vocabulary: int, model: str):
    "The same architecture on either side."
    from bertlab.model.activation_checkpointing import checkpoint_activations
    from bertlab.model.huggingface import to_family_config, their_class
    from bertlab.model.heads import BertLabForMaskedLM

    config = shape("bert", model, vocab_size=vocabulary)
    if way == "transformers":
        return their_class("bert", "ForMaskedLM")(to_family_config(config, "bert", "ForMaskedLM"))
    built = BertLabForMaskedLM(config)
    if way.endswith("recomputed"):
        checkpoint_activations(built, "full")
    return built


def measure(case: dict) -> dict:
    "One step, in this process."
    import torch
    from heads import resident_bytes

    from bertlab.core.devices import describe_device, retain_freed_memory, peak_memory_bytes
    from bertlab.model.losses import LossConfig

    torch.manual_seed(0)
    way, device = case["way"], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if way.endswith("alone") and device.type == "cpu":
        retain_freed_memory()  # as training does
    model = build(way, case["vocabulary"], case["model"]).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids_BL = torch.randint(case["vocabulary"], (case["rows"], LENGTH), device=device)
    places_BM = torch.rand(ids_BL.shape, device=device).argsort(1)[:, : int(PROBABILITY * LENGTH)]
    labels_BL = torch.full_like(ids_BL, -100).scatter(1, places_BM, ids_BL.gather(1, places_BM))
    options = {} if way == "transformers" else {
        "label_positions": None if "dense" in way else places_BM,
        "loss_config": LossConfig(chunk_size=CHUNK if way.endswith("chunks") else None,
                              loss_only=way.endswith("alone"))}  # fmt: skip
    precision = describe_device().precision
    half = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision, torch.float32)
    before = resident_bytes() if device.type == "cpu" else torch.cuda.memory_allocated()
    with torch.autocast(device.type, half, enabled=half != torch.float32):
        loss = model(ids_BL, labels=labels_BL, **options).loss
    loss.backward()
    optimizer.step()
    peak = peak_memory_bytes() if device.type == "cpu" else torch.cuda.max_memory_allocated()
    return {"bytes_above_start": peak - before, "peak_bytes": peak, "loss": loss.item(),
            "device": device.type, "precision": precision}  # fmt: skip


def draw(result: dict):
    "Memory of a step against the size of the vocabulary."
    figure, axes = new_axes("entries in the vocabulary", "memory of a step (GiB)", size=(7, 4))
    for way, colour in WAYS.items():
        found = {int(name.split(",")[0]): f["median"]["bytes_above_start"] / 2**30
                 for name, f in result["cases"].items() if name.partition(", ")[2] == way}  # fmt: skip
        # Ours with a dense head needs as much as theirs: a broad line shows beneath it.
        width = 5 if way == "transformers" else 1.5
        axes.plot(list(found), list(found.values()), "o-", color=colour, label=way, linewidth=width)
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    sizes = sorted({int(name.split(",")[0]) for name in result["cases"]})
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_title(f"{result['machine']['processor']}, {result['device']}", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "memory", rounds=3)
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[4096, 30_522, 128_000])
    parser.add_argument("--model", default="small")
    parser.add_argument("--rows", type=int, default=32)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(json.loads(options.case))))
        return
    if options.quick:
        options.rounds, options.vocabularies, options.model, options.rows = 1, [2048], "tiny", 4
    place = machine(options.threads)
    ledger = Ledger(options.kept / "memory.json", fingerprint(__file__), options.fresh)
    cases = {f"{size}, {way}": {"way": way, "vocabulary": size, "model": options.model, "rows": options.rows}
             for size in options.vocabularies for way in WAYS}  # fmt: skip
    show = lambda f: f"{f['bytes_above_start'] / 2**20:8,.0f} MiB of the step"  # noqa: E731
    runs = alternate(__file__, cases, options.rounds, options.threads, ledger, show)
    numbers = ("bytes_above_start", "peak_bytes", "loss")
    found = {name: {"median": {k: spread(f[k] for f in figures)["median"] for k in numbers}, "runs": figures}
             for name, figures in runs.items()}  # fmt: skip
    compared = {f"{size}, transformers over {way}":
                ratios(runs[f"{size}, transformers"], runs[f"{size}, {way}"], "bytes_above_start")
                for size in options.vocabularies for way in WAYS if way != "transformers"}  # fmt: skip
    first = next(iter(runs.values()))[0]
    write_result(options.output, {
        "what": __doc__.splitlines()[0], "bertlab": bertlab.__version__, "machine": place,
        "device": first["device"], "precision": first["precision"], "rows": options.rows,
        "row_length": LENGTH, "masked_share": PROBABILITY, "chunk_size": CHUNK, "model": options.model,
        "judged": [], "ratios": compared, "cases": found}, draw)  # fmt: skip


if __name__ == "__main__":
    main()
