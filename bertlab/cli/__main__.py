"`python -m bertlab.cli`, which torchrun starts in each process, is the program `bertlab`."

import sys

from .main import main

sys.exit(main())
