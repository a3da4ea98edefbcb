"""`torch.load`: the file is read as it is, and what belongs on the GPU takes its room there, one block a storage."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import _weights_only_unpickler as unpickler
from torch.utils._python_dispatch import _disable_current_modes

from ..counting.outputs import device_of
from ..host.meter import MAPPED
from ..language import tr
from . import known
from .device import ProgramGPU
from .patches import Patches


def install(patches: Patches, gpu: ProgramGPU) -> None:
    """Let `torch.load` put on the GPU what map_location, or else the file, says belongs there.

    Under a fake mode PyTorch would read no values at all; here what stays on the CPU has those of the file.
    """
    load, rebuild, rebuild_v3 = torch.load, torch._utils._rebuild_tensor, torch._utils._rebuild_tensor_v3

    category = "loading"

    @functools.wraps(load)
    def load_file(f: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal category
        category = MAPPED if kwargs.get("mmap") else "loading"
        own = gpu.own_files.find(f) if gpu.own_files is not None else None
        if own is not None:
            f, kwargs = own, {**kwargs, "mmap": True}  # its holes are not read
            gpu.watch.note(
                tr(
                    ko="torch.load: 이 실행이 torch.save로 저장한 것을 불러왔다. 크기와 자료형은 그대로이고, "
                    "GPU에 있던 텐서의 값은 알 수 없다. 파일마다 256 MiB를 넘는 CPU 텐서의 값은 0이 된다",
                    en="torch.load found what this run had saved: its sizes and types, not the numbers of tensors "
                    "that were on the GPU; of tensors on the CPU 256 MiB a file, the others are zeros",
                )
            )
        with _disable_current_modes():
            return load(f, *args, **kwargs)

    def to_gpu(storage: Any, device: Any = None, *_: Any, **__: Any) -> Any:
        card = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        gpu.check_index(card)
        with gpu.mode:
            storage.on_gpu = torch.empty(storage.nbytes(), dtype=torch.uint8, device=gpu.inside(card))
        return storage

    def restored(storage: Any, location: str) -> Any:
        return to_gpu(storage, location) if location.startswith("cuda") else None

    def tensor_of(storage: Any, *args: Any) -> torch.Tensor:
        return moved(storage, rebuild(storage, *args))

    def tensor_of_v3(storage: Any, *args: Any) -> torch.Tensor:
        return moved(storage, rebuild_v3(storage, *args))

    def moved(storage: Any, real: torch.Tensor) -> torch.Tensor:
        block = getattr(storage._untyped_storage, "on_gpu", None)
        if block is None:
            gpu.host.count(real, category)
            return real
        with gpu.mode:
            fake = torch.empty(0, dtype=real.dtype, device=device_of(block))
            fake.set_(block.untyped_storage(), real.storage_offset(), real.shape, real.stride())
        known.know(fake, real)
        return fake.requires_grad_(real.requires_grad)

    forget = unpickler._get_allowed_globals.cache_clear  # it holds the functions that rebuild tensors
    forget()
    patches.later(forget)
    patches.set(torch, "load", load_file)
    patches.set_all(torch._utils, {"_rebuild_tensor": tensor_of, "_rebuild_tensor_v3": tensor_of_v3})
    patches.set(torch.UntypedStorage, "cuda", to_gpu)
    # as `register_package` has them; before PyTorch's own
    package = 0, lambda storage: getattr(storage, "was_on", None), restored
    torch.serialization._package_registry.insert(0, package)
    patches.later(lambda: torch.serialization._package_registry.remove(package))
