"""`python -m virtual_gpu`: the command `virtual-gpu`."""

import gc
import os
import sys

from .command import main, subcommand
from .disk_cache import set_default_folder
from .terminal import run


def program() -> int:
    """What the installed `virtual-gpu` runs."""
    set_default_folder()
    asked = subcommand(sys.argv[1:])
    if asked == "fit":
        # It compiles nothing; bitsandbytes, which marks functions to be compiled, would import the whole compiler.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if asked != "run":  # a program's own garbage goes when Python would collect it
        # Imports make a million objects that stay; to look through them again and again is a tenth of the time.
        gc.set_threshold(100_000, 50, 100)
    return run(main)


if __name__ == "__main__":
    sys.exit(program())
