"""What a program writes to keep its weights: nothing is written, since there are no weights, and it is said once."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .patches import Patches
from .watch import SAVING, Watch


def install(patches: Patches, watch: Watch) -> None:
    """Replace `torch.save`, and where they are loaded safetensors, transformers', peft's and accelerate's savers."""

    def skip(what: str) -> Any:
        def skipped(*args: Any, **kwargs: Any) -> None:
            before = watch.phase
            watch.enter(SAVING)
            watch.note(f"{what} wrote nothing: there are no weights")
            watch.enter(before)

        return skipped

    patches.set(torch, "save", skip("torch.save"))
    for module, owner, names in (
        ("transformers.modeling_utils", "PreTrainedModel", ("save_pretrained", "push_to_hub")),
        ("transformers.trainer", "Trainer", ("save_model", "_save_checkpoint", "push_to_hub", "create_model_card", "_load_best_model")),
        ("peft", "PeftModel", ("save_pretrained", "push_to_hub", "create_or_update_model_card")),
        ("accelerate", "Accelerator", ("save_state", "save_model", "save")),
    ):
        if module in sys.modules:
            kind = getattr(sys.modules[module], owner)
            for name in names:
                if hasattr(kind, name):
                    patches.set(kind, name, skip(f"{owner}.{name}"))
    if "safetensors.torch" in sys.modules:
        for name in ("save_file", "save_model"):
            patches.set(sys.modules["safetensors.torch"], name, skip(f"safetensors' {name}"))
