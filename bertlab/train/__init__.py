"A training loop that survives interruptions."

# Written by scripts/sync.py from the notebooks' names.
from .. import _lazy_parts

__getattr__, __dir__ = _lazy_parts(__name__, (
    "config",
    "steps",
    "objectives",
    "initialization",
    "modules",
    "history",
    "parallel",
    "xla",
    "resume",
    "checkpoints",
    "stopping",
    "batch_size",
    "monitors",
    "histograms",
    "previews",
    "evaluators",
    "averages",
    "reports",
    "trainer",
    "distill",
    "run",
    "stages",
    "estimate",
    "model_cards",
    "export",
    "web_page",
    "backends",
))
