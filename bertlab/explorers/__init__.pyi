# Written by scripts/sync.py from the notebooks' names.

from . import widgets as widgets
from . import packing as packing
from . import schedules as schedules
from . import optimizers as optimizers
from . import models as models
from . import fill_mask as fill_mask
from . import training_monitor as training_monitor
from . import profiling as profiling
from . import stepper as stepper
from . import text_map as text_map
