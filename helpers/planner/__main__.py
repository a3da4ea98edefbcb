"""`python -m helpers.planner`: what `virtual-gpu fit` does, in Korean."""

import sys

from virtual_gpu.plan.command import main

if __name__ == "__main__":
    sys.exit(main())
