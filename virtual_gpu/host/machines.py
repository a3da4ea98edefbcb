"""Machines that GPUs are in: how much RAM they have, and what is taken of it before a tensor is made.

Read from machines.json, where each range stands beside its source.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ..cards import Range
from ..errors import WrongValue
from ..language import tr
from ..units import SIZE, choose, size_in_bytes


@dataclass(frozen=True)
class Machine:
    """A machine's RAM in bytes. memory: of all that runs on it. system: what others take. source: of each."""

    name: str
    memory: Range
    system: Range
    source: tuple[str, ...]

    @property
    def free(self) -> Range:
        """What is left for the program."""
        return Range(self.memory.low - self.system.high, self.memory.high - self.system.low)


_DATA = json.loads(files("virtual_gpu.host").joinpath("machines.json").read_text(encoding="utf-8"))


def _range(value: dict[str, Any]) -> Range:
    return Range(value["low"], value["high"])


MACHINES: dict[str, Machine] = {
    one["name"]: Machine(
        one["name"],
        _range(one["memory_bytes"]),
        _range(one["system_bytes"]),
        tuple(f"{name}: {one[name]['source']}" for name in ("memory_bytes", "system_bytes")),
    )
    for one in _DATA["machines"]
}
PROCESS = Range(  # Python and its libraries, and what CUDA keeps in RAM
    _DATA["process_bytes"]["low"] + _DATA["cuda_bytes"]["low"],
    _DATA["process_bytes"]["high"] + _DATA["cuda_bytes"]["high"],
)
WORKER = _range(_DATA["worker_bytes"])  # one process of a DataLoader, beside the batches that it has ready

_FREE = re.compile(SIZE, re.IGNORECASE)


def machine(name: str | Machine) -> Machine:
    """The machine of this name ("Colab", "Kaggle"), or one with so much RAM for the program ("32GB", "16GiB").

    UnknownName lists the choices.
    """
    if isinstance(name, Machine):
        return name
    if not isinstance(name, str):
        raise WrongValue(
            tr(
                ko=f"host={name!r}: 'Colab' 같은 이름이나 '32GB' 같은 크기여야 한다.",
                en=f'host={name!r}: must be a machine\'s name, as "Colab", or its RAM, as "32GB".',
            )
        )
    free = _FREE.fullmatch(name.strip())
    if free is None:
        return MACHINES[choose(name.strip(), MACHINES, tr(ko="기계", en="machine"))]
    size = size_in_bytes(free)
    if not 2**28 <= size <= 2**44:
        raise WrongValue(
            tr(
                ko=f"{name!r}: RAM은 256 MiB에서 16 TiB 사이여야 한다.",
                en=f"{name!r}: 256 MiB to 16 TiB of RAM.",
            )
        )
    return Machine(name.strip(), Range(size, size), Range(0, 0), ("as given: all of it is the program's",))
