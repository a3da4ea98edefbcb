"""What a program writes to keep its weights: nothing is written, since there are no weights, and it is said once."""

from __future__ import annotations

import functools
import inspect
import io
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..language import tr
from .imports import Imports
from .patches import Patches
from .watch import SAVING, Watch


def install(patches: Patches, imports: Imports, watch: Watch) -> None:
    """Replace `torch.save`, and safetensors', transformers', peft's and accelerate's savers.

    A storage by itself is still written: that is how Python's pickle copies a tensor to another process. So is what
    goes into memory, to be read from there, up to _IN_MEMORY bytes of tensors.
    """

    def skip(owner: Any, name: str, what: str) -> Any:
        @functools.wraps(getattr(owner, name), assigned=("__name__", "__qualname__", "__doc__"))
        def skipped(*args: Any, **kwargs: Any) -> None:
            if args and isinstance(args[0], (torch.UntypedStorage, torch.TypedStorage)):
                patches.original(owner, name)(*args, **kwargs)
                return
            before = watch.phase
            watch.enter(SAVING)
            try:
                if owner is torch and _in_memory(args, kwargs):
                    patches.original(owner, name)(*args, **kwargs)
                else:
                    watch.note(
                        tr(
                            ko=f"{what}: 가중치가 없으므로 쓰지 않았다",
                            en=f"{what} wrote nothing: there are no weights",
                        )
                    )
                    if owner is torch and (opened := _emptied(args, kwargs)):
                        watch.note(
                            tr(
                                ko=f"프로그램이 쓰려고 연 {opened}은(는) 빈 파일이 되었다(open이 비운다)",
                                en=f"{opened}, which the program opened to write, is empty now (open does that)",
                            )
                        )
            finally:
                watch.enter(before)

        return skipped

    patches.set(torch, "save", skip(torch, "save", "torch.save"))
    for module, owner, names in _SAVERS:

        def install_there(loaded: ModuleType, owner: str = owner, names: tuple[str, ...] = names) -> None:
            kind = getattr(loaded, owner) if owner else loaded
            for name in names:
                if hasattr(kind, name):
                    patches.set(kind, name, skip(kind, name, f"{owner or loaded.__name__}.{name}"))

        imports.after(module, install_there)


def _in_memory(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether `torch.save` is given a buffer, and what it is to hold is not more than this machine should."""
    given = _OF_SAVE.bind_partial(*args, **kwargs).arguments
    if not isinstance(given.get("f"), io.BytesIO):
        return False
    storages = {}
    for leaf in tree_leaves(given.get("obj")):
        parts = chain(leaf.parameters(), leaf.buffers()) if isinstance(leaf, torch.nn.Module) else (leaf,)
        for part in parts:
            if isinstance(part, torch.Tensor):
                storage = part.untyped_storage()  # it is written whole
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values()) <= _IN_MEMORY


def _emptied(args: tuple, kwargs: dict[str, Any]) -> str:
    """The file on disk that the program itself opened for `torch.save`, by name; empty where there is none."""
    given = _OF_SAVE.bind_partial(*args, **kwargs).arguments.get("f")
    name = getattr(given, "name", None)
    writes = "w" in str(getattr(given, "mode", ""))
    return name if isinstance(name, str) and writes else ""


_IN_MEMORY = 2**28
_OF_SAVE = inspect.signature(torch.save)
_SAVERS = (
    ("transformers.modeling_utils", "PreTrainedModel", ("save_pretrained", "push_to_hub")),
    ("transformers.trainer", "Trainer", ("save_model", "_save_checkpoint", "push_to_hub", "create_model_card")),
    ("peft.peft_model", "PeftModel", ("save_pretrained", "push_to_hub", "create_or_update_model_card")),
    ("accelerate.accelerator", "Accelerator", ("save_state", "save_model", "save")),
    ("safetensors.torch", "", ("save_file", "save_model")),
)
