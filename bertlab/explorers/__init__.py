"Interactive views of data, models and runs."

# Written by scripts/sync.py from the notebooks' names.
from .. import _lazy_parts

__getattr__, __dir__ = _lazy_parts(__name__, (
    "widgets",
    "packing",
    "schedules",
    "optimizers",
    "models",
    "fill_mask",
    "training_monitor",
    "profiling",
    "stepper",
    "text_map",
))
