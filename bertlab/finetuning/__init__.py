"A checkpoint, a task, an honest number."

# Written by scripts/sync.py from the notebooks' names.
from .. import _lazy_parts

__getattr__, __dir__ = _lazy_parts(__name__, (
    "labelled",
    "files",
    "good_rows",
    "data",
    "task_models",
    "label_metrics",
    "metrics",
    "module",
    "runs",
    "evaluations",
    "predictions",
    "prediction_files",
    "teachers",
    "baselines",
    "tasks",
))
