"""What is installed here: `--version`, and `virtual-gpu bug-report` with what a bug's reader would ask for."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from typing import Any

from . import __version__
from .language import LANGUAGES, language, tr
from .optional import LIBRARIES, installed
from .terminal import FITS, say

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "VIRTUAL_GPU_LANGUAGE")


def versions() -> str:
    """One line: this package, torch, transformers where it is installed, and the newest PyTorch that the rules know."""
    from .rules.active import NEWEST

    here = installed("torch", "transformers")
    return ", ".join(
        [
            f"virtual-gpu {__version__}",
            *(f"{name} {one}" for name, one in here.items()),
            f"rules up to PyTorch {NEWEST}",
        ]
    )


def bug_report() -> dict[str, Any]:
    """What a report of a bug needs: versions, system, cards, rules. No path, no name of a user, machine or model."""
    import torch

    from .rules.active import NEWEST, RULES
    from .rules.active import installed as of_library

    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "virtual-gpu": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libraries": installed(*LIBRARIES),
        "torch's CUDA": torch.version.cuda,
        "torch's ROCm": torch.version.hip,
        "GPUs": [{"name": one.name, "bytes": one.total_memory, "capability": [one.major, one.minor]} for one in cards],
        "rules up to PyTorch": NEWEST,
        "rules not of these versions": [
            name for name, rule in RULES.items() if not rule.holds(of_library(rule.library), (9, 0))
        ],
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
        "language": language(),
    }


def add_bug_report(parser: argparse.ArgumentParser) -> None:
    """The arguments of `bug-report`."""
    parser.add_argument("--language", choices=LANGUAGES, default=None)
    parser.set_defaults(execute=_bug_report)


def _bug_report(args: argparse.Namespace) -> int:
    say(json.dumps(bug_report(), ensure_ascii=False, indent=2))
    say(  # not into the file that the report may go to
        tr(
            ko="이것과 함께 실행한 명령, 출력 전부, 나온 값과 나와야 할 값(재었다면 어느 카드에서)을 보낸다.",
            en="Send this with the command that you ran, all of its output, what came out and what should have (and on "
            "which card, if you measured).",
        ),
        sys.stderr,
    )
    return FITS
