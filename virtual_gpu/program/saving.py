"""`torch.save` of tensors on the GPU: a storage comes to the CPU when its turn to be written is there, not before."""

from __future__ import annotations

import contextlib
import functools
import json
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import known
from .device import ProgramGPU
from .patches import Patches


class Saving:
    """What stands in a file's list of storages for those on the GPU: without bytes, until PyTorch asks for them.

    So a save needs RAM for the largest storage, and tensors that share one are written once, as PyTorch's own does
    (`_save` in torch/serialization.py: pickle first, then `storage.cpu()` one after another).
    """

    _ON_THE_CPU = 2**28  # bytes of a sparse file's real tensors; what would be more is a hole too

    def __init__(self, patches: Patches, gpu: ProgramGPU):
        self._gpu = gpu
        self._storages: dict[int, Any] | None = None  # of the save under way, by the storage on the GPU
        self._sparse = False
        save, to_cpu = torch.serialization._save, torch.UntypedStorage.cpu

        @functools.wraps(save)
        def in_turn(obj: Any, zip_file: Any, *args: Any, **kwargs: Any) -> Any:
            before, self._storages = self._storages, {}
            try:
                return save(obj, _WithHoles(zip_file, self._ON_THE_CPU) if self._sparse else zip_file, *args, **kwargs)
            finally:
                self._storages = before

        def cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
            source = getattr(storage, "stands_for", None)
            if source is None:
                return to_cpu(storage)
            if not self._sparse:
                return _whole(source.cpu())
            if known.values_of(source) is None and source.numel() > known.MASKS:
                return storage
            return self._small(source)

        patches.set(torch.serialization, "_save", in_turn)
        patches.set(torch.UntypedStorage, "cpu", cpu)

    @contextlib.contextmanager
    def sparsely(self) -> Iterator[None]:
        """In here many unknown numbers are a hole in the file, few are what the program would be told."""
        before, self._sparse = self._sparse, True
        try:
            yield
        finally:
            self._sparse = before

    def _small(self, source: torch.Tensor) -> torch.UntypedStorage:
        """The bytes of a tensor that nobody has asked for."""
        with _disable_current_modes():
            return _whole(self._real(source))

    def _real(self, source: torch.Tensor) -> torch.Tensor:
        real = known.values_of(source)
        return torch.full(source.shape, self._gpu.answers.told(source), dtype=source.dtype) if real is None else real

    def write_safetensors(self, tensors: dict[str, torch.Tensor], path: str, metadata: dict[str, str] | None) -> None:
        """A file in safetensors' format (its README, "Format"), with the same holes as PyTorch's.

        What the library refuses is refused in its words. OSError for a full disk.
        """
        from safetensors import torch as library

        if check := getattr(library, "_evaluate_tensors_for_save", None):  # since 0.8
            check(tensors)
        names, header, end = {dtype: name for name, dtype in library._TYPES.items()}, {}, 0
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {"dtype": names[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
        said = json.dumps(header if metadata is None else {"__metadata__": metadata} | header).encode()
        left = self._ON_THE_CPU
        with open(path, "wb") as file, _disable_current_modes():
            file.write(len(said).to_bytes(8, "little") + said)
            start = file.tell()
            file.truncate(start + end)
            for name, tensor in tensors.items():
                begin, end = header[name]["data_offsets"]
                if self._gpu.owns(tensor):
                    if known.values_of(tensor) is None and tensor.numel() > known.MASKS:
                        continue
                    tensor = self._real(tensor)
                elif (left := left + begin - end) < 0:
                    break
                file.seek(start + begin)
                file.write(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)

    def reduced(self, tensor: torch.Tensor, protocol: int) -> Any:
        """What pickle keeps of a tensor on the GPU; outside of `torch.save` its bytes at once."""
        if isinstance(tensor, torch.nn.Parameter):
            return torch._utils._rebuild_parameter, (tensor.detach(), tensor.requires_grad, OrderedDict())
        if tensor.layout is torch.sparse_coo:
            parts = tensor._indices(), tensor._values(), tensor.size(), tensor.is_coalesced()
            return torch._utils._rebuild_sparse_tensor, (tensor.layout, parts)
        if self._storages is None:
            on_cpu = tensor.cpu()
            on_cpu.untyped_storage().was_on = str(tensor.device)  # a file says where its tensors were
            return torch.Tensor.__reduce_ex__(on_cpu, protocol)
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
            stands_in.stands_for, stands_in.was_on = whole, str(tensor.device)
            self._storages[storage._cdata] = stands_in
        return self._storages[storage._cdata]


class _WithHoles:
    """A file that PyTorch writes, in which what has no bytes leaves its room and takes none on the disk.

    left: bytes of real tensors that are written.
    """

    def __init__(self, file: Any, left: int):
        self._file, self._left = file, left

    def write_record(self, name: str, record: Any, nbytes: int) -> None:
        """As PyTorch's."""
        if isinstance(record, torch.UntypedStorage):
            if record.device.type == "meta" or nbytes > self._left:
                self._file.write_record_metadata(name, nbytes)
                return
            self._left -= nbytes
        self._file.write_record(name, record, nbytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _whole(tensor: torch.Tensor) -> torch.UntypedStorage:
    """A storage with all of a tensor's bytes, also where it is one number, expanded."""
    storage = tensor.untyped_storage()
    if storage.nbytes() >= tensor.numel() * tensor.element_size():
        return storage
    with _disable_current_modes():  # counted already, as large as it seems
        return tensor.contiguous().untyped_storage()
