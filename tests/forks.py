"""Processes that fork from one which has imported what takes seconds to import, and read the embedded corpus.

All tests of a worker share that server: notebooks, programs and ranks ask here for their processes. Where there is
a GPU, each starts afresh instead.
"""

import multiprocessing
import os
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

# A process that is forked from one that has looked for GPUs cannot use them.
PROCESSES = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")


def forked(target, arguments: tuple) -> BaseProcess:
    "A process that is to call a function; it is not started yet."
    outer = os.environ.get("PYTHONPATH")
    # The server finds `prepared` by its environment alone.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), outer)))
    try:
        if PROCESSES.get_start_method() == "forkserver":
            multiprocessing.set_forkserver_preload(["prepared"])  # `main` asks for another module
            ensure_running()
    finally:
        if outer is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = outer
    return PROCESSES.Process(target=target, args=arguments)
