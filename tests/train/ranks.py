"Functions on several processes of one group, forked from a server that has done the imports, which take seconds."

import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from forks import forked


def _run(function: Callable, arguments: tuple, environment: dict[str, str], output: str) -> None:
    with open(output, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    try:
        function(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def run_on_ranks(function: Callable, *arguments: Any, count: int = 2, timeout: float = 240) -> None:
    """Call a function of a test's module on each process; which one it is stands in the environment.

    RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as a launcher sets them.
    """
    # Bound and not listening, the port stays free for the first rank, and no other process gets it.
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    port = reserved.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "NODE_RANK": "0",
              "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}  # fmt: skip
    folder = Path(
        mkdtemp(prefix="ranks-", dir=os.environ["HF_HOME"])
    )  # goes with the tests' other caches
    outputs = [folder / f"{rank}.log" for rank in range(count)]
    places = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    processes = [
        forked(_run, (function, arguments, environment, str(output)))
        for environment, output in zip(places, outputs)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
        statuses = [process.exitcode for process in processes]
        assert statuses == [0] * count, "\n".join(
            f"{statuses}\n{output_file.read_text()[-3000:]}" for output_file in outputs
        )
    finally:
        reserved.close()
        for process in processes:
            process.kill()
