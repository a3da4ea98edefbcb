"""Running an unchanged program on a virtual GPU, and the report of it."""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils.data._utils import signal_handling

from ..cards import GPUSpec
from ..errors import WrongValue
from ..host.machines import Machine
from ..host.meter import HostOutOfMemory
from ..language import tr
from ..trace import snapshot
from ..units import positive_int
from . import ends, pipeline, processes
from .context import MOST_VISIBLE, check_cards, cuda
from .device import ProgramGPU
from .ends import EndOfRun
from .launchers import Launch, launched, launcher, without_python
from .patches import Patches
from .report import FAILED, FITS, INTERRUPTED, OOM, Report, make_report
from .several import to_see
from .threads import wait_for_threads


def run(
    program: str,
    argv: Sequence[str] = (),
    *,
    gpu: str | GPUSpec = "T4",
    module: bool = False,
    steps: int = 3,
    through_evaluation: bool = False,
    values: str = "answer",
    limited: bool = True,
    gpus: int = 1,
    visible_gpus: int = 1,
    rank: int = 0,
    writes: bool = False,
    snapshot_file: str | None = None,
    sent: tuple[int, str] | None = None,
    host: str | Machine | None = None,
    without: Iterable[str] = (),
    changes: Iterable[str] = (),
    report_interrupted: bool = False,
) -> Report:
    """Run a script (or with module=True a module, as `python -m`) with these arguments until `steps` optimizer steps.

    The program's own errors end up in `Report.error`; KeyboardInterrupt passes, or with report_interrupted ends the
    program, and the report is of what it did until then. WrongValue where there is no such file.
    snapshot_file: where PyTorch's memory snapshot of the run is written. sent: see `pipeline`.
    visible_gpus: of one process that spreads its model over them, see `cuda`; `rank` is the one that is looked at.
    host: the machine whose RAM there is, without: rules to leave out, changes: what is to be other (see `cuda`).
    """
    steps = positive_int(steps, "steps")
    check_cards(gpus, visible_gpus, rank)
    (program, *argv), module = without_python([program, *argv], module)
    if not module and program.endswith(".ipynb"):
        raise WrongValue(
            tr(
                ko=f"{program}: 노트북은 이 명령으로 실행하지 못한다. 스크립트로 바꾸거나(Colab의 파일 > 다운로드 > "
                ".py, jupyter nbconvert --to script), 노트북에서 `%load_ext virtual_gpu`와 `%virtual_gpu T4`를 쓴다.",
                en=f"{program}: this command runs no notebooks. Make it a script (in Colab File > Download > .py, or "
                "jupyter nbconvert --to script), or use `%load_ext virtual_gpu` and `%virtual_gpu T4` inside it.",
            )
        )
    if not module and launcher(program, module) is None and not os.path.exists(program):
        raise WrongValue(tr(ko=f"그런 프로그램이 없다: {program}", en=f"no such program: {program}"))
    given = {"limited": limited, "values": values, "rank": rank, "gpus": gpus, "writes": writes, "host": host}
    given["visible_gpus"] = visible_gpus
    with cuda(gpu, without=without, changes=changes, **given) as device:
        watch, patches = device.watch, device.patches
        patches.later(partial(_put_back, dict(os.environ)))  # libraries leave there what the next program would read
        patches.later(
            partial(_put_handlers_back, _handlers())
        )  # a loader's raises when a worker dies, whenever it does
        if snapshot_file is not None:
            watch.keep_history()
            watch.history_stays = True
        starts, ranked, command = launcher(program, module), gpus > 1, [*(["-m"] if module else []), program, *argv]
        if starts is not None:
            launch = _launched(starts, argv, patches, device)
            program, argv, module, ranked = launch.program, launch.argv, launch.module, launch.processes > 0
        ends.install(patches, device.imports, watch, steps, through_evaluation=through_evaluation)
        options = ["--gpu", device.spec.name, "--gpus", str(gpus), "--values", values]
        options += [text for rule in sorted(device.rules.without) for text in ("--without", rule)]
        options += [text for name in device.changes for text in ("--change", name)]
        ask = pipeline.ask_by_running(options, command)
        processes.install(patches, device)
        _group(patches, device, ask, sent, at_once=ranked)
        # Planned scripts for cards before Ampere set it; what is predicted after them in this process is not theirs.
        device.imports.after(
            "transformers.integrations.sdpa_attention",
            lambda module: patches.set(module, "use_gqa_in_sdpa", module.use_gqa_in_sdpa),
        )
        patches.set(sys, "argv", [program, *argv])
        patches.set(sys, "path", [os.getcwd() if module else os.path.dirname(os.path.abspath(program)), *sys.path])
        started = time.perf_counter()
        try:
            status, error = _run(program, module, device)
        except KeyboardInterrupt:
            if not report_interrupted:
                raise
            status, error = INTERRUPTED, None
        if status == FAILED and ends.ended_unfed(watch, error):
            status, error = FITS, None
        gave_up = status == FITS or isinstance(error, SystemExit) or _after_out_of_memory(error)
        if gave_up and device.ooms and device.last_oom["steps"] == watch.steps:
            status = OOM  # it caught the error, and made no step after it
        seconds = time.perf_counter() - started
        for loader in list(device.loaders):  # the error keeps it, and its processes keep RAM and cores
            loader._shutdown_workers()
        if isinstance(error, ModuleNotFoundError) and error.name == "deepspeed":
            watch.note(
                tr(
                    ko="DeepSpeed가 없다. ZeRO의 단계는 `virtual-gpu shards --stage`로 세고, FSDP2는 실행할 수 있다",
                    en="DeepSpeed is not installed: `virtual-gpu shards --stage` counts ZeRO's stages, and FSDP2 runs",
                )
            )
        if status == FAILED and (cards := _cards_missing(device, error)):
            watch.note(to_see(cards, gpus))
        report = make_report(device, watch, program=program, status=status, seconds=seconds, error=error)
        if snapshot_file is not None:
            snapshot.write(watch.snapshot(), snapshot_file)
    gc.collect()
    return report


