"A checkpoint, a task, an honest number."

# Written by scripts/sync.py from the notebooks' names.
from .. import _lazy_parts

__getattr__, __dir__ = _lazy_parts(__name__, (
    "files",
    "data",
    "tasks",
    "task_models",
    "metrics",
    "baselines",
    "module",
    "runs",
    "evaluations",
    "predictions",
))
