# Written by scripts/sync.py from the notebooks' names.

from . import recipes as recipes
from . import demo as demo
from . import runs as runs
from . import pretrain as pretrain
from . import finetune as finetune
from . import main as main