def _put_back(environment: Mapping[str, str]) -> None:
    """Make the environment what it was."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def _handlers() -> dict[int, Any]:
    """Who is told of each signal; of none where this is not the main thread, which alone may set them."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _put_handlers_back(handlers: Mapping[int, Any]) -> None:
    """Tell of signals whom they were told of before, and of no alarm that the program set."""
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler and handler is not None:  # None: C's
            if number == getattr(signal, "SIGALRM", None):
                signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(number, handler)
            if number == getattr(signal, "SIGCHLD", None):
                signal_handling._SIGCHLD_handler_set = False  # the next program's loader sets it again


def _after_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error was raised while one of missing memory was handled, or from it."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, torch.OutOfMemoryError):
        behind = behind.__cause__ or behind.__context__
    return behind is not None


def _cards_missing(gpu: ProgramGPU, error: BaseException | None) -> int:
    """How many cards a program needs that ended where it asked for one that there is not; 0 for any other end."""
    if isinstance(error, torch.AcceleratorError) and gpu.no_such_card is not None:
        cards = gpu.no_such_card + 1
    elif isinstance(error, AssertionError) and str(error) == "Invalid device id":  # torch.cuda.get_device_properties
        cards = gpu.count + 1
    else:
        return 0
    left_itself_fewer = gpu.several is not None and gpu.count < len(gpu.several.meters)
    return 0 if left_itself_fewer or cards > MOST_VISIBLE else cards


def _group(
    patches: Patches, gpu: ProgramGPU, ask: pipeline.Ask, sent: tuple[int, str] | None, *, at_once: bool
) -> None:
    """Make the process a rank: now, or once the program opens a group of its one process."""
    begin = dist.init_process_group

    def install() -> None:
        from . import ranks  # torch.distributed.tensor takes its time

        patches.set(dist, "init_process_group", begin)
        ranks.install(patches, gpu, gpu.watch)
        pipeline.install(patches, gpu.imports, ask, sent)

    def first(*args: Any, **kwargs: Any) -> None:
        install()
        dist.init_process_group(*args, **kwargs)

    if at_once:
        install()
    else:
        patches.set(dist, "init_process_group", first)
        for module in (dist, c10d):  # PyTorch's CUDA build brings it: torchtune wants it for bf16, also of one process
            patches.set(module, "is_nccl_available", lambda: True)


def _launched(name: str, argv: Sequence[str], patches: Patches, gpu: ProgramGPU) -> Launch:
    """What a launcher starts; its environment is set."""
    launch = launched(name, argv, patches, gpu)
    n = max(launch.processes, 1)
    if n != gpu.ranks:
        raise WrongValue(processes.more_processes(n, gpu.ranks, len(gpu.meters)))
    if gpu.several is None:
        gpu.on_machine_of(launch.of_a_machine or gpu.count)
    for key, value in launch.environment.items():
        patches.set_item(os.environ, key, value)
    gpu.in_a_new_process()
    return launch


def _run(program: str, module: bool, gpu: ProgramGPU) -> tuple[str, BaseException | None]:
    try:
        try:
            _to_its_end(program, module, gpu)
        except KeyboardInterrupt:
            if gpu.ended is None:
                raise
        if gpu.ended is not None:
            raise gpu.ended
    except EndOfRun:
        return FITS, None
    except SystemExit as exit:
        return (FITS, None) if exit.code in (None, 0) else (FAILED, exit)
    except (torch.OutOfMemoryError, HostOutOfMemory) as error:
        return OOM, error
    except Exception as error:
        return FAILED, error
    return FITS, None


def _to_its_end(program: str, module: bool, gpu: ProgramGPU) -> None:
    """Run it, and name what it never called while that is there."""
    variables = None
    try:
        if module:
            variables = runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            variables = runpy.run_path(program, run_name="__main__")
        wait_for_threads(gpu)
    finally:
        if not gpu.watch.steps:
            gpu.watch.find_everything()
        del variables
