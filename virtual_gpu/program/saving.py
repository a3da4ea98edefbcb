"""`torch.save` of tensors on the GPU: a storage comes to the CPU when its turn to be written is there, not before."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import torch

from .device import ProgramGPU
from .patches import Patches


class Saving:
    """What stands in a file's list of storages for those on the GPU: without bytes, until PyTorch asks for them.

    So a save needs RAM for the largest storage, and tensors that share one are written once, as PyTorch's own does
    (`_save` in torch/serialization.py: pickle first, then `storage.cpu()` one after another).
    """

    def __init__(self, patches: Patches, gpu: ProgramGPU):
        self._gpu = gpu
        self._storages: dict[int, Any] | None = None  # of the save under way, by the storage on the GPU
        save, to_cpu = torch.serialization._save, torch.UntypedStorage.cpu

        @functools.wraps(save)
        def in_turn(*args: Any, **kwargs: Any) -> Any:
            before, self._storages = self._storages, {}
            try:
                return save(*args, **kwargs)
            finally:
                self._storages = before

        def cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
            source = getattr(storage, "stands_for", None)
            return to_cpu(storage) if source is None else source.cpu().untyped_storage()

        patches.set(torch.serialization, "_save", in_turn)
        patches.set(torch.UntypedStorage, "cpu", cpu)

    def reduced(self, tensor: torch.Tensor, protocol: int) -> Any:
        """What pickle keeps of a tensor on the GPU; outside of `torch.save` its bytes at once."""
        if isinstance(tensor, torch.nn.Parameter):
            return torch._utils._rebuild_parameter, (tensor.detach(), tensor.requires_grad, OrderedDict())
        if self._storages is None:
            tensor = tensor.cpu()
            tensor.untyped_storage().was_on = str(self._gpu.device)  # a file says where its tensors were
            return torch.Tensor.__reduce_ex__(tensor, protocol)
        return torch._utils._rebuild_tensor_v2, (
            torch.storage.TypedStorage(wrap_storage=self._standing_for(tensor), dtype=tensor.dtype, _internal=True),
            tensor.storage_offset(), tuple(tensor.size()), tensor.stride(), tensor.requires_grad, OrderedDict(),
        )  # fmt: skip

    def _standing_for(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            stands_in = torch.UntypedStorage(storage.nbytes(), device="meta")
            elements = storage.nbytes() // tensor.element_size()
            # the tensor itself where it is all there is: its values may be known
            whole = tensor if tensor.numel() == elements else tensor.detach().as_strided((elements,), (1,), 0)
            stands_in.stands_for, stands_in.was_on = whole, str(self._gpu.device)
            self._storages[storage._cdata] = stands_in
        return self._storages[storage._cdata]
