"Devices are described with reasons and sources; missing ones are refused."

import sys
from types import SimpleNamespace

import pytest
import torch

from bertlab.core import devices
from bertlab.cli.main import main
from bertlab.core.devices import (
    PEAK_TFLOPS,
    benchmark_bandwidth,
    benchmark_matmul,
    check_device,
    default_precision,
    describe_device,
    find_devices,
    matmul_dtype,
    peak_flops,
    retain_freed_memory,
)

# From the data sheets: what is printed "with sparsity" is halved here, by hand.
DENSE = {
    "NVIDIA A100-SXM4-80GB": 312, "NVIDIA H100 80GB HBM3": 1979 / 2, "NVIDIA H200": 1979 / 2,
    "NVIDIA B200": 36_000 / 8 / 2, "NVIDIA L4": 242 / 2, "NVIDIA A10": 125,
    "NVIDIA GeForce RTX 3090": 142 / 2, "NVIDIA GeForce RTX 4090": 330.4 / 2,
    "v4-8": 275, "v5litepod-8": 197, "v5p-128": 459, "v6e-1": 918, "v3-8": 123 / 2,
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_bfloat16_peaks_are_dense(name):
    flops, source = peak_flops(name, "bf16-mixed")
    assert flops == pytest.approx(DENSE[name] * 1e12, rel=2e-3) and source


@pytest.mark.parametrize("name", [
    "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100", "NVIDIA A10G", "v7-8", "cpu", ""])  # fmt: skip
def test_an_unknown_device_has_no_peak(name):
    assert peak_flops(name, "bf16-mixed") is None and peak_flops(name, "32-true") is None


@pytest.mark.parametrize("name", ["Tesla T4", "Tesla V100-SXM2-16GB", "Tesla V100S-PCIE-32GB"])
def test_a_type_without_matrix_units_has_no_peak(name):
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


def test_measured_rates_are_plausible_and_draw_no_numbers():
    state = torch.get_rng_state()
    peak = benchmark_matmul(seconds=0.2, sizes=[256])
    assert torch.equal(torch.get_rng_state(), state)
    assert 1e8 < peak < 1e14
    with pytest.raises(ValueError, match="float8"):
        benchmark_matmul("float8")
    with pytest.raises(ValueError, match="meta"):
        benchmark_matmul(device="meta")
    assert 1e8 < benchmark_bandwidth(seconds=0.05, megabytes=4) < 1e14


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
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)  # of torch's CUDA builds


