# Written by scripts/sync.py from the notebooks' names.

from . import options as options
from . import pretrain as pretrain
from . import demo as demo
from . import finetune as finetune
from . import speedrun as speedrun
from . import main as main
