"From a text on disk to a masked batch."

# Written by scripts/sync.py from the notebooks' names.
from .. import _lazy_parts

__getattr__, __dir__ = _lazy_parts(__name__, (
    "documents",
    "readers",
    "sources",
    "corpus",
    "tokenizers",
    "rows",
    "masking",
    "diffusion",
    "supervised",
    "collators",
    "tokens",
    "packing",
    "mixing",
    "streaming",
    "loaders",
    "module",
    "plain_models",
    "tokenize",
    "tokenizer_measures",
    "vocabularies",
))
