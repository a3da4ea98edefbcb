"""What a program writes to keep its weights: nothing is written, since there are no weights, and it is said once.

What it loads again within the run it finds (`own_files`).
"""

from __future__ import annotations

import builtins
import functools
import inspect
import io
import os
import tempfile
from collections.abc import Callable
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..language import tr
from .imports import Imports
from .own_files import OwnFiles
from .patches import Patches
from .watch import SAVING, Watch


def install(patches: Patches, imports: Imports, watch: Watch) -> None:
    """Replace `torch.save`, and safetensors', transformers', peft's and accelerate's savers; keep checkpoints that are.

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
                    if name == "save_file":
                        own.save_tensors(watch.gpu.saving, *args, **kwargs)
                    if owner is torch and (opened := _emptied(args, kwargs)) and opened not in kept:
                        watch.note(
                            tr(
                                ko=f"프로그램이 쓰려고 연 {opened}은(는) 빈 파일이 되었다(open이 비운다)",
                                en=f"{opened}, which the program opened to write, is empty now (open does that)",
                            )
                        )
                    if owner is torch and (error := own.save(watch.gpu.saving, args, kwargs)):
                        watch.note(
                            tr(
                                ko=f"torch.save에서 pickle이 실패했다({error}). 프로그램의 객체 때문이면 진짜 "
                                "카드에서도 오류가 난다. 이 파일은 이 실행에서 다시 불러올 수 없다",
                                en=f"pickle failed in torch.save ({error}): on a card too, if it is for the program's "
                                "own objects; this run cannot load that file again",
                            )
                        )
            finally:
                watch.enter(before)

        return skipped

    own = watch.gpu.own_files = OwnFiles(patches)
    kept = _keep_checkpoints(patches, watch, own)
    patches.set(torch, "save", skip(torch, "save", "torch.save"))
    for module, owner, names in _SAVERS:

        def install_there(loaded: ModuleType, owner: str = owner, names: tuple[str, ...] = names) -> None:
            kind = getattr(loaded, owner) if owner else loaded
            for name in names:
                if hasattr(kind, name):
                    patches.set(kind, name, skip(kind, name, f"{owner or loaded.__name__}.{name}"))

        imports.after(module, install_there)
    for module in ("safetensors", "safetensors.torch"):
        imports.after(module, functools.partial(_find_tensors, patches, watch, own))


def _find_tensors(patches: Patches, watch: Watch, own: OwnFiles, loaded: ModuleType) -> None:
    """Let safetensors' `safe_open` find what this run has saved by its `save_file`."""
    shipped = loaded.safe_open

    @functools.wraps(shipped, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    def opened(filename: Any, *args: Any, **kwargs: Any) -> Any:
        if there := own.find(filename):
            watch.note(
                tr(
                    ko="safetensors: 이 실행이 저장한 것을 불러왔다. 크기와 자료형은 그대로이고, GPU에 있던 텐서의 "
                    "값은 알 수 없다",
                    en="safetensors found what this run had saved: its sizes and types, not the numbers of tensors "
                    "that were on the GPU",
                )
            )
        return shipped(there or filename, *args, **kwargs)

    patches.set(loaded, "safe_open", opened)


def _keep_checkpoints(patches: Patches, watch: Watch, own: OwnFiles) -> set[str]:
    """Let a program that opens a checkpoint to write over it write into the air; the names of those that were kept.

    `open(path, "wb")` empties the file before `torch.save`, which then has nothing to write into it. What this run
    saved itself is read where that is.
    """
    shipped, kept = builtins.open, set()

    @functools.wraps(shipped)
    def guarded(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        named = isinstance(file, (str, os.PathLike)) and isinstance(mode, str)
        if named and "w" in mode:
            own.forget(file)
        elif named and (there := own.find(file)):
            return shipped(there, mode, *args, **kwargs)
        if not named or "w" not in mode or "b" not in mode or not _is_checkpoint(shipped, file):
            return shipped(file, mode, *args, **kwargs)
        name = os.fspath(file)
        kept.add(name)
        watch.note(
            tr(
                ko=f"{name}: 있던 체크포인트를 그대로 두고, 프로그램이 쓴 것은 버렸다(--write-files면 쓴다)",
                en=f"{name} holds a checkpoint and was kept; what the program wrote over it is nowhere "
                "(--write-files writes)",
            )
        )
        with tempfile.TemporaryFile() as air:  # which goes with the descriptor that the program closes
            return shipped(file, mode, *args, **kwargs | {"opener": lambda *_: os.dup(air.fileno())})

    for owner in (builtins, io):
        patches.set(owner, "open", guarded)
    return kept


def _is_checkpoint(shipped: Callable[..., Any], file: Any) -> bool:
    """Whether a file is there that torch.save (as an archive or as before 1.6) or safetensors wrote."""
    try:
        with shipped(file, "rb") as there:
            head = there.read(256)
    except OSError:
        return False
    archive = head.startswith(b"PK") and b"/data.pkl" in head
    return archive or head.startswith(_OLD) or head[8:10] == b'{"'


_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch.serialization.MAGIC_NUMBER, pickled


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
    return os.fspath(name) if isinstance(name, (str, os.PathLike)) and writes else ""


_IN_MEMORY = 2**28
_OF_SAVE = inspect.signature(torch.save)
_SAVERS = (
    ("transformers.modeling_utils", "PreTrainedModel", ("save_pretrained", "push_to_hub")),
    ("transformers.trainer", "Trainer", ("save_model", "_save_checkpoint", "push_to_hub", "create_model_card")),
    ("peft.peft_model", "PeftModel", ("save_pretrained", "push_to_hub", "create_or_update_model_card")),
    ("accelerate.accelerator", "Accelerator", ("save_state", "save_model", "save")),
    ("safetensors.torch", "", ("save_file",)),  # which `save_model` calls
)
