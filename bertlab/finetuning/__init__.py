"From a checkpoint and labels to a score with its baselines."

# Written by scripts/sync.py from the notebooks' names.
from .. import _lazy_parts

__getattr__, __dir__ = _lazy_parts(__name__, (
    "files",
    "task",
    "evaluation",
    "classification",
    "tokens",
    "answers",
    "spans",
    "data",
    "models",
    "module",
    "runs",
    "predictions",
    "baselines",
    "builtin",
    "config",
))
