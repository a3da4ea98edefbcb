"""`torchrun …`, `accelerate launch …`, `deepspeed …`: the launcher reads its arguments; what it would start runs here.

Its own code decides on the number of processes and the environment (accelerate's configuration file included), up to
the place where it would start them; of these, the one rank is run that the user asked for.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ..errors import WrongValue
from ..language import tr
from .device import ProgramGPU
from .patches import Patches

_MODULES = {
    "torchrun": "torch.distributed.run",
    "accelerate": "accelerate.commands.accelerate_cli",
    "accelerate-launch": "accelerate.commands.launch",
    "deepspeed": "deepspeed.launcher.runner",
}


@dataclass
class Launch(BaseException):
    """What a launcher was about to start: not an Exception, so that it is not caught on its way."""

    program: str
    argv: list[str]
    module: bool
    processes: int  # 0: one, which is no rank of a group
    of_a_machine: int = 0  # of these; 0: not said
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))


def without_python(command: Sequence[str], module: bool) -> tuple[list[str], bool]:
    """(program and arguments, whether it is a module) of `python train.py` or `python -m module` as well."""
    command = list(command)
    if not module and os.path.basename(command[0]).startswith("python") and not command[0].endswith(".py"):
        command, module = (command[2:], True) if command[1:2] == ["-m"] else (command[1:], False)
    if not command:
        raise WrongValue(tr(ko="어느 프로그램을 실행할지 없다.", en="Which program?"))
    return command, module


def launcher(program: str, module: bool) -> str | None:
    """The module of the launcher that a command begins with; None where it begins with the program itself."""
    if module:
        return program if program in _MODULES.values() else None
    return None if os.path.exists(program) else _MODULES.get(os.path.basename(program))


def launched(name: str, argv: Sequence[str], patches: Patches, gpu: ProgramGPU) -> Launch:
    """What the launcher would start with these arguments. SystemExit where they are wrong, as the launcher has it."""
    imports = gpu.imports
    imports.after("torch.distributed.run", lambda module: _stop_torchrun(patches, module))
    imports.after("accelerate.commands.launch", lambda module: _stop_accelerate(patches, module))
    imports.after("deepspeed.launcher.runner", lambda module: _stop_deepspeed(patches, module, gpu))
    patches.set(sys, "argv", [name.rpartition(".")[2], *argv])
    try:
        importlib.import_module(name).main()
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if not (error.name or "").startswith(package):
            raise
        raise WrongValue(tr(ko=f"{package}이 설치되어 있지 않다.", en=f"{package} is not installed.")) from error
    except Launch as launch:
        return launch
    raise WrongValue(tr(ko=f"{name}: 시작한 프로그램이 없다.", en=f"{name} started no program."))


def _stop_torchrun(patches: Patches, module: ModuleType) -> None:
    def run(args: Any) -> None:
        if args.no_python:
            raise WrongValue(tr(ko="--no_python: 파이썬 프로그램만 실행한다.", en="--no_python: only Python is run."))
        nodes = module.parse_min_max_nnodes(str(args.nnodes))[1]
        local = module.determine_local_world_size(str(args.nproc_per_node))
        raise Launch(args.training_script, list(args.training_script_args), bool(args.module), nodes * local, local)

    patches.set(module, "run", run)


def _stop_accelerate(patches: Patches, module: ModuleType) -> None:
    def simple_launcher(args: Any) -> None:
        environment = module.prepare_simple_launcher_cmd_env(args)[1]
        raise Launch(
            args.training_script, list(args.training_script_args), bool(args.module), 0, environment=environment
        )

    patches.set(module, "simple_launcher", simple_launcher)


def _stop_deepspeed(patches: Patches, module: ModuleType, gpu: ProgramGPU) -> None:
    parse, asked = module.parse_args, []

    def parse_args(args: Any = None) -> Any:
        asked.append(parse(args))
        return asked[-1]

    def encode_world_info(slots: dict[str, list[int]]) -> str:
        args, sizes = asked[-1], [len(of_host) for of_host in slots.values()]
        processes, local = sum(sizes), sizes[0] if len(set(sizes)) == 1 else 0
        if args.no_python:
            raise WrongValue(tr(ko="--no_python: 파이썬 프로그램만 실행한다.", en="--no_python: only Python is run."))
        index = gpu.rank % (local or gpu.count)
        added = [] if args.no_local_rank else [f"--local_rank={index}"]  # as its launch.py does
        raise Launch(args.user_script, [*added, *args.user_args], bool(args.module), processes, local)

    patches.set_all(module, {"parse_args": parse_args, "encode_world_info": encode_world_info})
