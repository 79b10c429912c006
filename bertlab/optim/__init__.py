"How each weight is updated, and when."

# Written by scripts/sync.py from the notebooks' names.
from .. import _lazy_parts

__getattr__, __dir__ = _lazy_parts(__name__, (
    "schedulers",
    "budgets",
    "groups",
    "muon",
    "optimizers",
))
