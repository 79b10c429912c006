"A loop that survives being killed."

# Written by scripts/sync.py from the notebooks' names.
from .. import _lazy_parts

__getattr__, __dir__ = _lazy_parts(__name__, (
    "steps",
    "modules",
    "history",
    "parallel",
    "xla",
    "checkpoints",
    "model_directories",
    "stopping",
    "monitors",
    "histograms",
    "previews",
    "evaluators",
    "averages",
    "reports",
    "trainer",
    "distill",
    "stages",
    "estimate",
    "model_cards",
    "export",
    "web_page",
))
