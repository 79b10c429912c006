"""XLA's CPU device in the place of a TPU: Lightning's accelerator asks a cloud what there is, this one does not."""

import torch
from lightning.pytorch.accelerators import AcceleratorRegistry, XLAAccelerator


class HostXLA(XLAAccelerator):
    "Answers for `PJRT_DEVICE=CPU` what Lightning asks about a TPU."

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def parse_devices(devices):
        return 1

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("xla", 0)]


def stand_in() -> None:
    "Let `accelerator='tpu'` mean this device."
    AcceleratorRegistry.remove("tpu")
    AcceleratorRegistry.register("tpu", HostXLA)
