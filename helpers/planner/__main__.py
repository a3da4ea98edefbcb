"""`python -m helpers.planner`: what `virtual-gpu fit` does, in Korean."""

import sys

from virtual_gpu.plan.command import main
from virtual_gpu.terminal import run

if __name__ == "__main__":
    sys.exit(run(main))
