"Everything runs on two CPU cores without a network; what cannot run here is skipped with its reason."

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

# Set before anything imports torch, datasets or transformers; subprocesses inherit it.
CACHE = tempfile.mkdtemp(prefix="bertlab-tests-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
os.environ.update(
    HF_HOME=CACHE,  # a cache left by an earlier run must not help this one
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",  # the tokenizers warn when a process that used threads forks
    MPLBACKEND="Agg",
    PYTHONHASHSEED="0",
    BERTLAB_PROGRESS="off",  # what is solved here is not the reader's progress
    BERTLAB_CLAIMS="strict",  # a page's sentence about a run that does not hold is an error here
    GOMP_SPINCOUNT="1000",  # OpenMP threads that spin while they wait slow each other on a busy machine
)
os.fsync = lambda descriptor: None  # kills are tested, power cuts are not
# A collection of garbage looks at every object that an import has left, and imports make many: half of the time to
# find the tests. Afterwards, what is there then is not looked at again.
gc.disable()
# How long an example takes says how busy the machine is.
settings.register_profile("bertlab", deadline=None)
settings.load_profile("bertlab")
# A shell starts background jobs deaf to Ctrl-C, and children inherit that: no test of it could pass.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The workers share the cores: more threads than cores slow each other down.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // WORKERS))
os.environ.pop("IN_TEST", None)  # nbdev exports nothing where this is set
# Tests of one chapter may use what those of another prepare, so file names are unique over all of them.
sys.path[:0] = [
    str(ROOT / "scripts"),
    *sorted(str(path) for path in (ROOT / "tests").iterdir() if path.is_dir()),
]


def why_no_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "needs CUDA, and torch finds none"


def why_no_tpu() -> str:
    if find_spec("torch_xla") is None:
        return "needs torch_xla, which is not installed"
    return (
        "" if os.environ.get("PJRT_DEVICE") == "TPU" else "needs a TPU, and PJRT_DEVICE is not TPU"
    )


def find_chromium() -> str | None:
    return next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )


def why_no_browser() -> str:
    if find_chromium() is None:
        return "needs Chromium: apt-get install chromium"
    return "" if find_spec("playwright") else "needs playwright, which the dev extra installs"


REASONS = {"gpu": why_no_gpu, "tpu": why_no_tpu, "browser": why_no_browser}


def pytest_xdist_auto_num_workers(config) -> int:
    "A worker holds torch, about half a gigabyte, so many cores do not mean as many workers."
    return min(8, os.cpu_count() or 1)


# Each case of these stands alone; elsewhere a file shares its fixtures.
SPREAD = {"test_house.py", "test_notebooks.py"}
# What has crashed in a process in which most of the suite had run comes first: torch's ONNX exporter, and starting an
# interpreter in test_house.py. The notebooks come last: they are many and short, so all workers end together.
ORDER = {"test_export.py": 0, "test_house.py": 1, "test_notebooks.py": 3}


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node, error):
    "Say how a worker ended that did not end by itself; a signal's number is negative."
    if error:
        status = node.gateway._io.popen.wait(timeout=10)
        node.config.get_terminal_writer().write(f"\n{node.gateway.id} ended with status {status}\n")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    "A file stays on one worker, but for those of `SPREAD`."
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if Path(file).name in SPREAD else file

    return ByFile(config, log)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: ORDER.get(item.path.name, 2))
    for mark, why in REASONS.items():
        marked = [item for item in items if item.get_closest_marker(mark)]
        if marked and (reason := why()):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="module")
def browser():
    "Chromium, driven by playwright."
    if reason := why_no_browser():
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=flags)
        yield browser
        browser.close()


@pytest.fixture
def tree(tmp_path) -> Path:
    "A copy of the project that a test may change. Its name keeps clear of what nbdev passes by."
    copy = tmp_path / "copy"
    ignore = shutil.ignore_patterns(
        ".git", ".venv*", "_proc", "_docs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis",
        ".ipynb_checkpoints", "bertlab-demo", "lightning_logs", "*.tmp", "nbdev.yml",
    )  # fmt: skip
    shutil.copytree(ROOT, copy, ignore=ignore, symlinks=True)
    return copy
