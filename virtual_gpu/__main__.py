"""`python -m virtual_gpu`: the command `virtual-gpu`."""

import os
import sys

from .command import main, subcommand
from .disk_cache import set_default_folder
from .terminal import run


def program() -> int:
    """What the installed `virtual-gpu` runs."""
    set_default_folder()
    if subcommand(sys.argv[1:]) == "fit":
        # It compiles nothing; bitsandbytes, which marks functions to be compiled, would import the whole compiler.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    return run(main)


if __name__ == "__main__":
    sys.exit(program())
