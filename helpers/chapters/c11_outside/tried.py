"""Programs tried one after the other on a virtual card: how far each came, and the most that GPU and RAM held."""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import numpy as np
import torch

import virtual_gpu
from virtual_gpu.cards import GPUSpec
from virtual_gpu.errors import OldLibrary
from virtual_gpu.host.machines import Machine
from virtual_gpu.host.meter import HostOutOfMemory
from virtual_gpu.language import tr
from virtual_gpu.program.device import ProgramGPU
from virtual_gpu.program.frames import OURS
from virtual_gpu.units import choose, human_bytes

from ...gpu import allocator_set_to
from ...rows import LeftRows
from ...watched import telling

RETURNED = ("cache", "forward", "grown", "files")
_TORCH = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep
# bitsandbytes, which Trainer imports, misses a CPU kernel that is not used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
_HERE = os.path.dirname(os.path.realpath(__file__)) + os.sep
_WITH = os.path.realpath(contextlib.__file__)  # the frames of a `with` stand for the line that has it


@dataclass(frozen=True)
class Outcome:
    """How a program ended. Bytes: gpu and ram at their peaks; died: "gpu", "ram" or None.

    asked: bytes of the request that failed; where: the function that made it; message: what the error says.
    returned: what the program returned. refused: why it was not run, "" where it was.
    """

    gpu: int
    ram: int
    died: str | None = None
    asked: int = 0
    where: str = ""
    message: str = ""
    returned: Any = None
    refused: str = ""

    @property
    def result(self) -> str:
        """How it ended, in words."""
        if self.refused:
            return self.refused
        if self.died is None:
            return tr(ko="끝까지 갔다", en="came to its end")
        end = "OOM" if self.died == "gpu" else "Killed"
        return " · ".join(filter(None, (f"{end}: {human_bytes(self.asked)}", self.where)))


@contextlib.contextmanager
def _readers_numbers() -> Iterator[None]:
    """What is drawn in this block, and where it sets a seed, the reader's own cells do not notice."""
    python, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)


def attempt(
    program: Callable[[], Any],
    gpu: str | GPUSpec = "T4",
    *,
    host: str | Machine | None = None,
    writes: bool = False,
    settings: str | None = None,
    look: Callable[[ProgramGPU], Any] | None = None,
) -> Outcome:
    """Run a program on a virtual card, in a machine with so much RAM (None: without limit); what it prints is dropped.

    writes: it may write its checkpoints. settings: PYTORCH_ALLOC_CONF, where it is to be another.
    look: called with the card once the program has ended, however it did.
    """
    with _readers_numbers(), allocator_set_to(settings), virtual_gpu.cuda(gpu, host=host, writes=writes) as card:
        meter, end = card.host.meter, {}
        try:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                end["returned"] = program()
        except torch.OutOfMemoryError as error:
            end = {"died": "gpu", "asked": card.last_oom["bytes"], "where": _where(error), "message": str(error)}
        except HostOutOfMemory as error:
            end = {"died": "ram", "asked": error.nbytes, "where": _where(error), "message": str(error)}
        except OldLibrary as error:  # other rows are shown
            end = {"refused": str(error)}
        if look is not None:
            look(card)
        return Outcome(torch.cuda.max_memory_allocated(), meter.peak_bytes, **end)


def compare(
    programs: Mapping[str, Callable[[], Any]],
    gpu: str | GPUSpec = "T4",
    *,
    ram: bool = True,
    returned: str | None = None,
    **options: Any,
) -> LeftRows:
    """One row a program: peaks of GPU and RAM, how it ended, and the bytes that it returned, where one returned any.

    ram: False leaves RAM out. returned: what that was, one of RETURNED. options: of `attempt`.
    """
    found = {}
    with telling() as told:
        for number, (name, program) in enumerate(programs.items(), 1):
            told(f"{number}/{len(programs)}: {name}")
            one = attempt(program, gpu, **options)
            # A model that a program returned is not kept while the next one runs.
            found[name] = one if isinstance(one.returned, int) else replace(one, returned=None)
    heads = ["", tr(ko="GPU 최대", en="GPU, peak"), tr(ko="RAM 최대", en="RAM, peak"), tr(ko="결과", en="result")]
    rows = [
        [name, *("–" if one.refused else human_bytes(peak) for peak in (one.gpu, one.ram)), one.result]
        for name, one in found.items()
    ]
    if any(isinstance(one.returned, int) for one in found.values()):
        heads.insert(3, _returned(returned))
        for row, one in zip(rows, found.values(), strict=True):
            row.insert(3, human_bytes(one.returned) if isinstance(one.returned, int) else "–")
    if not ram:
        for row in (heads, *rows):
            del row[2]
    return LeftRows(heads, rows)


def _returned(name: str | None) -> str:
    """The name of the column of what programs returned."""
    if name is None:
        return tr(ko="잰 것", en="measured")
    return {
        "cache": tr(ko="캐시", en="cache"),
        "forward": tr(ko="순전파의 최대", en="peak of the forward pass"),
        "grown": tr(ko="늘어난 GPU 최대", en="growth of the GPU's peak"),
        "files": tr(ko="파일의 합", en="files"),
    }[choose(name, RETURNED, tr(ko="열", en="column"))]


def _where(error: BaseException) -> str:
    """The innermost function that is neither PyTorch's nor the instrument's: the one whose line asked for memory."""
    found, step = "", error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if not os.path.realpath(code.co_filename).startswith((OURS, _TORCH, _HERE, _WITH)):
            found = getattr(code, "co_qualname", code.co_name).rpartition("<locals>.")[2]
        step = step.tb_next
    return found
