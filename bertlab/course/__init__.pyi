# Written by scripts/sync.py from the notebooks' names.

from . import progress as progress
from . import puzzles as puzzles
