"""Programs that XLA makes, step by step: bertlab's fixed shapes, and batches padded to their longest.

    PJRT_DEVICE=CPU .venv-xla/bin/python benchmarks/xla.py [--output benchmarks/results/xla.json]

Three epochs of documents of all lengths, on XLA's CPU device, through the same Trainer and module.
The control differs in the loader alone: each batch is as long as its longest document, and the last
one of an epoch has the documents that are left. Counts are exact; seconds are those of this machine
and stand beside them only to show what a new program costs. Nothing here passes or fails.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
from lightning.pytorch.callbacks import Callback
from torch.utils.data import IterableDataset

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "xla"))

from host_device import stand_in  # noqa: E402

import bertlab  # noqa: E402
from bertlab.train.history import History  # noqa: E402
from bertlab.model.config import modernbert_tiny  # noqa: E402
from bertlab.data.corpus import embedded_corpus  # noqa: E402
from bertlab.data.tokenizers import train_tokenizer  # noqa: E402
from bertlab.data.module import PretrainingDataModule  # noqa: E402
from bertlab.core.files import atomic_write  # noqa: E402
from bertlab.train.modules import PretrainingModule  # noqa: E402
from bertlab.train.trainer import make_trainer, seed_everything  # noqa: E402
from bertlab.train.xla import CompileRecorder  # noqa: E402

LENGTH, BATCH, DOCUMENTS, EPOCHS = 64, 4, 74, 3
LOADERS = ("packed", "one document a row", "padded to the longest")
SHAPE = dict(
    vocab_size=512, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=2
)


class PaddedToLongest(IterableDataset):
    "Shuffled batches, each as long as its longest document; 15 % of the tokens are masked."

    def __init__(self, texts: list[str], tokenizer: Any):
        self.rows = tokenizer(texts, truncation=True, max_length=LENGTH)["input_ids"]
        self.tokenizer, self.epoch = tokenizer, 0

    def __len__(self) -> int:
        return -(-len(self.rows) // BATCH)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        draw, self.epoch = np.random.default_rng(self.epoch), self.epoch + 1
        order = draw.permutation(len(self.rows))
        for first in range(0, len(order), BATCH):
            yield self.collate([self.rows[i] for i in order[first : first + BATCH]], draw)

    def collate(self, rows: list[list[int]], draw: np.random.Generator) -> dict[str, torch.Tensor]:
        batch = self.tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        ids_BL, mask_BL = batch["input_ids"], batch["attention_mask"]
        hidden_BL = torch.from_numpy(draw.random(tuple(ids_BL.shape)) < 0.15) & (mask_BL > 0)
        return {"input_ids": ids_BL.masked_fill(hidden_BL, self.tokenizer.mask_token_id), "attention_mask": mask_BL,
                "labels": ids_BL.masked_fill(~hidden_BL, -100)}  # fmt: skip


class Shapes(Callback):
    "Note the shape of each batch."

    def __init__(self):
        self.shapes: list[list[int]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.shapes.append(list(batch["input_ids"].shape))


def run(batches: Any, num_batches: int) -> dict[str, Any]:
    "Train for three epochs; return shapes, programs and seconds after each step."
    seed_everything(0)
    module = PretrainingModule(
        modernbert_tiny(**SHAPE).to_diff_dict(), learning_rate=3e-3, scheduler_warmup_steps=4
    )
    history, recorder, shapes = History(), CompileRecorder(), Shapes()
    trainer = make_trainer(
        EPOCHS * num_batches, "32-true", "tpu", callbacks=[history, recorder, shapes]
    )
    trainer.fit(module, batches)
    return {"batches_per_epoch": num_batches, "shapes": shapes.shapes,
            "programs": [c.compilations for c in recorder.counts],
            "fallbacks": recorder.counts[-1].fallbacks,
            "seconds": [round(float(s), 3) for s in history.record.column("seconds")]}  # fmt: skip


def batches_of(name: str) -> tuple[Any, int]:
    "A loader by its name, and how many batches are an epoch."
    corpus = embedded_corpus()
    tokenizer = train_tokenizer(corpus.train_texts[:1000], vocab_size=SHAPE["vocab_size"])
    draw = np.random.default_rng(0)
    texts = [
        " ".join(text.split()[: draw.integers(2, 40)]) for text in corpus.train_texts[:DOCUMENTS]
    ]
    if name == "padded to the longest":
        padded = PaddedToLongest(texts, tokenizer)
        return torch.utils.data.DataLoader(padded, batch_size=None), len(padded)
    data = PretrainingDataModule(None, tokenizer, max_sequence_length=LENGTH, train_batch_size=BATCH,
                                 packing=name == "packed")  # fmt: skip
    data.set_datasets(texts, texts[:BATCH])
    data.setup()
    return data, len(data.train_dataloader())


def in_fresh_process(name: str) -> dict[str, Any]:
    "Run one loader where no program has been made yet."
    command = [sys.executable, __file__, "--loader", name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default=str(ROOT / "benchmarks/results/xla.json"))
    parser.add_argument(
        "--loader", choices=LOADERS, help="run this one, here, and print its result"
    )
    options = parser.parse_args()
    if options.loader:
        stand_in()
        print(json.dumps(run(*batches_of(options.loader))))
        return
    what = f"{EPOCHS} epochs of {DOCUMENTS} documents, rows of at most {LENGTH} tokens, {BATCH} in a batch"
    versions = {
        "bertlab": bertlab.__version__,
        "torch": torch.__version__,
        "torch_xla": torch_xla.__version__,
    }
    loaders = {}
    for name in LOADERS:
        loaders[name] = in_fresh_process(name)
        print(
            f"{name}: {loaders[name]['programs'][-1]} programs in {len(loaders[name]['programs'])} steps"
        )
    with atomic_write(options.output) as temporary:
        result = {"what": what, "versions": versions, "loaders": loaders}
        temporary.write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
