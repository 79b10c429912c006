"Devices are described with reasons and sources; missing ones are refused."

from mmap import mmap
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bertlab.core import devices
from bertlab.cli.main import main
from bertlab.core.devices import (
    check_device,
    default_precision,
    describe_device,
)
from bertlab.core.devices import (
    device_memory_peaks,
    find_devices,
    retain_freed_memory,
    peak_memory_bytes,
)
from bertlab.core.devices import resident_memory_bytes
from bertlab.core.devices import PEAK_TFLOPS, benchmark_bandwidth, benchmark_matmul
from bertlab.core.devices import matmul_dtype, peak_flops

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


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("NVIDIA H200", 2.0e15),
        ("NVIDIA H100 NVL", 1.98e15),  # sparse
        ("NVIDIA GeForce RTX 4090", 82.6e12),
        ("NVIDIA RTX A6000", 38.7e12),
    ],
)  # outside tensor cores
def test_sparse_peaks_are_not_in_the_table(name, wrong):
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


def test_float32_is_tfloat32_where_torch_uses_it():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert peak_flops("NVIDIA A100-SXM4-40GB", "32-true")[0] == 19.5e12
        torch.set_float32_matmul_precision("high")
        assert peak_flops("NVIDIA A100-SXM4-40GB", "32-true")[0] == 156e12
        assert peak_flops("Tesla V100-SXM2-16GB", "32-true")[0] == 15.7e12  # it has no tfloat32
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_given_peak_overrides_the_table():
    assert peak_flops("a card of next year", "64-true", 5e15) == (5e15, "given")
    for wrong in (0, -1e12, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="override"):
            peak_flops("NVIDIA H200", "bf16-mixed", wrong)


def test_no_type_is_slower_than_a_wider_one():
    for name, row in PEAK_TFLOPS.items():
        assert row.source and name == name.lower(), name
        wide_to_narrow = [flops for flops in row[:5] if flops]
        assert wide_to_narrow == sorted(wide_to_narrow) and wide_to_narrow, name
        if row.float8:
            assert row.float8 / row.bfloat16 == pytest.approx(2, rel=0.03), name


def test_precision_names_of_lightning_are_understood():
    assert {matmul_dtype(p) for p in ("bf16", "bf16-true", "bf16-mixed")} == {"bfloat16"}
    assert {matmul_dtype(p) for p in ("16", 16, "16-true", "16-mixed")} == {"float16"}
    assert matmul_dtype("64-true") is None and peak_flops("NVIDIA H200", "64-true") is None


def test_a_measured_peak_is_possible_and_moves_no_generator():
    state = torch.get_rng_state()
    peak = benchmark_matmul(seconds=0.2, sizes=[256])
    assert torch.equal(torch.get_rng_state(), state)
    a = torch.randn(256, 256)
    slow = np.array(a.tolist()[:8]) @ np.array(a.tolist())  # only to use the processor in between
    assert 1e8 < peak < 1e14 and slow.shape == (8, 256)
    with pytest.raises(ValueError, match="float8"):
        benchmark_matmul("float8")


def test_resident_memory_falls_and_its_peak_does_not():
    before = resident_memory_bytes()
    if before is None:
        pytest.skip("resident memory is read from Linux's /proc")
    # Of the system itself: a process that has trained on a CPU keeps what numpy frees.
    block = np.frombuffer(mmap(-1, 40 * 2**20), np.uint8)
    block[:] = 1  # every page touched
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


# --- what there is --------------------------------------------------------------------------------


