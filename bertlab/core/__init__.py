"Files, durations, names, devices and plots."

# Written by scripts/sync.py from the notebooks' names.
from .. import _lazy_parts

__getattr__, __dir__ = _lazy_parts(__name__, (
    "files",
    "durations",
    "plots",
    "names",
    "devices",
    "serialization",
))
