"""How many processes may work at once: the machine's cores, or what VIRTUAL_GPU_PROCESSES says; and its free RAM."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

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


def free_ram_bytes(root: Path = Path("/")) -> int | None:
    """RAM that this process can still have: the machine's, or its container's where that is less. None but on Linux.

    A container's limit is that of its control group, version 2 or 1 (Linux, admin-guide/cgroup-v2.rst and
    cgroup-v1/memory.rst), whose file cache that is not in use gives way. root: where proc and sys lie.
    """
    memory = root / "proc/meminfo"
    if not memory.exists():
        return None
    free = 1024 * next(n for name, n in _numbers(memory) if name == "MemAvailable:")
    for folder, limit, used, cache in (
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        files = [root / folder / name for name in (limit, used, "memory.stat")]
        if not all(path.exists() for path in files):
            continue
        most, now = (path.read_text(encoding="utf-8").strip() for path in files[:2])
        if most != "max":
            free = min(free, int(most) - int(now) + dict(_numbers(files[2])).get(cache, 0))
    return max(free, 0)


def _numbers(path: Path) -> list[tuple[str, int]]:
    """(name, number) of each line that begins so."""
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return [(line[0], int(line[1])) for line in lines if len(line) > 1 and line[1].isdecimal()]
