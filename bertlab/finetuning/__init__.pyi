# Written by scripts/sync.py from the notebooks' names.

from . import files as files
from . import data as data
from . import tasks as tasks
from . import task_models as task_models
from . import metrics as metrics
from . import baselines as baselines
from . import module as module
from . import runs as runs
from . import evaluations as evaluations
from . import predictions as predictions
