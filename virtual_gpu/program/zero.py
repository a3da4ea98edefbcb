"""DeepSpeed's ZeRO: what it keeps in a buffer of its own, told to the watch. Its code runs as it is."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from .imports import Imports
from .patches import Patches
from .watch import Watch


def install(patches: Patches, imports: Imports, watch: Watch) -> None:
    """At stage 3 the gradients that a rank keeps are one buffer (DeepSpeed 0.19.8, runtime/zero/stage3.py)."""

    def stage3(module: ModuleType) -> None:
        kind = module.DeepSpeedZeroOptimizer_Stage3
        set_up = kind._setup_for_real_optimizer

        @functools.wraps(set_up)
        def claimed(optimizer: Any) -> None:
            set_up(optimizer)
            watch.claim([optimizer.grad_partitions_flat_buffer], "gradients")

        patches.set(kind, "_setup_for_real_optimizer", claimed)

    imports.after("deepspeed.runtime.zero.stage3", stage3)
