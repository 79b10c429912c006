# Written by scripts/sync.py from the notebooks' names.

from . import files as files
from . import durations as durations
from . import plots as plots
from . import names as names
from . import devices as devices
from . import serialization as serialization
