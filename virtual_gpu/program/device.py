"""A virtual GPU that lives beside a real CPU: what each tensor of an unchanged program is on.

A fake tensor of device "cuda" does not work on a CPU build of PyTorch (autograd asks for a CUDA guard). A fake tensor
of "cpu:0" does, and PyTorch tells it apart from "cpu", where the program's real tensors are: copies between the two
are copies, a mixture of the two is PyTorch's own error, numbers of no dimension may be mixed. So "cpu:0" is the GPU
inside, and `tensors` shows it to the program as "cuda:0".
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.utils._pytree import tree_map

from ..allocator import CachingAllocator
from ..allocator_settings import AllocatorSettings
from ..cards import GPUSpec
from ..counting.gpu import VirtualGPU, format_size
from ..counting.meter import AllocationMeter
from ..counting.mode import DEVICE_QUERY, CountingMode, is_composite
from ..counting.outputs import device_of
from ..host.machines import Machine
from ..host.meter import HostMeter
from ..host.pinned import PinnedAllocator
from ..host.storages import HostStorages
from ..language import tr
from ..rules.pinned import ROUNDED
from ..rules.registry import parts
from . import known, routing
from .frames import program_line
from .several import SeveralCards, left_visible, no_such_card, to_see
from .sparse import Sparse, among, makes
from .streams import Streams
from .values import Values, ValueStop, is_drawn

_aten = torch.ops.aten
_FACTORIES = {
    name: getattr(torch, name) for name in ("empty", "empty_strided", "full", "zeros", "ones", "arange", "eye", "randn")
}
GPU = torch.device("cpu:0")
_HUGE = 2**24  # elements of a copy on the CPU from which on it is one number, expanded
_ITEM = _aten._local_scalar_dense.default
_TO_COPY = _aten._to_copy.default
_TO, _TO_DEVICE, _TO_OTHER = _aten.to.dtype_layout, _aten.to.device, _aten.to.other
_COPY_ = _aten.copy_.default
_HISTC, _EQUAL, _ALLCLOSE = _aten.histc.default, _aten.equal.default, _aten.allclose.default
_TOP_K = _aten.topk
_INDEX, _MASKED_SELECT = _aten.index.Tensor, _aten.masked_select.default
_NONZERO, _ALIAS = _aten.nonzero.default, _aten.alias.default
_CPU = torch.device("cpu")
_BINCOUNT, _UNIQUE_DIM = _aten.bincount.default, _aten.unique_dim.default
_UNIQUE_CONSECUTIVE = _aten.unique_consecutive.default
_AT_MOST = frozenset((_BINCOUNT, _UNIQUE_DIM, _UNIQUE_CONSECUTIVE, _aten._unique2.default))
_OVERWRITES = frozenset((_COPY_, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default))
NESTED = "a nested tensor (torch.nested) on a virtual GPU"
_CTC, _CTC_BACKWARD = _aten._ctc_loss.default, _aten._ctc_loss_backward.default
_PACK = _aten._pack_padded_sequence.default
_LSTSQ = _aten.linalg_lstsq.default


@functools.cache
def _draws(func: Any) -> bool:
    """Whether an operation draws numbers: what is compared with them picks neither all nor nothing."""
    return torch.Tag.nondeterministic_seeded in func.tags


def is_gpu(device: torch.device | None) -> bool:
    """Whether a device, as the program or as PyTorch inside names it, is the virtual GPU."""
    return device is not None and (device.type == "cuda" or (device.index is not None and device.type == "cpu"))


def _named(func: Any, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
    """`to` with a device and a type, as inference mode brings it whole: by the form that names the device."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if (other := given.pop("other", None)) is not None:
        given |= {"device": device_of(other) if type(other) is FakeTensor else other.device, "dtype": other.dtype}
    return _TO, (given.pop("self"),), given


class _Entered(threading.local):
    """How often a thread has entered a mode, as `FakeTensorMode` keeps it."""

    def __init__(self) -> None:
        self.stack: list[Any] = []


