# Written by scripts/sync.py from the notebooks' names.

from . import schedulers as schedulers
from . import budgets as budgets
from . import groups as groups
from . import muon as muon
from . import quantized as quantized
from . import optimizers as optimizers
