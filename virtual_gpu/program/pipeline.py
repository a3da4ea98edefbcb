"""Pipeline stages (`torch.distributed.pipelining`): what one stage has to know of its neighbours.

Before the first micro-batch each stage tells the next one the shapes of its outputs, and the one before those of the
gradients (torch/distributed/pipelining/stage.py, PyTorch 2.13). A gradient is as large as what it is the gradient of.
What comes in from the stage before only that stage's rank knows: the program is run as that rank, in a process of its
own, until it has said so. What one stage has said none of these processes asks again.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..language import tr
from .ends import EndOfRun
from .imports import Imports
from .patches import Patches
from .values import ValueStop

Ask = Callable[[int, int], tuple]  # (rank, stage) → the metadata of what the stage on that rank sends on
_SAID = "VIRTUAL_GPU_STAGES"  # the folder of what stages have said, in the environment of the processes that ask


def install(patches: Patches, imports: Imports, ask: Ask, told: tuple[int, str] | None = None) -> None:
    """Answer for the neighbours of a stage. told: (stage, file): end the program once that stage's outputs are known,
    and write what they are into the file."""

    def stages(module: ModuleType) -> None:
        kind = module.PipelineStage

        def vote(stage: Any, has_backward: bool, received_acc: Any = None) -> torch.Tensor:
            asks = module.InferenceMode.needs_dynamic(stage._user_meta, has_backward)
            return torch.tensor([0 if asks else 1], dtype=torch.int32, device=stage.device)

        def receive(stage: Any, source: int) -> Any:
            if source > stage.stage_index:
                gradients = module._derive_grad_metas(stage._stage_meta.outputs)
                return module._StageBackwardMeta(backward_metas=gradients)
            inputs = stage._user_meta.inputs or ask(stage._resolve_peer_global_rank(source), source)
            return module._StageForwardMeta(forward_metas=inputs)

        def send(stage: Any, meta: Any, to: int) -> None:
            if told is not None and (stage.stage_index, to) == (told[0], told[0] + 1):
                Path(told[1]).write_bytes(pickle.dumps(meta.forward_metas))
                raise EndOfRun

        if hasattr(kind, "_recv_meta"):
            patches.set_all(kind, {"_recv_meta": receive, "_send_meta": send, "_warmup_forward_vote": vote})
            patches.set(kind, "_warmup_backward_result", lambda stage, received_result: received_result)  # all agree

    imports.after("torch.distributed.pipelining.stage", stages)


def ask_by_running(options: Sequence[str], command: Sequence[str]) -> Ask:
    """The answer of another rank of this program, run with these options of `virtual-gpu run`."""

    ours: list[tempfile.TemporaryDirectory] = []  # gone with this process

    def folder() -> str:
        if _SAID not in os.environ and not ours:
            ours.append(tempfile.TemporaryDirectory())
        return os.environ.get(_SAID) or ours[0].name

    def ask(rank: int, stage: int) -> tuple:
        path = Path(folder()) / f"{stage}.pickle"
        if not path.exists():
            program = [sys.executable, "-m", "virtual_gpu", "run", *options, "--unlimited", "--no-advise"]
            done = subprocess.run(
                [*program, "--rank", str(rank), "--sent", str(stage), str(path), *command],
                env={**os.environ, _SAID: folder()}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
            if not path.exists():
                why = (done.stderr.strip().splitlines() or [""])[-1]
                raise ValueStop(
                    tr(
                        ko=f"rank {rank}이 스테이지 {stage}의 출력을 알려 주지 않았다: {why}",
                        en=f"rank {rank} did not say what stage {stage} sends on: {why}",
                    )
                )
        return pickle.loads(path.read_bytes())  # of our own child, or of the process whose child this is

    return ask
