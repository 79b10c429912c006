"""Start processes as Python 3.14 does on Linux, in an older Python.

PYTHONPATH=$PWD/tests/forkserver python -m pytest tests/train/test_kill.py
"""

import multiprocessing.context

multiprocessing.context._default_context._default_context = multiprocessing.get_context(
    "forkserver"
)
