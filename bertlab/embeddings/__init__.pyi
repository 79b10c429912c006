# Written by scripts/sync.py from the notebooks' names.

from . import pooling as pooling
from . import losses as losses
from . import gradcache as gradcache
from . import bi_encoder as bi_encoder
from . import pairs as pairs
from . import module as module
from . import retrieval as retrieval
from . import search as search
from . import app as app
