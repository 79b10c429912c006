"""What a run was said to need beside what the operating system saw it take, for ten configurations.

    python benchmarks/estimate.py [--quick]

Each configuration trains three steps through Lightning in a fresh process, once with memory given back as
it is freed (MALLOC_MMAP_THRESHOLD_=65536; the process is then as large as its tensors) and once as runs go
by default, with freed memory kept in the heap. The estimate is made in the same process before anything is
built. Judged: the estimate is within 10 % of the measured peak of the first. The second shows how far the
heap grows beyond the tensors. On a GPU: the most allocated memory, once.
"""

import json
import os
import subprocess
import sys
import tempfile

from sides import Ledger, common_parser, fingerprint, judge, machine, say, write_result

import bertlab
from bertlab.core.plots import BLUE, GREY, ORANGE, new_axes

LENGTH, STEPS = 128, 3
SIZE = dict(vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            max_position_embeddings=512)  # fmt: skip
CASES = {  # name: what is not as in the first
    "as it is": {},
    "8 rows": {"rows": 8},
    "64 rows": {"rows": 64},
    "rows of 512": {"rows": 8, "length": 512},
    "recomputed": {"module": {"gradient_checkpointing": "full"}},
    "bfloat16": {"precision": "bf16-mixed"},
    "bfloat16, recomputed": {
        "precision": "bf16-mixed",
        "module": {"gradient_checkpointing": "full"},
    },
    "LoRA": {"module": {"adapter": "lora"}},
    "lion, half frozen": {"module": {"optimizer_class": "lion", "freeze": 2}},
    "BERT, vocabulary 30,522": {"kind": "bert", "shape": {"vocab_size": 30_522}},
}


def measure(case: dict) -> dict:
    "Estimate, then train, in this process."
    import torch
    from lightning.pytorch import LightningDataModule
    from torch.utils.data import DataLoader

    from bertlab.core.devices import peak_memory_bytes
    from bertlab.data.tokenizers import train_tokenizer
    from bertlab.model.config import bert_tiny, modernbert_tiny
    from bertlab.model.heads import BertLabForMaskedLM
    from bertlab.model.huggingface import save_model
    from bertlab.train.estimate import estimate_memory
    from bertlab.train.modules import PretrainingModule
    from bertlab.train.trainer import make_trainer

    torch.manual_seed(0)
    rows, length = case.get("rows", 32), case.get("length", LENGTH)
    precision = case.get("precision", "32-true")
    quiet = dict(embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0)
    shape = {**SIZE, **case.get("shape", {})}
    config = bert_tiny(**shape, **quiet) if case.get("kind") == "bert" else modernbert_tiny(**shape)
    options = dict(case.get("module", {}))
    with tempfile.TemporaryDirectory() as place:
        if "adapter" in options:
            tokenizer = train_tokenizer(["a few words of text"], 64)  # a directory has one
            save_model(BertLabForMaskedLM(config), tokenizer, place)
            options |= {"pretrained_model_name_or_path": place}
        else:
            options |= {"model_config_kwargs": config.to_diff_dict()}
        module = PretrainingModule(**options)
    num_labels = round(0.3 * length)

    def batch() -> dict:
        ids = torch.randint(5, shape["vocab_size"], (rows, length))
        places = torch.rand(rows, length).argsort(1)[:, :num_labels]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids),
                "position_ids": torch.arange(length).expand(rows, -1).contiguous(),
                "labels": torch.full_like(ids, -100).scatter(1, places, ids.gather(1, places)),
                "label_positions": places}  # fmt: skip

    class Rows(LightningDataModule):
        def train_dataloader(self):
            return DataLoader([batch() for _ in range(STEPS)], batch_size=None)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    said = estimate_memory(
        module, rows, length, 0.3, precision, device, saves_models=False, find_largest=False
    )
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer = make_trainer(STEPS, precision, devices=1)
    trainer.fit(module, Rows())
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else peak_memory_bytes()
    return {"estimate": said.peak, "tensors": said.step.peak, "process": said.process, "peak": peak,
            "device": device}  # fmt: skip


def child(case: dict, lean: bool, threads: int) -> dict:
    "Measure a case in a fresh process."
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    env.pop("MALLOC_MMAP_THRESHOLD_", None)
    if lean:
        env["MALLOC_MMAP_THRESHOLD_"] = "65536"
    done = subprocess.run([sys.executable, __file__, "--case", json.dumps(case)], env=env, text=True,
                          capture_output=True, check=False)  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def draw(result: dict):
    "Estimated against measured."
    figure, axes = new_axes("measured peak of the process (MiB)", "estimated (MiB)", size=(5.5, 5))
    for side, colour, name in (("kept", ORANGE, "freed memory kept"), ("lean", BLUE, "given back")):
        found = [case for case in result["cases"].values() if side in case]
        axes.plot([c[side]["peak"] / 2**20 for c in found], [c[side]["estimate"] / 2**20 for c in found], "o",
                  color=colour, label=name)  # fmt: skip
    most = max(c["lean"]["peak"] for c in result["cases"].values()) / 2**20
    axes.plot([0, 1.1 * most], [0, 1.1 * most], color=GREY, linewidth=0.8)
    axes.legend(frameon=False)
    return figure


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "estimate", rounds=1)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(json.loads(options.case))))
        return
    cases = dict(list(CASES.items())[:2]) if options.quick else CASES
    ledger = Ledger(options.kept / "estimate.json", fingerprint(__file__), options.fresh)
    found = {}
    for name, case in cases.items():
        found[name] = {}
        for side in ("lean", "kept"):
            key = json.dumps([case, side, options.threads], sort_keys=True)
            figures, _ = ledger.ask(key, lambda: child(case, side == "lean", options.threads))  # noqa: B023
            found[name][side] = figures
        lean, kept = found[name]["lean"], found[name]["kept"]
        found[name]["error"] = lean["estimate"] / lean["peak"] - 1
        found[name]["heap"] = (kept["peak"] - kept["process"]) / kept["tensors"]
        print(
            f"  {name:28} {found[name]['error']:+6.1%}   heap {found[name]['heap']:.2f}", flush=True
        )
    worst = max(abs(case["error"]) for case in found.values())
    judged = [judge("estimate over measured peak, largest error", worst, at_most=0.10)]
    say(judged)
    write_result(options.output, {
        "what": __doc__.splitlines()[0], "bertlab": bertlab.__version__, "machine": machine(options.threads),
        "judged": judged, "largest_heap_factor": max(case["heap"] for case in found.values()),
        "cases": found}, draw)  # fmt: skip


if __name__ == "__main__":
    main()
