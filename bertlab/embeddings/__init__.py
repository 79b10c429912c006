"One text, one vector, and search."

# Written by scripts/sync.py from the notebooks' names.
from .. import _lazy_parts

__getattr__, __dir__ = _lazy_parts(__name__, (
    "pooling",
    "losses",
    "gradcache",
    "bi_encoder",
    "pairs",
    "module",
    "retrieval",
    "search",
    "app",
))
