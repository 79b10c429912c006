# Written by scripts/sync.py from the notebooks' names.

from . import config as config
from . import steps as steps
from . import objectives as objectives
from . import initialization as initialization
from . import modules as modules
from . import history as history
from . import parallel as parallel
from . import xla as xla
from . import resume as resume
from . import checkpoints as checkpoints
from . import stopping as stopping
from . import batch_size as batch_size
from . import monitors as monitors
from . import histograms as histograms
from . import previews as previews
from . import evaluators as evaluators
from . import averages as averages
from . import reports as reports
from . import trainer as trainer
from . import distill as distill
from . import run as run
from . import stages as stages
from . import estimate as estimate
from . import model_cards as model_cards
from . import export as export
from . import web_page as web_page
