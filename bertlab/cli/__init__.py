"Every command as a plain function."

# Written by scripts/sync.py from the notebooks' names.
from .. import _lazy_parts

__getattr__, __dir__ = _lazy_parts(__name__, (
    "parser",
    "commands",
    "models",
    "demo",
    "finetune",
    "write",
    "embed",
    "vocabularies",
    "adapt",
    "tune",
    "export",
    "main",
    "ray",
))
