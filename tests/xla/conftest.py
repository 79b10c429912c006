"XLA on this machine's CPU. `make test-xla` runs these; without torch_xla each file skips itself."

import os
from importlib.util import find_spec

if find_spec("torch_xla") is not None:
    os.environ.setdefault("PJRT_DEVICE", "CPU")  # before torch_xla is imported anywhere
