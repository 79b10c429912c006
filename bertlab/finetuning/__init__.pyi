# Written by scripts/sync.py from the notebooks' names.

from . import files as files
from . import task as task
from . import evaluation as evaluation
from . import classification as classification
from . import tokens as tokens
from . import answers as answers
from . import spans as spans
from . import data as data
from . import models as models
from . import module as module
from . import runs as runs
from . import predictions as predictions
from . import baselines as baselines
from . import builtin as builtin
from . import config as config
