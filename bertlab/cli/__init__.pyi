# Written by scripts/sync.py from the notebooks' names.

from . import parser as parser
from . import commands as commands
from . import models as models
from . import demo as demo
from . import finetune as finetune
from . import write as write
from . import embed as embed
from . import vocabularies as vocabularies
from . import adapt as adapt
from . import tune as tune
from . import export as export
from . import main as main
from . import ray as ray
