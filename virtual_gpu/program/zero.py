"""DeepSpeed, whose code runs as it is: its steps, what ZeRO keeps in a buffer of its own; nothing is left behind."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from torch.nn import functional

from .imports import Imports
from .patches import Patches
from .watch import Watch

_CONFIGURATION = "_hf_deepspeed_config_weak_ref"


def install(patches: Patches, imports: Imports, watch: Watch) -> None:
    """An engine's step is one; at stage 3 the gradients that a rank keeps are a buffer (0.19.8, zero/stage3.py)."""

    def transformers_of(module: ModuleType) -> None:
        """The stage-3 configuration that a program leaves: by it transformers splits every later model."""
        patches.set(module, _CONFIGURATION, getattr(module, _CONFIGURATION))

    def stage3(module: ModuleType) -> None:
        kind = module.DeepSpeedZeroOptimizer_Stage3
        set_up = kind._setup_for_real_optimizer

        @functools.wraps(set_up)
        def claimed(optimizer: Any) -> None:
            set_up(optimizer)
            watch.claim([optimizer.grad_partitions_flat_buffer], "gradients")

        patches.set(kind, "_setup_for_real_optimizer", claimed)

    def engine(module: ModuleType) -> None:
        """In an engine's step the optimizer steps once for each parameter group, at stage 3 for each sub-group."""
        kind = module.DeepSpeedEngine
        step = kind.step

        @functools.wraps(step)
        def counted(engine: Any, *args: Any, **kwargs: Any) -> Any:
            before, watch.within_a_step = engine.global_steps, True
            try:
                result = step(engine, *args, **kwargs)
            finally:
                watch.within_a_step = False
            if engine.global_steps > before:  # gradients were not only accumulated
                watch.count_step(engine)
            return result

        patches.set(kind, "step", counted)

    if "deepspeed" not in sys.modules:
        patches.later(_forget)
    for name in ("linear", "embedding"):  # stage 3 replaces them for good
        patches.set(functional, name, getattr(functional, name))
    imports.after("deepspeed.runtime.engine", engine)
    imports.after("deepspeed.runtime.zero.stage3", stage3)
    imports.after("transformers.integrations.deepspeed", transformers_of)


def _forget() -> None:
    """It keeps its process group, its device and the functions of PyTorch that it found: it is to be imported anew."""
    for name in [name for name in sys.modules if name == "deepspeed" or name.startswith("deepspeed.")]:
        del sys.modules[name]
