"""How many processes may work at once: the machine's cores, or what VIRTUAL_GPU_PROCESSES says."""

from __future__ import annotations

import os
from collections.abc import Callable

from .errors import WrongValue
from .language import tr

VARIABLE = "VIRTUAL_GPU_PROCESSES"
MOST = 6  # a search has six ways or so; a process takes some 200 MB of its own


def processes() -> int:
    """As many as this process may use cores, this one among them; at most MOST, or what VIRTUAL_GPU_PROCESSES says.

    WrongValue where that is no number from 1 on.
    """
    asked = os.environ.get(VARIABLE, "") or str(MOST)
    if not asked.isdecimal() or int(asked) < 1:
        raise WrongValue(
            tr(
                ko=f"{VARIABLE}={asked}: 1 이상의 정수여야 한다. 1이면 한 번에 하나씩 한다.",
                en=f"{VARIABLE}={asked}: must be an integer from 1 on; with 1, one thing is done at a time.",
            )
        )
    # The cores that this process may use are asked for as Linux does; macOS and Windows have no such call.
    cores: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return min(int(asked), (os.cpu_count() or 1) if cores is None else len(cores(0)))
