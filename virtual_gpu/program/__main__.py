"""`python -m virtual_gpu.program …` is `virtual-gpu run …`."""

import sys

from .command import main

sys.exit(main())
