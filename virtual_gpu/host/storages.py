"""The CPU's tensors of a program on a virtual GPU: they are real, and each storage is counted while it lives.

Weights that nobody reads are not filled: random numbers are not drawn, and `from_pretrained` reads no file. A copy of
such a tensor is made without filling it either, so that a model of 14 GB takes address space here, and no RAM.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ..interrupts import Releases
from .meter import MAPPED, HostMeter
from .process import is_file_backed
from .report import HostReport, host_report

if TYPE_CHECKING:
    import weakref

_aten = torch.ops.aten
FILLS = frozenset((_aten.normal_.default, _aten.uniform_.default))
LARGE = 2**16  # elements from which on a random fill is skipped
SMALL = 64  # elements below which what an operation makes is not counted: programs make millions of such
_COPIES = frozenset((_aten._to_copy.default, _aten.clone.default))
_COPY_ = _aten.copy_.default
# Steps whose kernels take every element to lie after the one before; a GPU tensor's copy may be one number, expanded.
_FUSED = frozenset((_aten._fused_adam_.default, _aten._fused_adamw_.default, _aten._fused_sgd_.default))
_TYPES = (torch.Tensor, torch.nn.Parameter)


def _writes_first(func: Any) -> bool:
    alias = func._schema.arguments[0].alias_info
    return alias is not None and alias.is_write


def _same_everywhere(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value that all elements of a tensor on the CPU have; None where they differ."""
    of_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size())
    if of_bits is None or tensor.layout is not torch.strided:
        return None
    bits = tensor.detach().view(of_bits)  # NaN is equal to itself so, and 8-bit floats can be compared
    low, high = torch.aminmax(bits)
    return tensor.detach().as_strided((), ()) if torch.equal(low, high) else None


class Entry:
    """One storage: its pageable block, or the size of its pinned one; unfilled: nobody has written its values.

    stands_for: bytes of the tensor of equal values that it is, where it holds that number alone, expanded; else 0.
    """

    __slots__ = ("block", "pinned", "references", "stands_for", "unfilled")

    def __init__(self, block: int | None, pinned: int | None, unfilled: bool, stands_for: int):
        self.block, self.pinned, self.unfilled, self.stands_for = block, pinned, unfilled, stands_for
        self.references: tuple[weakref.ref, weakref.ref] | None = None


