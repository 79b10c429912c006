"""One process, two XLA devices: prints what `test_xla_training` compares."""

import json

import torch_xla
from lightning.pytorch.callbacks import Callback
from test_xla_training import train

from bertlab.train.stopping import NonFiniteGuard


class Sharding(Callback):
    "How a batch lies on the devices."

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.seen = torch_xla._XLAC._get_xla_sharding_spec(batch["input_ids"])


def error_of(**options) -> str:
    try:
        train("tpu", 2, **options)
    except ValueError as error:
        return str(error)
    return "no error"


sharding = Sharding()
xla, counts, _ = train("tpu", 6, [sharding, NonFiniteGuard()], devices="auto")
cpu, _, _ = train("cpu", 6)
print(json.dumps({
    "sharding": sharding.seen, "xla": list(xla.column("train_loss")), "cpu": list(cpu.column("train_loss")),
    "compilations": [c.compilations for c in counts],
    "errors": [error_of(devices="auto", data={"train_batch_size": 3}), error_of(devices=3)],
}))  # fmt: skip
