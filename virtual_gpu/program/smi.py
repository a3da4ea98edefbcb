"""`nvidia-smi`, where a program asks it about its card: the virtual one answers, in the words of the real command.

The memory is what `torch.cuda.mem_get_info` says (a real command has the whole of the card, and what other processes
hold), and for all that is not known it says "[N/A]", as nvidia-smi does. A child process writes it, so that pipes, exit
codes and `check=True` are a child's. Left to the machine is a command in a pipe or with a redirection of a shell's, and
who looks for the command's file (`shutil.which`).
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from .device import ProgramGPU
from .driver import memory_info, properties
from .patches import Patches

NAMES = ("nvidia-smi", "nvidia-smi.exe")
_ABSENT = "[N/A]"
_SAYS = "import sys; sys.stdout.write(sys.argv[1]); sys.stderr.write(sys.argv[2]); sys.exit(bool(sys.argv[2]))"


def install(patches: Patches, gpu: ProgramGPU) -> None:
    """Let subprocess's functions, all of which are `Popen`, find the command."""
    begin = subprocess.Popen.__init__

    @functools.wraps(begin)
    def begun(process: subprocess.Popen, args: Any, *more: Any, **named: Any) -> None:
        words, asked = _words(args), args
        if words and os.path.basename(words[0]).lower() in NAMES:
            out, err = answer(gpu, words[1:])
            args, named["shell"] = [sys.executable, "-I", "-S", "-c", _SAYS, out, err], False
            named.pop("executable", None)
        begin(process, args, *more, **named)
        process.args = asked  # which errors and CompletedProcess name

    patches.set(subprocess.Popen, "__init__", begun)


def answer(gpu: ProgramGPU, words: list[str]) -> tuple[str, str]:
    """(what the command prints, what it complains of) with these arguments."""
    given, switches = {}, set()
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in ("--query-gpu", "--format", "--id", "-i"):
            given["--id" if name == "-i" else name] = value if equals else next(rest, "")
        else:
            switches.add(word)
    if switches - {"-L", "--list-gpus"} or ("--query-gpu" in given) != ("--format" in given):
        said = " ".join(words)
        return "", f"nvidia-smi {said}: a virtual GPU answers --query-gpu=... --format=csv, -L and no arguments alone\n"
    numbers = {str(place): place for place in range(gpu.count)}
    wanted = [one.strip() for one in given["--id"].split(",")] if "--id" in given else [*numbers]
    if not {*wanted} <= {*numbers}:
        return "", "No devices were found\n"
    cards = sorted(numbers[one] for one in {*wanted})
    rows = [(place, _facts(gpu, place)) for place in cards]
    if "--query-gpu" not in given:
        both = " / ".join
        lines = [
            f"GPU {place}: {facts['name'][0]} "
            + (f"(UUID: {facts['uuid'][0]})" if switches else both(map(_with_unit, (facts[n] for n in _MEMORY))))
            for place, facts in rows
        ]
        return "\n".join(lines) + "\n", ""
    names = [name.strip() for name in given["--query-gpu"].split(",")]
    how = {name.strip() for name in given["--format"].split(",")}
    shown: Callable[[tuple[str, str]], str] = (lambda fact: fact[0]) if "nounits" in how else _with_unit
    lines = [", ".join(shown(facts.get(name, (_ABSENT, ""))) for name in names) for _, facts in rows]
    units = rows[0][1]
    title = ", ".join(f"{name} [{unit}]" if (unit := units.get(name, ("", ""))[1]) else name for name in names)
    return "\n".join([*([] if "noheader" in how else [title]), *lines]) + "\n", ""


_MEMORY = ("memory.used", "memory.total")


def _facts(gpu: ProgramGPU, place: int) -> dict[str, tuple[str, str]]:
    """Field → (value, unit) of a card of the machine. What others than this process's hold is not known."""
    one = properties(gpu, place)
    free, total = memory_info(gpu, place)
    found = {
        "name": (one.name, ""),
        "gpu_name": (one.name, ""),
        "index": (str(place), ""),
        "count": (str(gpu.count), ""),
        "uuid": (f"GPU-{one.uuid}", ""),
        "gpu_uuid": (f"GPU-{one.uuid}", ""),
        "compute_cap": (f"{one.major}.{one.minor}", ""),
        "memory.total": (str(total // 2**20), "MiB"),
    }
    if place == gpu.index or gpu.several is not None:
        found |= {"memory.free": (str(free // 2**20), "MiB"), "memory.used": (str((total - free) // 2**20), "MiB")}
    return {name: (_ABSENT, "MiB") for name in ("memory.free", "memory.used")} | found


def _with_unit(fact: tuple[str, str]) -> str:
    value, unit = fact
    return value if value == _ABSENT or not unit else f"{value} {unit}"


def _words(args: Any) -> list[str]:
    """A command as its words; none where it is more than one command, or no text."""
    if isinstance(args, (str, bytes)):
        text = os.fsdecode(args)
        if any(sign in text for sign in "|;&<>$`\n"):
            return []
        try:
            return shlex.split(text)
        except ValueError:  # a quotation that does not end
            return []
    if isinstance(args, os.PathLike):
        return [os.fsdecode(args)]
    return [os.fsdecode(word) for word in args] if isinstance(args, (list, tuple)) else []
