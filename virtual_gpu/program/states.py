"""accelerate's state, which a process keeps: a program begins without it, and leaves none behind."""

from __future__ import annotations

from types import ModuleType

from .imports import Imports
from .patches import Patches


def install(patches: Patches, imports: Imports) -> None:
    """Give the block a state of its own: what was found of devices before is not what it will find."""

    def fresh(module: ModuleType) -> None:
        for name in ("PartialState", "AcceleratorState", "GradientState"):
            patches.set(getattr(module, name), "_shared_state", {})

    imports.after("accelerate.state", fresh)
