"From token ids to a loss, one document at a time."

# Written by scripts/sync.py from the notebooks' names.
from .. import _lazy_parts

__getattr__, __dir__ = _lazy_parts(__name__, (
    "config",
    "layers",
    "attention",
    "encoder",
    "losses",
    "heads",
    "task_heads",
    "families",
    "loading",
    "huggingface",
    "mask_filling",
    "sampling",
    "generation",
    "likelihood",
    "growth",
    "activation_checkpointing",
    "float8",
    "adapters",
    "context",
    "vocabulary",
    "context_parallel",
))
