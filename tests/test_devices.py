"Peaks of devices are dense, sum in float32 and have a source; what is unknown is said to be."

import numpy as np
import pytest
import torch

from bertlab.devices import DEVICE_PEAKS, SERVER_PEAKS, device_memory_peaks, measured_peak_flops
from bertlab.devices import multiplied_type, peak_flops, peak_memory_bytes, resident_memory_bytes

# From the data sheets: what is printed "with sparsity" is halved here, by hand.
DENSE = {
    "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A100 80GB PCIe": 312, "NVIDIA H100 80GB HBM3": 1979 / 2,
    "NVIDIA H100 PCIe": 1513 / 2, "NVIDIA H100 NVL": 1671 / 2, "NVIDIA H200": 1979 / 2,
    "NVIDIA B200": 36_000 / 8 / 2, "NVIDIA L4": 242 / 2, "NVIDIA L40S": 724 / 2, "NVIDIA A10": 125,
    "NVIDIA RTX A6000": 309.7 / 2, "NVIDIA GeForce RTX 3090": 142 / 2, "NVIDIA L40": 362 / 2,
    "NVIDIA GeForce RTX 4090": 330.4 / 2, "NVIDIA GeForce RTX 5090": 419 / 2, "v4-8": 275,
    "v5litepod-8": 197, "v5p-128": 459, "v6e-1": 918, "v3-8": 123 / 2, "v2-8": 46 / 2,
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_bfloat16_peaks_are_the_dense_ones_of_the_data_sheets(name):
    flops, source = peak_flops(name, "bf16-mixed")
    assert flops == pytest.approx(DENSE[name] * 1e12, rel=2e-3) and source


@pytest.mark.parametrize("name, wrong", [
    ("NVIDIA H200", 2.0e15), ("NVIDIA H100 NVL", 1.98e15),  # sparse
    ("NVIDIA GeForce RTX 4090", 82.6e12), ("NVIDIA RTX A6000", 38.7e12)])  # outside tensor cores
def test_the_wrong_figures_of_a_widely_used_table_are_not_ours(name, wrong):
    flops, _ = peak_flops(name, "bf16-mixed")
    assert max(flops / wrong, wrong / flops) > 1.9


@pytest.mark.parametrize("name", [
    "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 5090 Laptop GPU",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100", "NVIDIA A10G", "NVIDIA A100X", "GeForce GTX 1080 Ti",
    "NVIDIA H20", "v7-8", "cpu", "CPU, 2 threads", "mps", "", "nvidia", "A"])  # fmt: skip
def test_what_is_not_in_the_table_has_no_peak(name):
    assert peak_flops(name, "bf16-mixed") is None and peak_flops(name, "32-true") is None


@pytest.mark.parametrize("name", ["Tesla T4", "Tesla V100-SXM2-16GB", "Tesla V100S-PCIE-32GB"])
def test_a_type_that_a_device_does_not_multiply_has_no_peak(name):
    assert peak_flops(name, "bf16-mixed") is None and peak_flops(name, "float8") is None
    assert peak_flops(name, "16-mixed")[0] in (65e12, 125e12, 130e12)


def test_float32_means_tfloat32_exactly_where_torch_may_use_it():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert peak_flops("NVIDIA A100-SXM4-40GB", "32-true")[0] == 19.5e12
        torch.set_float32_matmul_precision("high")
        assert peak_flops("NVIDIA A100-SXM4-40GB", "32-true")[0] == 156e12
        assert peak_flops("Tesla V100-SXM2-16GB", "32-true")[0] == 15.7e12  # it has no tfloat32
    finally:
        torch.set_float32_matmul_precision(before)


def test_who_knows_better_is_believed_also_about_an_unknown_device():
    assert peak_flops("a card of next year", "64-true", 5e15) == (5e15, "given")
    for wrong in (0, -1e12, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive number of FLOP/s"):
            peak_flops("NVIDIA H200", "bf16-mixed", wrong)


def test_every_row_has_a_source_and_no_type_is_slower_than_a_wider_one():
    for name, row in DEVICE_PEAKS.items():
        assert row.source and name == name.lower(), name
        wide_to_narrow = [flops for flops in row[:5] if flops]
        assert wide_to_narrow == sorted(wide_to_narrow) and wide_to_narrow, name
        if row.float8:
            assert row.float8 / row.bfloat16 == pytest.approx(2, rel=0.03), name
    assert sum(len(names.split("|")) for names in SERVER_PEAKS) < len(DEVICE_PEAKS)


def test_lightnings_names_of_precisions_are_understood_and_others_have_no_peak():
    assert {multiplied_type(p) for p in ("bf16", "bf16-true", "bf16-mixed")} == {"bfloat16"}
    assert {multiplied_type(p) for p in ("16", 16, "16-true", "16-mixed")} == {"float16"}
    assert multiplied_type("64-true") is None and peak_flops("NVIDIA H200", "64-true") is None


def test_a_measured_peak_is_above_any_single_product_and_moves_no_generator():
    state = torch.get_rng_state()
    peak = measured_peak_flops(seconds=0.2, sizes=[256])
    assert torch.equal(torch.get_rng_state(), state)
    a = torch.randn(256, 256)
    slow = np.array(a.tolist()[:8]) @ np.array(a.tolist())  # only to use the processor in between
    assert 1e8 < peak < 1e14 and slow.shape == (8, 256)
    with pytest.raises(ValueError, match="float8"):
        measured_peak_flops("float8")


def test_memory_that_is_held_rises_and_falls_and_the_mark_only_rises():
    before = resident_memory_bytes()
    if before is None:
        pytest.skip("resident memory is read from Linux's /proc")
    block = np.ones(40 * 2**20 // 8)  # 40 MiB, every page touched
    held = resident_memory_bytes()
    mark = peak_memory_bytes()
    del block
    assert held - before > 30 * 2**20 and mark >= held - 2**20
    assert resident_memory_bytes() < held - 30 * 2**20 and peak_memory_bytes() >= mark


def test_without_a_gpu_its_memory_is_unknown():
    if torch.cuda.is_available():
        allocated, reserved = device_memory_peaks(reset=True)
        assert 0 <= allocated <= reserved
    else:
        assert device_memory_peaks() is None
