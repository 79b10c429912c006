# Written by scripts/sync.py from the notebooks' names.

from . import documents as documents
from . import readers as readers
from . import sources as sources
from . import corpus as corpus
from . import tokenizers as tokenizers
from . import rows as rows
from . import masking as masking
from . import diffusion as diffusion
from . import supervised as supervised
from . import collators as collators
from . import tokens as tokens
from . import packing as packing
from . import mixing as mixing
from . import streaming as streaming
from . import loaders as loaders
from . import module as module
from . import plain_models as plain_models
from . import tokenize as tokenize
from . import tokenizer_measures as tokenizer_measures
from . import vocabularies as vocabularies