class HostStorages:
    """Storage → what it takes of the host's RAM. unfilled_bytes: of random numbers that were not drawn."""

    def __init__(self, meter: HostMeter):
        self.meter = meter
        self.entries: dict[int, Entry] = {}
        self.numbers: set[int] = set()  # the entries that are one number, expanded
        self.unfilled_bytes = 0

        def release(key: int, entries: dict[int, Entry] = self.entries, numbers: set[int] = self.numbers) -> None:
            gone = entries.pop(key)
            numbers.discard(key)
            if gone.block is not None:
                meter.free(gone.block)
            else:
                meter.unpin(gone.pinned)

        self.releases = Releases(release)

    def run(self, func: Any, args: tuple, kwargs: dict | None) -> Any:
        """Run an operation on the CPU's tensors, and count what it makes."""
        first = args[0] if args and type(args[0]) in _TYPES else None
        if func in FILLS and first.numel() >= LARGE:
            self.unfilled(first)
            return first
        pinned = bool(kwargs and kwargs.get("pin_memory"))
        if pinned:
            kwargs = {**kwargs, "pin_memory": False}
        if first is not None and (first.numel() >= LARGE or func._schema.is_mutable):
            known = self._known(first)
            if known is not None and (known.unfilled or known.block is not None):
                out = self._special(func, args, kwargs or {}, known)
                if out is not None:
                    return out
        elif func._schema.is_mutable:  # a list (foreach), or `out=`
            for item in (*(args[0] if args and isinstance(args[0], (list, tuple)) else ()), (kwargs or {}).get("out")):
                if type(item) in _TYPES:
                    self.written(item)
        if self.numbers and func._schema.is_mutable and self._written_as_numbers(func, args, kwargs or {}):
            return first
        if func in _FUSED:
            args = tree_map_only(torch.Tensor, torch.Tensor.contiguous, args)
        out = func(*args, **kwargs or {})
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if type(item) in _TYPES and (pinned or item.numel() >= SMALL):
                mapped = func.is_view and self._of_a_file(item)
                self.count(item, MAPPED if mapped else "other", pinned=pinned)
        return out

    def _special(self, func: Any, args: tuple, kwargs: dict, known: Entry) -> Any:
        """A copy of values that nobody wrote, made without filling it; None where the operation has to run."""
        if known.unfilled and func in _COPIES and (kwargs.get("device") or torch.device("cpu")).type == "cpu":
            kind = kwargs.get("dtype") or args[0].dtype
            form = kwargs.get("memory_format") or torch.preserve_format
            out = torch.empty_like(args[0], dtype=kind, memory_format=form)
            self.count(out, unfilled=True)
            return out
        if func._schema.is_mutable:
            if func is _COPY_ and known.unfilled and self._unfilled(args[1]):
                return args[0]
            known.unfilled = False
            if known.block is not None:
                held = self.meter.blocks.get(known.block)
                if held is not None and held.category == MAPPED:  # a private page of a file, copied when it is written
                    self.meter.label(known.block, "other")
        return None

    def _is_number(self, tensor: Any) -> bool:
        """Whether a tensor is one number, expanded, and all of what that stands for."""
        known = self._known(tensor) if type(tensor) in _TYPES else None
        return known is not None and known.stands_for == tensor.numel() * tensor.element_size()

    def _written_as_numbers(self, func: Any, args: tuple, kwargs: dict) -> bool:
        """Write tensors that are one number on that number, where all that they meet are numbers too; else False.

        Gradients that were copied to the CPU are added up so, and clipped, and weights that wait there for their turn
        on the card overwritten. What is left PyTorch refuses: it cannot write an expanded tensor.
        """
        if func is _COPY_:
            return self._is_number(args[0]) and self._copied_as_number(*args[:2])
        alike = torch.Tag.pointwise in func.tags or func.name().startswith("aten::_foreach_")
        if not alike or not args or not _writes_first(func) or "out" in kwargs:
            return False
        columns = [[*column] if isinstance(column, (list, tuple)) else [column] for column in args]
        for i, written in enumerate(columns[0]):
            if not self._is_number(written):
                continue
            row = [(column, min(i, len(column) - 1)) for column in columns if column]
            tensors = [(column, j) for column, j in row if isinstance(column[j], torch.Tensor)]
            if not all(column[j].numel() == 1 or self._is_number(column[j]) for column, j in tensors):
                return False
            for column, j in tensors:
                column[j] = column[j].reshape(()) if column[j].numel() == 1 else column[j].as_strided((), ())
        if not any(map(self._is_number, args[0] if isinstance(args[0], (list, tuple)) else args[:1])):
            return False
        func(*(c if isinstance(x, (list, tuple)) else c[0] for c, x in zip(columns, args, strict=True)), **kwargs)
        return True

    def _copied_as_number(self, number: torch.Tensor, source: torch.Tensor) -> bool:
        """Overwrite a tensor that is one number with one whose values are equal, or that nobody wrote; else False."""
        if self._unfilled(source):
            return True
        if source.numel() == 1 or self._is_number(source):
            value = source.as_strided((), ())
        else:
            value = _same_everywhere(source) if type(source) in _TYPES else None
        if value is None:
            return False
        number.as_strided((), ()).copy_(value)
        return True

    def report(self, *, killed: bool = False) -> HostReport:
        """What the host's RAM was needed for until now. killed: it ended here."""
        self.releases.settle()
        return host_report(self.meter, killed=killed)

    def unfilled(self, tensor: torch.Tensor) -> None:
        """Random numbers that were to fill this tensor are not drawn."""
        self.unfilled_bytes += tensor.numel() * tensor.element_size()
        self.count(tensor, unfilled=True)

    def unwritten(self, shape: torch.Size, dtype: torch.dtype, category: str | None) -> torch.Tensor:
        """Zeros that stand for weights of a file that is not read; with category None they are not counted yet."""
        with _disable_current_modes():
            # NumPy's zeros are the system's: no page is touched, where `torch.zeros` writes every one
            memory = np.zeros(shape.numel() * dtype.itemsize, np.uint8)
            tensor = torch.from_numpy(memory).view(dtype).view(shape)
        if category is not None:
            self.count(tensor, category, unfilled=True)
        return tensor

    def written(self, tensor: torch.Tensor) -> None:
        """Somebody may write into this tensor unseen: its values are the program's own."""
        known = self._known(tensor)
        if known is not None:
            known.unfilled = False

    def _unfilled(self, tensor: Any) -> bool:
        known = self._known(tensor) if type(tensor) in _TYPES else None
        return known is not None and known.unfilled

    def _known(self, tensor: torch.Tensor) -> Entry | None:
        """What is counted of a tensor on the CPU; None where nothing is."""
        if tensor.layout is not torch.strided:
            return None
        self.releases.settle()  # else an address that is used again would be taken for the storage that was there
        return self.entries.get(tensor.untyped_storage()._cdata)

    def _of_a_file(self, tensor: torch.Tensor) -> bool:
        """Whether a storage that no operation made is a file's (safetensors', np.memmap): its pages are the file's."""
        if tensor.numel() < LARGE or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return False
        return self._known(tensor) is None and is_file_backed(tensor.untyped_storage().data_ptr())

    def count(
        self,
        tensor: torch.Tensor,
        category: str = "other",
        *,
        nbytes: int | None = None,
        pinned: bool = False,
        unfilled: bool = False,
    ) -> None:
        """Count the storage of a tensor on the CPU, unless it is counted.

        nbytes: what it would take where the storage is less (one number, expanded). unfilled: nobody wrote its values.
        HostOutOfMemory where the machine has no room for it.
        """
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return
        known = self._known(tensor)
        if known is not None:
            known.unfilled = known.unfilled or unfilled
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes() if nbytes is None else nbytes
        if not size:
            return
        stands_for = size if size > storage.nbytes() else 0
        if pinned:
            entry = Entry(None, self.meter.pin(size), unfilled, stands_for)
        else:
            entry = Entry(self.meter.allocate(size, category), None, unfilled, stands_for)
        if stands_for:
            self.numbers.add(storage._cdata)
        entry.references = self.releases.watch(storage, storage._cdata)
        self.entries[storage._cdata] = entry

    def label(self, tensors: Iterable[Any], category: str) -> None:
        """Say what tensors are; those that are on no CPU, or are not counted, are passed over."""
        for tensor in tensors:
            if type(tensor) in _TYPES:
                known = self._known(tensor)
                if known is not None and known.block is not None:
                    held = self.meter.blocks.get(known.block)
                    if held is not None and held.category != MAPPED:
                        self.meter.label(known.block, category)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor on the CPU lies in pinned memory."""
        known = self._known(tensor) if tensor.device.type == "cpu" else None
        return known is not None and known.pinned is not None

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory; a tensor that is there already is returned as it is."""
        if self.is_pinned(tensor):
            return tensor
        unfilled = self._unfilled(tensor)
        with _disable_current_modes(), torch.no_grad():
            copy = torch.empty_like(tensor) if unfilled else tensor.clone()
        self.count(copy, pinned=True, unfilled=unfilled)
        return copy
