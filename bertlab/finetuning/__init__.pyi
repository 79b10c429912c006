# Written by scripts/sync.py from the notebooks' names.

from . import labelled as labelled
from . import files as files
from . import good_rows as good_rows
from . import data as data
from . import task_models as task_models
from . import label_metrics as label_metrics
from . import metrics as metrics
from . import module as module
from . import runs as runs
from . import evaluations as evaluations
from . import predictions as predictions
from . import prediction_files as prediction_files
from . import teachers as teachers
from . import baselines as baselines
from . import tasks as tasks