def pretend_gpus(monkeypatch, *gpus: tuple[str, tuple[int, int], int]):
    "GPUs by name, compute capability and GiB; the first is the current one."
    at = lambda index: gpus[index or 0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: at(index)[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: at(index)[1])
    properties = lambda index=None: SimpleNamespace(total_memory=at(index)[2] * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def pretend_versions(monkeypatch, **versions: str):
    "Installed packages that are not; torch's own version too."
    if "torch" in versions:
        monkeypatch.setattr(torch, "__version__", versions["torch"])
    monkeypatch.setattr(
        devices, "installed_version", lambda package: versions.get(package.replace("-", "_"))
    )


T4, A100, H200 = (
    ("Tesla T4", (7, 5), 15),
    ("NVIDIA A100-SXM4-80GB", (8, 0), 80),
    ("NVIDIA H200", (9, 0), 141),
)


@pytest.fixture
def bare(monkeypatch):
    "A host without accelerators, whatever the machine of the test has."
    pretend_gpus(monkeypatch)
    pretend_versions(monkeypatch)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(devices, "count_tpus", lambda: 0)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    "gpu, precision, peak",
    [
        (T4, "16-mixed", 65e12),
        (A100, "bf16-mixed", 312e12),
        (H200, "bf16-mixed", 989.5e12),
    ],
)
def test_a_gpu_is_described_with_reason_and_peak(bare, gpu, precision, peak):
    pretend_gpus(bare, gpu)
    found = describe_device()
    assert (found.kind, found.precision) == ("cuda", precision)
    assert (
        found.peak[0] == peak
        and "data sheet" in found.peak[1]
        and found.memory_bytes == gpu[2] * 2**30
    )
    assert "\n" not in str(found) and precision in str(found) and found.reason in str(found)
    for fact in (
        found.name,
        f"{gpu[2]}.0 GiB",
        found.reason,
        found.peak[1],
    ):
        assert fact in found.report()


@pytest.mark.parametrize("kind, wanted", [("v3-8", 8), ("v5litepod-4", 4), ("", 4)])
def test_up_to_v3_a_chip_is_two_devices(kind, wanted, monkeypatch):
    monkeypatch.setattr(
        devices.glob, "glob", lambda pattern: ["chip"] * 4 if "accel" in pattern else []
    )
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", kind)
    assert devices.count_tpus() == wanted


def test_a_peak_is_measured_where_products_are_made_at_once():
    with pytest.raises(ValueError, match="meta"):
        devices.benchmark_matmul(device="meta")


def test_every_device_is_found_and_a_run_takes_the_first(bare):
    pretend_gpus(bare, A100, T4)
    assert [d.name for d in find_devices()][:2] == [A100[0], T4[0]] and find_devices()[
        -1
    ].kind == "cpu"
    assert [d.precision for d in find_devices()][:2] == ["bf16-mixed", "16-mixed"]
    assert describe_device() == find_devices()[0]
    assert describe_device(kind="cpu") == find_devices()[-1], (
        "a run may train on the CPU beside them"
    )


def test_a_kind_that_is_none_is_not_described_as_a_processor():
    with pytest.raises(ValueError, match="kind='gpu' is unknown.*cuda, mps, cpu"):
        describe_device(kind="gpu")


def test_a_tpu_trains_in_bfloat16_and_is_described_without_touching_it(bare):
    pretend_versions(bare, torch="2.9.0", torch_xla="2.9.0")
    bare.setattr(devices, "count_tpus", lambda: 4)
    bare.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    found = describe_device(measure=True)
    assert (found.kind, found.precision, found.memory_bytes) == ("tpu", "bf16-mixed", 16 * 2**30)
    assert found.peak[0] == 197e12 and check_device() == "tpu"


@pytest.mark.parametrize("able", ["amx_bf16", "avx512_bf16", None])
def test_a_processor_trains_in_bfloat16_exactly_where_it_multiplies_it(bare, able):
    bare.setattr(torch.cpu, "get_capabilities", lambda: {able: True}, raising=False)
    assert default_precision("cpu")[0] == ("bf16-mixed" if able else "32-true")
    assert describe_device().peak is None  # never guessed
    assert "measured" in describe_device(measure=True).peak[1]


@pytest.mark.parametrize(
    "able", ["_is_amx_tile_supported", "_is_avx512_bf16_supported", "_something_else"]
)
def test_a_torch_before_2_10_is_asked_in_its_own_way(bare, able):
    bare.delattr(torch.cpu, "get_capabilities", raising=False)
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        bare.setattr(torch.cpu, name, lambda name=name: name == able, raising=False)
    assert default_precision("cpu")[0] == ("32-true" if able == "_something_else" else "bf16-mixed")


def test_the_command_prints_each_device_with_every_fact(bare, capsys):
    pretend_gpus(bare, A100, T4)
    assert main(["devices"]) == 0
    a100, t4, cpu = capsys.readouterr().out.strip().split("\n\n")
    for shown, gpu, peak in ((a100, A100, "312 TFLOP/s"), (t4, T4, "65 TFLOP/s")):
        facts = dict(line.split(maxsplit=1) for line in shown.splitlines())
        assert list(facts) == ["device", "memory", "precision", "peak"]
        assert gpu[0] in facts["device"] and f"{gpu[2]}.0 GiB" in facts["memory"]
        assert peak in facts["peak"] and "dense" in facts["peak"] and "data sheet" in facts["peak"]
        assert "(" in facts["precision"]  # the reason
    assert "measured on matrix products" in cpu


# --- what is asked for ----------------------------------------------------------------------------


def refused(*request) -> str:
    with pytest.raises(ValueError) as error:
        check_device(*request)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_gpu_that_is_not_there_is_refused_with_the_reason(bare):
    bare.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert "built without CUDA" in refused("gpu") and "accelerator='cpu'" in refused("cuda")
    bare.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert "finds no GPU" in refused("gpu") and "nvidia-smi" in refused("gpu")
    assert "no Apple GPU" in refused("mps")
    assert check_device("cpu") == check_device("auto") == "cpu"
    bare.setattr(torch.backends.mps, "is_available", lambda: True)
    assert check_device("gpu") == check_device("mps") == "mps" and "Apple" in refused("cuda")


def test_a_tpu_needs_torch_xla_of_torchs_version_and_a_device(bare):
    assert "bertlab[tpu]" in refused("tpu")
    pretend_versions(bare, torch="2.13.0+cpu", torch_xla="2.9.0")
    said = refused("tpu")
    assert (
        "torch_xla 2.9.0 needs torch 2.9, and this is torch 2.13.0+cpu" in said
        and "torch~=2.9.0" in said
    )
    pretend_versions(bare, torch="2.9.1+cpu", torch_xla="2.9.0")  # the third number is free
    assert "no TPU is visible" in refused("tpu")
    bare.setenv("PJRT_DEVICE", "CPU")
    assert check_device("tpu", "bf16-mixed") == "tpu"
    bare.delenv("PJRT_DEVICE")
    bare.setattr(devices, "count_tpus", lambda: 4)
    pretend_versions(bare, torch="2.10.0", torch_xla="2.9.0")
    assert "needs torch 2.9" in refused(
        "auto"
    )  # a TPU host with the wrong torch does not fall back in silence


@pytest.mark.parametrize(
    "precision, word",
    [
        ("16-mixed", "this is a CPU"),
        (16, "this is a CPU"),
        ("16-true", "this is a CPU"),
        ("fp8", "is unknown"),
        ("bf16-mixd", "choose one of auto, 32-true, bf16-mixed"),
    ],
)
def test_a_precision_that_a_cpu_does_not_have_is_refused(bare, precision, word):
    assert word in refused("cpu", precision) and repr(precision) in refused("cpu", precision)


@pytest.mark.parametrize(
    "precision", ["auto", "32-true", 32, "bf16-mixed", "bf16", "bf16-true", "64-true"]
)
def test_a_cpu_without_the_instructions_may_still_emulate_bfloat16(bare, precision):
    bare.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    assert check_device("cpu", precision) == "cpu"


def test_a_gpu_before_ampere_is_sent_to_float16(bare):
    pretend_gpus(bare, T4)
    for precision in ("bf16-mixed", "bf16-true", "bf16"):
        message = refused("gpu", precision)
        assert "Ampere" in message and "'16-mixed'" in message
    assert check_device("gpu", "16-mixed") == check_device("auto", "auto") == "cuda"
    pretend_gpus(bare, A100)
    assert check_device("gpu", "bf16-mixed") == "cuda"


def test_an_unknown_accelerator_is_answered_with_the_known_ones(bare):
    assert "choose one of auto, cpu, gpu, cuda, mps, tpu" in refused("xla")


def test_memory_moves_numbers_at_a_rate_that_is_possible():
    assert 1e8 < benchmark_bandwidth(seconds=0.05, megabytes=4) < 1e14


# --- memory that a step frees ---------------------------------------------------------------------


def asked_of(monkeypatch, libc=("glibc", "2.36"), platform="linux", answers=(1, 1, 1)):
    "What `retain_freed_memory` says and asks of a C library that answers so."
    asked, answers = [], iter(answers)
    mallopt = lambda what, value: (asked.append((what, value)), next(answers))[1]  # noqa: E731
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    monkeypatch.setattr(devices.platform, "libc_ver", lambda: libc)
    monkeypatch.setattr(devices.sys, "platform", platform)
    return retain_freed_memory(), asked


def test_freed_memory_is_kept_where_glibc_can(monkeypatch):
    for name in [
        name for name in devices.os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    ]:
        monkeypatch.delenv(name)
    assert asked_of(monkeypatch) == (True, [(-3, 2**30), (-1, 2**31 - 1)])
    assert asked_of(monkeypatch, answers=(0, 1, 1)) == (
        True,
        [(-3, 2**30), (-3, 2**25), (-1, 2**31 - 1)],
    )  # an old one
    assert asked_of(monkeypatch, answers=(0, 0, 1))[0] is False
    assert asked_of(monkeypatch, libc=("", "")) == (False, [])  # musl
    assert asked_of(monkeypatch, platform="darwin") == (False, [])


@pytest.mark.parametrize("name, value", [("MALLOC_TRIM_THRESHOLD_", "1"), ("MALLOC_ARENA_MAX", "2"),
                                         ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=65536")])  # fmt: skip
def test_what_a_user_says_about_memory_stands(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert asked_of(monkeypatch) == (False, [])
