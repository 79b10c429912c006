"""The program `bertlab` in a process of its own, forked from one that has done the imports, which take seconds."""

import contextlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from forks import forked


# What conftest sets for the sake of the tests; users have none of these.
OF_TESTS = ("TOKENIZERS_PARALLELISM", "PYTHONHASHSEED", "GOMP_SPINCOUNT", "BERTLAB_PROGRESS",
            "BERTLAB_CLAIMS")  # fmt: skip


def users_environment() -> dict[str, str]:
    "The environment that a user's shell has."
    return {name: value for name, value in os.environ.items() if name not in OF_TESTS}


@dataclass
class Ended:
    "What `subprocess.run` would say."

    returncode: int
    stdout: str
    stderr: str


def _run(words: list[str], printed: str, errors: str, folder: str | None, num_threads: int) -> None:
    os.setsid()
    torch.set_num_threads(num_threads)  # or its sums could differ in the last place
    for name in OF_TESTS:
        os.environ.pop(name, None)
    for path, descriptor in ((printed, 1), (errors, 2)):
        with open(path, "wb", buffering=0) as file:
            os.dup2(file.fileno(), descriptor)
    if folder:
        os.chdir(folder)
    sys.argv = ["bertlab", *words]
    multiprocessing.set_start_method(None, force=True)
    from bertlab.cli.main import main

    status = 1
    try:
        status = main(words)
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    sys.exit(status)


class Program:
    "A started `bertlab`, with the methods of `subprocess.Popen` that the tests use."

    def __init__(self, words, cwd=None):
        folder = Path(
            tempfile.mkdtemp(prefix="said-", dir=os.environ["HF_HOME"])
        )  # goes with the tests' other caches
        self.printed, self.errors = folder / "stdout", folder / "stderr"
        self.printed.touch()
        self.errors.touch()
        arguments = (
            [str(word) for word in words],
            str(self.printed),
            str(self.errors),
            cwd and str(cwd),
            torch.get_num_threads(),
        )
        self.process = forked(_run, arguments)
        self.process.start()

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self, timeout: float) -> Ended:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise TimeoutError(
                f"still running after {timeout} s\n{self.errors.read_text()[-4000:]}"
            )
        return Ended(self.process.exitcode, self.printed.read_text(), self.errors.read_text())


def bertlab(*words, cwd=None, timeout: float = 400) -> Ended:
    "Run the program to its end."
    return Program(words, cwd).wait(timeout)
