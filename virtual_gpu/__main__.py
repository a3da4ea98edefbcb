"""`python -m virtual_gpu`: the command `virtual-gpu`."""

import sys

from .command import main
from .terminal import run


def program() -> int:
    """What the installed `virtual-gpu` runs."""
    return run(main)


if __name__ == "__main__":
    sys.exit(program())