@contextlib.contextmanager
def _pytorchs_factories() -> Iterator[None]:
    """Inside, PyTorch's rules of shapes and ours make what they ask for: a program may have put others in their place.

    DeepSpeed's `zero.Init` has ones that cast.
    """
    theirs = {name: getattr(torch, name) for name in _FACTORIES}
    vars(torch).update(_FACTORIES)
    try:
        yield
    finally:
        vars(torch).update(theirs)


class ProgramMode(CountingMode):
    """On during the whole program: operations on real tensors pass, those on the GPU's are counted.

    turn: held by the thread whose operation runs; the others wait for it.
    """

    def __init__(self, gpu: ProgramGPU):
        self._entered = _Entered()
        super().__init__(gpu)
        self.turn = threading.RLock()
        self.releases.turn = self.turn
        self.over = False  # the block has ended: what comes here comes from a thread that goes on
        self.values: Values = gpu.answers
        self.values.on_assumed = self._note_choice
        self.sparse = Sparse(self)
        self._of_empty: dict[int, int] = {}  # storage that was resized to nothing → its card, of several
        self.generator = torch.Generator().manual_seed(0)  # not the program's, which would draw other numbers then

    @property
    def enter_stack(self) -> list[Any]:
        """What PyTorch pushes when a mode is entered, and pops when it is left: each thread's own."""
        return self._entered.stack

    @enter_stack.setter
    def enter_stack(self, stack: list[Any]) -> None:
        self._entered.stack = stack

    def is_inside(self) -> bool:
        """Whether this thread is in the middle of an operation."""
        return self.inside and self.turn._is_owned()

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """As `CountingMode` says; other threads wait."""
        with self.turn, super().uncounted():
            yield

    def count(self, tensor: torch.Tensor, category: str = "activations") -> None:
        """As `CountingMode` says, on the card that the tensor is on."""
        several = self.gpu.several
        card = device_of(tensor).index if several is not None and type(tensor) is FakeTensor else None
        if self._of_empty and tensor.untyped_storage()._cdata not in self.storages:
            self._of_empty.pop(tensor.untyped_storage()._cdata, None)  # the one that was there
        if card not in (None, several and several.here) and self.operation is _TO_COPY:
            several.crossed_bytes[card] += tensor.nbytes
        if card is None or card == several.here:
            super().count(tensor, category)
            return
        with several.on(card):
            super().count(tensor, category)

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> Any:
        """The length that a nested tensor's rows do not share."""
        raise NotImplementedError(NESTED)

    def resized(self, storage: torch.UntypedStorage, category: str) -> None:
        """As `CountingMode` says, on the card that the storage is on."""
        with self.turn:
            several, key = self.gpu.several, storage._cdata
            if several is None or key not in self.storages:
                super().resized(storage, category)
                return
            _, block = self.storages[key]
            card = self._of_empty.pop(key, several.here) if block is None else several.card_of_block(block)
            with several.on(card):
                super().resized(storage, category)
            if self.storages[key][1] is None:
                self._of_empty[key] = card

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE_QUERY and type(args[0]) is FakeTensor:  # the commonest call of all
            return device_of(args[0])
        if self.over and FakeTensor not in types:
            return func(*args, **(kwargs or {}))
        with self.turn:
            if torch.empty is not _FACTORIES["empty"]:
                with _pytorchs_factories():
                    return self._dispatch(func, types, args, kwargs)
            return self._dispatch(func, types, args, kwargs)

    def raise_interrupt(self) -> None:
        """As `CountingMode` says, in the thread that Ctrl+C is for."""
        if self.gpu.interrupted and threading.current_thread() is threading.main_thread():
            super().raise_interrupt()

    def _dispatch(self, func, types, args, kwargs):
        if func is _TO_DEVICE or func is _TO_OTHER:
            func, args, kwargs = _named(func, args, kwargs or {})
        device = kwargs.get("device") if kwargs else None
        on_gpu = is_gpu(device)
        if self.gpu.several is not None and not self.inside and (on_gpu or FakeTensor in types):
            if on_gpu:
                self.gpu.check_index(device)
            self.gpu.several.refuse_mixed(func, args)
            card = self.gpu.several.card_of(args, device if on_gpu else None)
            if card != self.gpu.several.here:
                with self.gpu.several.on(card):
                    return self._dispatch(func, types, args, kwargs)
        if FakeTensor not in types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: its parts come by themselves, whichever device they are on
        if FakeTensor not in types and not self.inside and not on_gpu:
            self.raise_interrupt()
            return self.gpu.host.run(func, args, kwargs)
        if self.inside:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if on_gpu:
            self.gpu.check_index(device)
            kwargs = {**kwargs, "device": self.gpu.inside(device)}
            if kwargs.get("pin_memory"):
                raise RuntimeError("Only dense CPU tensors can be pinned")
            if func is _TO_COPY and type(args[0]) is not FakeTensor:
                return self._upload(args[0], kwargs)
        if makes(func, args) or (self.sparse.met and among(args)):
            return self._of_sparse(func, args, kwargs or {})
        if device is not None and not on_gpu and type(args[0] if args else None) is FakeTensor:
            return self._elsewhere(func, args, kwargs, device)
        elif func is _ITEM:
            return self.values.number(args[0])
        elif func is _COPY_ and type(args[0]) is not FakeTensor:
            return self._download(*args[:2])
        elif func is _CTC:
            return self._of_lengths(func, args, kwargs or {})
        elif func is _CTC_BACKWARD:
            with (
                self
            ):  # ctc_loss_backward_gpu_template in aten/src/ATen/native/cuda/LossCTC.cu: log_beta, and the gradient
                log_beta, gradient = torch.empty_like(args[6]), torch.empty_like(args[1])
            del log_beta
            return gradient
        elif func is _EQUAL:
            return self.values.equal(*args[:2])
        elif func is _ALLCLOSE:
            return self.values.equal(*args[:2], *(args[2:] or (1e-5,)))
        elif func is _HISTC:  # CUDA's takes integers too, and PyTorch's rule of shapes says it does not
            with self:
                counts = args[0].new_empty((args[1] if len(args) > 1 else (kwargs or {}).get("bins", 100),))
            if (ids := known.values_of(args[0])) is not None:
                known.give(counts, func(ids.double(), *args[1:], **(kwargs or {})))
            return counts
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        except RuntimeError as error:
            if "Expected all tensors to be on the same device" in str(error):
                # `from None`: the program is to see what it would see on a card
                raise RuntimeError(self.gpu.named(str(error))) from None
            raise
        except ValueError as error:
            if not isinstance(error.__cause__, DynamicOutputShapeException):
                raise
            try:
                return self._by_values(func, args, kwargs or {})
            except known.Unknown:
                raise self.values.stop(
                    tr(ko=f"{func}의 모양이 값에 달렸다", en=f"the shape of {func} depends on values")
                ) from None
        if is_composite(func):  # its parts were here
            return out
        for one in out if isinstance(out, (tuple, list)) else (out,):
            # Where PyTorch knows no rule of shapes it asks the CPU's kernel, whose results have no number.
            if type(one) is FakeTensor and one.fake_device == _CPU:
                one.fake_device = self.gpu.here
        if type(out) is FakeTensor and (func in _OVERWRITES or any(map(is_drawn, args[:2]))):
            self._passes_on(func, args, out)
        if _draws(func) and isinstance(out, torch.Tensor):
            out.drawn = True
            if self.values.policy != "stop":
                known.draw(func, args, out, self.generator)
        if func in routing.EXCHANGES:
            routing.exchanged(func, args, out)
        elif func.overloadpacket in known.DRAWN:
            pass
        elif known.concerns(func, args, out):
            known.follow(func, args, kwargs or {}, out)
            self.values.remember(func, args, kwargs or {}, out)
            if func.overloadpacket is _TOP_K and self.values.policy != "stop":
                routing.choose_in_turn(args, kwargs or {}, out)
        else:
            known.forget_written(func, args, kwargs or {})
            if out.numel() == 1:
                self.values.remember(func, args, kwargs or {}, out)
        return out

    def _passes_on(self, func: Any, args: tuple, out: torch.Tensor) -> None:
        """What is computed from drawn numbers, element by element, is drawn too; what is written over is not."""
        if func in _OVERWRITES:
            out.__dict__.pop("drawn", None)
        if any(map(is_drawn, args[1:2] if func in _OVERWRITES else args[:2])) and (
            func.is_view or func in _OVERWRITES or torch.Tag.pointwise in func.tags
        ):
            out.drawn = True

    def _note_choice(self) -> None:
        if self.gpu.watch is not None:
            self.gpu.watch.note(
                tr(
                    ko="점수가 높은 것을 고르는 곳(top-k, MoE의 라우터가 그렇다)은 점수를 모르니 차례로 골랐고, "
                    "프로그램이 그것을 따랐다. 전문가마다 토큰 수가 거의 같다고 본 셈이다",
                    en="the best k (a router's experts, if it is one) were taken in turn, as scores are not known, and "
                    "the program went on by that: as if every expert had about equally many tokens",
                )
            )

    def _upload(self, real: torch.Tensor, kwargs: dict) -> torch.Tensor:
        """A real tensor's copy on the GPU: shape, strides and type."""
        if real.layout is torch.sparse_coo:
            parts_of = [self._upload(part, {}) for part in (real._indices(), real._values())]
            if kwargs.get("dtype") not in (None, real.dtype):
                with self:
                    parts_of[1] = parts_of[1].to(kwargs["dtype"])
            return self.sparse.make(real.shape, *parts_of, real.is_coalesced())
        if real.layout is not torch.strided:
            raise NotImplementedError(f"a tensor of layout {real.layout} on a virtual GPU")
        meta = torch.empty_strided(real.shape, real.stride(), dtype=kwargs.get("dtype") or real.dtype, device="meta")
        memory_format = kwargs.get("memory_format") or torch.preserve_format
        layout = torch.empty_like(meta, memory_format=memory_format)
        with self:
            device = kwargs.get("device", self.gpu.here)
            fake = torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device=device)
        self.gpu.watch.claim([fake], "inputs")
        known.know(fake, real)
        return fake

    def _of_sparse(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """An operation on sparse tensors, or what makes one."""
        device = kwargs.get("device")
        if func is not _TO_COPY or device is None or is_gpu(device):
            return self.sparse.run(func, args, kwargs)
        with self:
            there = [part.to(device) for part in (args[0]._indices(), args[0]._values())]
        return torch.sparse_coo_tensor(*there, args[0].shape, dtype=kwargs.get("dtype"), check_invariants=False)

    def _by_values(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """An operation whose shape depends on values that are known. Unknown where they are not."""
        if known.is_assumed(args, kwargs):
            self._note_choice()
        if func is _MASKED_SELECT:
            func, args = _INDEX, (args[0], [args[1]])
        if func is _INDEX:
            indices: list[torch.Tensor | None] = []
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    where = self._where(index)
                    indices += [self._upload(part, {}) for part in where.unbind(1)]
                else:
                    indices.append(index)
            with self:
                return func(args[0], indices)
        if func is _NONZERO:
            return self._upload(self._where(args[0]), {})
        if func is _PACK:
            return self._of_lengths(func, args, kwargs)
        if func is _LSTSQ:
            return self._least_squares(*args[:2])
        if func.name() == "torchvision::nms" and self.values.policy != "stop":
            return self._nms(*args)
        try:
            real = known.run(func, args, kwargs)
        except known.Unknown:
            if self.values.policy == "stop" or func not in _AT_MOST:
                raise
            return self._at_most(func, args, kwargs)
        return tree_map(lambda value: self._upload(value, {}) if isinstance(value, torch.Tensor) else value, real)

    def _at_most(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """`unique` and `bincount` of numbers that are not known: all are different, none is beyond `minlength`."""
        schema = func._schema.arguments
        given = {one.name: one.default_value for one in schema} | kwargs
        given |= {one.name: value for one, value in zip(schema, args, strict=False)}
        source = given[schema[0].name]
        if func is _BINCOUNT:
            if not given["minlength"]:
                raise known.Unknown
            weights = given["weights"]
            kind = torch.int64 if weights is None else weights.dtype if weights.is_floating_point() else torch.float64
            file, line = program_line(sys._getframe(1))
            self.gpu.watch.note(
                tr(
                    ko=f"{file}:{line}: 값을 모르는 수를 센다. minlength 안에 드는 것으로 보았다",
                    en=f"{file}:{line} counts numbers that are not known: taken to lie within minlength",
                )
            )
            with self:
                return source.new_empty((given["minlength"],), dtype=kind)
        self._note_picked(True)
        with self:
            if func is _UNIQUE_DIM:
                one, places = source.clone(), (source.shape[given["dim"]],)
            else:
                one, places = source.flatten(), source.shape
                one = one.clone() if func is _UNIQUE_CONSECUTIVE else one.sort().values
            counts = (one.shape[given["dim"]],) if func is _UNIQUE_DIM else one.shape
            asked = (given["return_inverse"], places), (given["return_counts"], counts)
            return one, *(source.new_empty(shape if yes else (0,), dtype=torch.int64) for yes, shape in asked)

    def _where(self, mask: torch.Tensor) -> torch.Tensor:
        """The places (n, dimensions) where a mask is True: known, or all or none by the answer to what it compares."""
        try:
            return known.run(_NONZERO, (mask,), {})
        except known.Unknown:
            picks = self.values.picks(mask)
            if picks is None:
                raise
        chosen = torch.full(mask.shape, picks)
        known.give(mask, chosen.to(mask.dtype))  # what is computed from it agrees
        self._note_picked(picks)
        return chosen.nonzero()

    def _note_picked(self, all_: bool) -> None:
        file, line = program_line(sys._getframe(1))
        if all_:
            ko, en = "모두 고른 것으로 보았으니 많아야 이만큼이다", "all, the most it can"
        else:
            ko, en = "아무것도 고르지 않은 것으로 보았으니 적어도 이만큼이다", "nothing, the least it can"
        self.gpu.watch.note(
            tr(
                ko=f"{file}:{line}: 값을 모르는 마스크나 점수로 골랐다. {ko}",
                en=f"{file}:{line} picks by a mask or scores that are not known: taken to pick {en}",
            )
        )

    def _nms(self, boxes: torch.Tensor, scores: torch.Tensor, _: float) -> torch.Tensor:
        """The boxes that torchvision keeps of those that overlap: all, the most there can be.

        What it takes meanwhile: torchvision/csrc/ops/cuda/nms_kernel.cu, with a bit for every two boxes.
        """
        self._note_picked(True)
        with self:
            order = scores.sort(0, descending=True).indices
            ordered, keep = boxes.index_select(0, order), torch.zeros_like(scores, dtype=torch.bool)
            overlap = scores.new_empty(len(scores) * -(-len(scores) // 64), dtype=torch.int64)
            kept = order.clone()
        del ordered, keep, overlap
        return kept

    def _least_squares(self, matrix: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`torch.linalg.lstsq` as CUDA has it, by QR (gels): without rank and singular values.

        Source: linalg_lstsq_out_info in aten/src/ATen/native/BatchLinearAlgebra.cpp. The solver's own memory, which
        cuSOLVER chooses, is not counted.
        """
        with self:
            rows, columns = matrix.shape[-2:]
            vector = right.dim() == 1 or right.shape == matrix.shape[:-1]
            sides = right.unsqueeze(-1) if vector else right
            batch = matrix.shape[:-2]
            factored = matrix.mT.clone(memory_format=torch.contiguous_format)
            made = matrix.new_empty((*batch, sides.shape[-1], max(rows, columns))).mT
            made[..., :rows, :].copy_(sides)
            reflectors = matrix.new_empty((*batch, min(rows, columns)))
            none = matrix.new_empty((0,))
            residuals = made[..., columns:, :].pow(2).sum(-2) if rows > columns else none.clone()
            solution = made[..., :columns, :]
            rank = matrix.new_empty((0,), dtype=torch.int64)
        del factored, reflectors
        return solution.squeeze(-1) if vector else solution, residuals, rank, none

    def _of_lengths(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """An operation whose shape depends on lengths, which are on the CPU, and on no value of its tensors."""

        def stands_for(value: Any) -> Any:
            return torch.zeros((), dtype=value.dtype).expand(value.shape) if type(value) is FakeTensor else value

        def on_gpu(one: Any) -> Any:  # a packed sequence's batch sizes stay on the CPU
            return torch.empty_like(one, device=self.gpu.here) if one.is_floating_point() else one

        real = func(*tree_map(stands_for, args), **tree_map(stands_for, kwargs))
        with self:
            return tree_map(on_gpu, real)

    def _elsewhere(self, func: Any, args: tuple, kwargs: dict, device: torch.device) -> torch.Tensor:
        """What a function of a GPU tensor makes on another device: a real tensor on the CPU, or a meta tensor."""
        if is_composite(func):  # `to` in inference mode: it comes here again as its parts
            with self:
                return parts(func, *args, **kwargs)
        fake = args[0]
        if func is not _TO_COPY or device.type == "meta":  # new_zeros, empty_like, …: no value is asked for
            alike = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
            return self.gpu.host.run(func, (alike, *args[1:]), kwargs)
        real, dtype = known.values_of(fake), kwargs.get("dtype") or fake.dtype
        if real is not None:
            self.values.used(fake, real, "copy to the CPU")
            copy = real.to(dtype, copy=True)
        elif fake.numel() >= _HUGE:
            copy = torch.full((), self.values.copied(fake), dtype=dtype).expand(fake.shape)
        else:
            copy = torch.full(fake.shape, self.values.copied(fake), dtype=dtype)
        pinned = bool(kwargs.get("pin_memory")) or (kwargs.get("non_blocking", False))
        self.gpu.host.count(copy, "copies", nbytes=fake.numel() * dtype.itemsize, pinned=pinned)
        return copy

    def _download(self, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        values = known.values_of(fake)
        if values is not None:
            self.values.used(fake, values, "copy to the CPU")
        return real.fill_(self.values.copied(fake)) if values is None else real.copy_(values)


def cards_of_a_machine(cards: int) -> int:
    """How many of so many cards share a machine where no launcher says it.

    All that a device's number, a signed byte, can count; of more eight, or the most below that divide them.
    """
    return cards if cards <= 127 else next(number for number in range(8, 0, -1) if cards % number == 0)


class ProgramGPU(VirtualGPU):
    """A virtual GPU for whole programs: the card of process `rank` of `ranks`, of which only this one exists.

    index, count: which card it is, of how many in its machine. cards: how many the one process sees (`several`), of
    which `rank` is then the one that is looked at; `index` the one that is current.
    values: what questions for numbers get, see `Values`. host: the machine that it is in; `gpu.host` counts its RAM.
    """

    def __init__(
        self,
        spec: GPUSpec,
        *,
        limited: bool = True,
        values: str = "answer",
        rank: int = 0,
        ranks: int = 1,
        cards: int = 1,
        without: Iterable[str] = (),
        host: Machine | None = None,
    ):
        super().__init__(spec, limited=limited, without=without)
        self.answers = Values(values)
        self.limited, self.begun = limited, False  # begun: whether anything was asked of the allocator
        self.settings_said = ""  # to the allocator's own functions, before that
        self.meter.allocator = CachingAllocator(self.meter.allocator.capacity_bytes)
        self.several = SeveralCards(self, cards, rank) if cards > 1 else None
        self.meters = [self.meter] if self.several is None else self.several.meters
        self._said = AllocatorSettings.from_environment()
        self.configure(self._said)
        self.streams = Streams(self)
        self.rank, self.ranks = 0 if self.several else rank, ranks
        if self.several is None:
            self.meter.stream = lambda: self.streams.current.stream_id
        self.mode = ProgramMode(self)
        self.uses_nccl = False  # within this process
        self._said_visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._visible: int | None = None  # once CUDA has started: of several those that the program has left itself
        self.no_such_card: int | None = None  # that the program asked for
        self.fraction, self.ooms, self.pid = 1.0, 0, os.getpid()
        pinned = PinnedAllocator.from_environment(rounds_up=self.rules.applies(ROUNDED.name))
        self.host = HostStorages(HostMeter(host if limited else None, pinned))
        self.loaders: weakref.WeakSet[Any] = weakref.WeakSet()  # data loaders' iterators that have processes
        self.host.releases.turn = self.mode.turn
        self.on_machine_of(cards if self.several else cards_of_a_machine(ranks))
        self.watch: Any = None  # the recorder, a `Watch`: `cuda` puts it there, and the import hook
        self.imports: Any = None
        self.saving: Any = None  # a `Saving`, and the `OwnFiles` of the run where it writes none
        self.own_files: Any = None
        self.changes: dict[str, int] = {}  # what is other in the program → how often it found its place
        self.managed_bytes = self.managed_peak_bytes = 0  # of `managed`, beside the allocator
        self.last_oom: dict[str, Any] | None = None
        self.threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # that the program has begun
        self.ended: BaseException | None = None  # what ended the program in one of them

    def on_machine_of(self, cards: int) -> None:
        """So many of the processes share a machine, each with a card."""
        self._index, self._count = self.rank % cards, cards
        self.host.meter.ranks = 1 if self.several else cards

    @property
    def count(self) -> int:
        """How many cards the machine has; of several in one process those that the program has left itself."""
        if self.several is None:
            return self._count
        if self._visible is not None:
            return self._visible
        said = os.environ.get("CUDA_VISIBLE_DEVICES")
        return self._count if said in (None, self._said_visible) else left_visible(said, self._count)

    def counted_by_cuda(self) -> int:
        """`count`, which is settled with that: CUDA reads CUDA_VISIBLE_DEVICES once, when it starts (cuInit)."""
        if self.several is not None:
            self._visible = self.count
        return self.count

    def in_a_new_process(self) -> None:
        """CUDA has not started in the program that a launcher is about to start, whatever the launcher asked."""
        self._visible = None

    def start(self) -> None:
        """CUDA starts, if it has not. RuntimeError, in PyTorch's words, in a fork and where no card is left."""
        self.refuse_forks()
        if not self.counted_by_cuda():
            raise RuntimeError("No CUDA GPUs are available")

    @property
    def fraction(self) -> float:
        """The part of the card's memory that PyTorch may have."""
        return self._fraction if self.several is None else self.several.fractions[self.several.here]

    @fraction.setter
    def fraction(self, fraction: float) -> None:
        if self.several is None:
            self._fraction = fraction
        else:
            self.several.fractions[self.several.here] = fraction

    @property
    def index(self) -> int:
        """Which card of the machine is current."""
        return self._index if self.several is None else self.several.current

    @property
    def device(self) -> torch.device:
        """The current card, as the program names it."""
        return torch.device("cuda", self.index)

    @property
    def looked_at(self) -> int:
        """The card that the report is of."""
        return self.index if self.several is None else self.several.looked_at

    @property
    def ooms_here(self) -> int:
        """How often the card that is asked ran out of memory."""
        return self.ooms if self.several is None else self.several.ooms[self.several.here]

    @property
    def here(self) -> torch.device:
        """The card whose operation runs, by its name inside."""
        return GPU if self.several is None else torch.device("cpu", self.several.here)

    def inside(self, device: torch.device) -> torch.device:
        """A card that the program names, by its name inside."""
        return GPU if self.several is None else self.several.inside(device)

    def shown(self, tensor: FakeTensor) -> torch.device:
        """The card that the program sees a tensor on."""
        return self.device if self.several is None else self.several.shown(tensor)

    def named(self, text: str) -> str:
        """A message of PyTorch's with the card's name as the program has it."""
        return text.replace("cpu:0", str(self.device)) if self.several is None else self.several.named(text)

    def choose(self, index: int) -> None:
        """Make a card the current one (`torch.cuda.set_device`)."""
        self.check_index(torch.device("cuda", index))
        if self.several is not None:
            self.several.current = index

    def free(self, block: int) -> None:
        """As `VirtualGPU` says."""
        self.meter_of(block).free(block)

    def meter_of(self, block: int) -> AllocationMeter:
        """As `VirtualGPU` says."""
        return self.meter if self.several is None else self.several.meter_of(block)

    def on(self, index: int) -> contextlib.AbstractContextManager[None]:
        """What is asked in this block is asked of that card."""
        return contextlib.nullcontext() if self.several is None else self.several.on(index)

    def check_index(self, device: torch.device) -> None:
        """RuntimeError, in CUDA's words, where a program asks for a card that there is not, or in a fork for any."""
        self.start()
        index = device.index if device.type == "cuda" else None
        if index is None or index == self.index or (self.several is not None and 0 <= index < self.count):
            return
        if not 0 <= index < self.count:
            self.no_such_card = index
            raise no_such_card()
        what = tr(
            ko=f"이 실행은 cuda:{self.index}만을 대신하는데 프로그램이 cuda:{index}도 쓴다",
            en=f"this run stands for cuda:{self.index} alone; the program uses cuda:{index} as well",
        )
        raise NotImplementedError(f"{what}: {to_see(max(index + 1, self._count), self.ranks)}")

    def refuse_forks(self) -> None:
        """RuntimeError, in PyTorch's words (torch/cuda/__init__.py), in a fork of the process that has the card."""
        if os.getpid() != self.pid:
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
                "'spawn' start method"
            )

    def limit(self, fraction: float) -> None:
        """Let PyTorch have this part of the card's memory (`torch.cuda.set_per_process_memory_fraction`)."""
        self.fraction = fraction
        allowed = math.floor(fraction * self.spec.memory_bytes)
        self.meter.allocator.capacity_bytes = min(self.capacity_bytes, allowed)

    def configure(self, settings: AllocatorSettings) -> None:
        """Follow these settings of the allocator, which has given nothing yet."""
        for meter in self.meters:
            meter.allocator.configure(settings if self.limited else replace(settings, memory_fraction=None))
        self.expandable_segments = settings.expandable_segments

    def empty_cache(self) -> None:
        """As `VirtualGPU` says."""
        with self.mode.turn:
            super().empty_cache()
            for meter in self.meters:
                meter.allocator.empty_cache()

    def release_workspaces(self) -> None:
        """As `VirtualGPU` says."""
        with self.mode.turn:
            for card in range(len(self.meters)):
                with self.on(card):
                    super().release_workspaces()

    def _allocate(self, nbytes: int, category: str) -> int:
        with self.mode.turn:
            return self._allocate_now(nbytes, category)

    def _allocate_now(self, nbytes: int, category: str) -> int:
        self.mode.releases.settle()  # what another thread has let go of
        if not self.begun:
            # A line of the program may have changed it. PyTorch reads it when it initializes CUDA: with most programs
            # that is now; what comes after `torch.cuda.get_device_name()` a card would not follow.
            said = AllocatorSettings.from_environment(more=self.settings_said)
            if said != self._said:
                self.configure(said)
            self.begun = True
        try:
            return super()._allocate(nbytes, category)
        except torch.OutOfMemoryError as error:
            self.ooms += 1
            if self.several is not None:
                self.several.ooms[self.several.here] += 1
            self.last_oom = self.watch.out_of_memory(nbytes)
            self.last_oom |= {} if self.several is None else {"card": self.several.here}
            said = str(error).replace("GPU 0", f"GPU {self.index if self.several is None else self.several.here}")
            if self.fraction < 1:  # as CUDACachingAllocator.cpp puts it in
                allowed = format_size(math.floor(self.fraction * self.spec.memory_bytes))
                said = said.replace("Of the allocated", f"{allowed} allowed; Of the allocated", 1)
        # Out here: its context is what the program was handling, as on a card.
        raise torch.OutOfMemoryError(said)

    def _empty_like(self, tensor: torch.Tensor, category: str) -> torch.Tensor:
        fake = self.mode._upload(tensor, {})
        self.label([fake], category)
        return fake


__all__ = ["GPU", "ProgramGPU", "ProgramMode", "ValueStop", "is_gpu"]