def pretend_versions(monkeypatch, **versions: str):
    "Installed packages that are not; torch's own version too."
    if "torch" in versions:
        monkeypatch.setattr(torch, "__version__", versions["torch"])
    monkeypatch.setattr(
        devices, "_installed_version", lambda package: versions.get(package.replace("-", "_"))
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
    monkeypatch.setattr(devices, "_count_tpus", lambda: 0)
    monkeypatch.setattr(devices, "_claim_tpu", lambda: None)
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
    device = describe_device()
    assert (device.type, device.precision) == ("cuda", precision)
    assert (
        device.peak[0] == peak
        and "data sheet" in device.peak[1]
        and device.memory_bytes == gpu[2] * 2**30
    )
    for fact in (device.name, f"{gpu[2]}.0 GiB", device.reason):
        assert fact in str(device) and fact in device.report()


def test_a_run_uses_the_first_device(bare):
    pretend_gpus(bare, A100, T4)
    assert [d.name for d in find_devices()][:2] == [A100[0], T4[0]] and find_devices()[
        -1
    ].type == "cpu"
    assert [d.precision for d in find_devices()][:2] == ["bf16-mixed", "16-mixed"]
    assert describe_device() == find_devices()[0]
    assert describe_device(device_type="cpu") == find_devices()[-1], (
        "a run may train on the CPU beside them"
    )


def test_a_tpu_is_described_without_claiming_it(bare):
    pretend_versions(bare, torch="2.9.0", torch_xla="2.9.0")
    bare.setattr(devices, "_count_tpus", lambda: 4)
    bare.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    device = describe_device(measure=True)
    assert (device.type, device.precision, device.memory_bytes) == ("tpu", "bf16-mixed", 16 * 2**30)
    assert device.peak[0] == 197e12 and check_device() == "tpu"


@pytest.mark.parametrize(
    ("name", "capability", "precision"),
    [
        ("Intel Xeon", "amx_bf16", "bf16-mixed"),
        ("Intel Xeon", "avx512_bf16", "32-true"),  # half as many units as float32 has
        ("AMD EPYC", "avx512_bf16", "bf16-mixed"),
        ("AMD EPYC", "avx512_f", "32-true"),
    ],
)
def test_a_cpu_that_is_faster_in_bfloat16_trains_in_it(bare, name, capability, precision):
    capabilities = {"cpu_name": name, capability: True}
    bare.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert default_precision("cpu")[0] == precision
    assert describe_device().peak is None  # never guessed
    assert "measured" in describe_device(measure=True).peak[1]


def test_the_command_prints_each_device(bare, capsys):
    pretend_gpus(bare, A100, T4)
    assert main(["devices"]) == 0
    a100, t4, cpu = capsys.readouterr().out.strip().split("\n\n")
    assert A100[0] in a100 and "312 TFLOP/s" in a100 and T4[0] in t4 and "65 TFLOP/s" in t4
    assert "measured on matrix products" in cpu


# --- what is asked for ----------------------------------------------------------------------------


def refused(*request) -> str:
    with pytest.raises(ValueError) as error:
        check_device(*request)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_gpu_is_refused(bare):
    for accelerator in ("gpu", "cuda", "mps"):
        assert f"accelerator='{accelerator}'" in refused(accelerator)
    assert check_device("cpu") == check_device("auto") == "cpu"
    bare.setattr(torch.backends.mps, "is_available", lambda: True)
    assert check_device("gpu") == check_device("mps") == "mps" and "cuda" in refused("cuda")


def test_a_tpu_needs_torch_xla_of_the_torch_version(bare):
    assert "bertlab-encoders[tpu]" in refused("tpu")
    pretend_versions(bare, torch="2.13.0+cpu", torch_xla="2.9.0")
    assert "2.9.0" in refused("tpu") and "2.13.0" in refused("tpu")
    pretend_versions(bare, torch="2.9.1+cpu", torch_xla="2.9.0")  # the third number is free
    assert "no TPU is visible" in refused("tpu")
    bare.setenv("PJRT_DEVICE", "CPU")
    assert check_device("tpu", "bf16-mixed") == "tpu"


@pytest.mark.parametrize("precision", ["16-mixed", 16, "16-true", "bf16-mixd"])
def test_a_precision_without_support_is_refused(bare, precision):
    assert repr(precision) in refused("cpu", precision)


def test_a_cpu_may_emulate_bfloat16(bare):
    bare.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    for precision in ("auto", "32-true", 32, "bf16-mixed", "bf16", "bf16-true", "64-true"):
        assert check_device("cpu", precision) == "cpu"


def test_a_gpu_before_ampere_is_sent_to_float16(bare):
    pretend_gpus(bare, T4)
    for precision in ("bf16-mixed", "bf16-true", "bf16"):
        message = refused("gpu", precision)
        assert "Ampere" in message and "'16-mixed'" in message
    assert check_device("gpu", "16-mixed") == check_device("auto", "auto") == "cuda"
    pretend_gpus(bare, A100)
    assert check_device("gpu", "bf16-mixed") == "cuda"


# --- memory that a step frees ---------------------------------------------------------------------


@pytest.mark.parametrize("variables, calls", [({}, [(-3, 2**30), (-1, 2**31 - 1)]),
                                              ({"MALLOC_ARENA_MAX": "2"}, [])])  # fmt: skip
def test_freed_memory_is_retained_unless_configured(monkeypatch, variables, calls):
    for name in [*devices.os.environ]:
        if name.startswith(("MALLOC_", "GLIBC_TUNABLES")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    seen = []
    mallopt = lambda option, value: seen.append((option, value)) or 1
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    monkeypatch.setattr(devices.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(devices.sys, "platform", "linux")
    assert retain_freed_memory() is bool(calls) and seen == calls


def test_a_package_replaced_while_it_was_loaded_is_named(bare, capsys):
    bare.setattr(devices, "requires", lambda name: ["pyarrow>=21", "numpy>=2; extra == 'x'"])
    bare.setitem(sys.modules, "pyarrow", SimpleNamespace(__version__="18.1.0"))
    bare.setitem(sys.modules, "numpy", SimpleNamespace(__version__="2.1.0"))
    pretend_versions(bare, bertlab_encoders="0.1.0", pyarrow="21.0.0", numpy="2.1.0")
    devices._check_loaded_packages()
    printed = capsys.readouterr().out
    assert "Restart" in printed and "pyarrow 18.1.0 (now 21.0.0)" in printed
    assert "numpy" not in printed
    pretend_versions(bare)  # nothing was installed
    devices._check_loaded_packages()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("num_tpus, expected", [(0, []), (1, ["claimed"])])
def test_a_session_claims_the_tpu_that_is_there(bare, num_tpus, expected):
    claimed = []
    bare.setattr(devices, "num_devices", lambda name: num_tpus)
    bare.setattr(devices, "_claim_tpu", lambda: claimed.append("claimed"))
    bare.setattr(devices, "_check_loaded_packages", lambda: None)
    devices.prepare_session()
    assert claimed == expected
