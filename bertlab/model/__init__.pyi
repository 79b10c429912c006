# Written by scripts/sync.py from the notebooks' names.

from . import config as config
from . import layers as layers
from . import attention as attention
from . import encoder as encoder
from . import losses as losses
from . import heads as heads
from . import task_heads as task_heads
from . import families as families
from . import loading as loading
from . import huggingface as huggingface
from . import mask_filling as mask_filling
from . import sampling as sampling
from . import generation as generation
from . import likelihood as likelihood
from . import growth as growth
from . import activation_checkpointing as activation_checkpointing
from . import float8 as float8
from . import adapters as adapters
from . import context as context
from . import vocabulary as vocabulary
from . import context_parallel as context_parallel
