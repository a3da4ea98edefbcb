"""Several cards in one process: a model whose layers lie on all of them (`device_map="auto"`), each card counted.

Inside, card n is "cpu:n", as one alone is "cpu:0" (see `device`). An operation belongs to the card of its first tensor
there: what its kernel takes for a moment, and its library's workspace, lie there. What it makes lies on the card that
its output is on. Between cards everything is copied as if each could read the other's memory (peer access): where
they cannot, a copy that also changes its type or its strides takes room beside what is counted. In backward the card of
the gradient is current while a function of the program's own runs (see `_in_backward`); not so in what a checkpoint
without reentry runs again, and in hooks on a node of PyTorch's own (`grad_fn.register_hook`), where the caller's is.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ..counting.gpu import handles
from ..counting.meter import AllocationMeter
from ..counting.outputs import device_of
from ..language import tr
from .patches import Patches

if TYPE_CHECKING:
    from .device import ProgramGPU


# What copies from one card to another, or takes lists with tensors of all.
_BETWEEN_CARDS = (
    "aten::copy_", "aten::_to_copy", "aten::fill_.Tensor", "aten::_foreach_", "aten::_amp_foreach_", "aten::to.",
)  # fmt: skip


class SeveralCards:
    """The cards of a process, of which one is looked at: its blocks are those that the recorder is told of.

    meters: what each counts. here: the card whose operation runs; outside of one, the one that is looked at.
    """

    def __init__(self, gpu: ProgramGPU, number: int, looked_at: int):
        self.gpu, self.number, self.looked_at = gpu, number, looked_at
        self._current = threading.local()
        capacity = gpu.meter.allocator.capacity_bytes
        self.meters = [AllocationMeter(capacity, first_id=1 + card, id_step=number) for card in range(number)]
        self._libraries = [({}, handles()) for _ in range(number)]  # workspaces, and the threads' handles
        self.peaks = [_Peaks(meter) for meter in self.meters]
        for card, meter in enumerate(self.meters):
            meter.stream = functools.partial(self._stream, card)
            if card != looked_at:
                meter.recorder = self.peaks[card]
        self.crossed_bytes = [0] * number  # copied to each card from the others
        self.fractions, self.ooms = [1.0] * number, [0] * number
        self._go_to(looked_at)

    @property
    def current(self) -> int:
        """The card that this thread has chosen."""
        return getattr(self._current, "index", 0)

    @current.setter
    def current(self, index: int) -> None:
        self._current.index = index

    @contextlib.contextmanager
    def on(self, card: int) -> Iterator[None]:
        """What is counted in this block is counted on that card."""
        if not 0 <= card < self.number:
            raise no_such_card()
        with self.gpu.mode.turn:
            before = self.here
            self._go_to(card)
            try:
                yield
            finally:
                self._go_to(before)

    def _stream(self, card: int) -> int:
        return self.gpu.streams.on(card).stream_id

    def _go_to(self, card: int) -> None:
        self.here, self.gpu.meter = card, self.meters[card]
        self.gpu._workspaces, self.gpu._handle = self._libraries[card]

    def meter_of(self, block: int) -> AllocationMeter:
        """The meter that counts a block."""
        return self.meters[self.card_of_block(block)]

    def card_of_block(self, block: int) -> int:
        """The card that a block is on."""
        return (block - 1) % self.number

    def card_of(self, values: Iterable[Any], device: torch.device | None) -> int:
        """The card that an operation with these inputs runs on; without any, the one that `device` names."""
        for value in values:
            if isinstance(value, (list, tuple)):
                value = next((one for one in value if type(one) is FakeTensor), None)
            if type(value) is FakeTensor and (index := device_of(value).index) is not None:
                return index
        return self.inside(device).index if device is not None else self.current

    def inside(self, device: torch.device) -> torch.device:
        """A card that the program names, by its name inside."""
        if device.type == "cpu":
            return device
        return torch.device("cpu", self.current if device.index is None else device.index)

    @contextlib.contextmanager
    def current_is_that_of(self, values: Iterable[Any]) -> Iterator[None]:
        """In this block the card of the first of these tensors is this thread's current one."""
        before, self.current = self.current, self.card_of(values, None)
        try:
            yield
        finally:
            self.current = before

    def others(self) -> list[dict[str, int]]:
        """Of each card but the one that is looked at the most bytes that were allocated, and reserved, in the run."""
        return [
            {"card": card, "allocated": peaks.allocated_bytes, "reserved": peaks.reserved_bytes}
            for card, peaks in enumerate(self.peaks)
            if card != self.looked_at
        ]

    def refuse_mixed(self, func: Any, values: Iterable[Any]) -> None:
        """RuntimeError, in PyTorch's words, for an operation whose tensors lie on two cards.

        PyTorch lets a number of no dimension through that is on the CPU, where cards are inside.
        """
        if func.name().startswith(_BETWEEN_CARDS):
            return
        tensors = (one for value in values for one in (value if isinstance(value, (list, tuple)) else (value,)))
        cards = dict.fromkeys(device_of(one).index for one in tensors if type(one) is FakeTensor)
        cards.pop(None, None)
        if len(cards) > 1:
            one, other, *_ = cards
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:{one} and cuda:{other}!"
            )

    @staticmethod
    def shown(tensor: FakeTensor) -> torch.device:
        """The card that the program sees a tensor on."""
        return torch.device("cuda", device_of(tensor).index or 0)

    @staticmethod
    def named(text: str) -> str:
        """A message of PyTorch's with the cards' names as the program has them."""
        return re.sub(r"\bcpu:(\d+)", r"cuda:\1", text)


class _Peaks:
    """A recorder of the most that a meter held in the whole run, whatever the program resets."""

    def __init__(self, meter: AllocationMeter):
        self._meter, self.allocated_bytes, self.reserved_bytes = meter, 0, 0

    def allocated(self, *_: Any) -> None:
        """A block was made."""
        allocator = self._meter.allocator
        self.allocated_bytes = max(self.allocated_bytes, allocator.allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, allocator.reserved_bytes)

    def freed(self, block: int) -> None:
        """A block was released."""

    def label(self, block: int, category: str) -> None:
        """What a block is for."""


def no_such_card() -> torch.AcceleratorError:
    """CUDA's error for the number of a card that there is not."""
    return torch.AcceleratorError(
        "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?"
    )


def to_see(cards: int, gpus: int = 1) -> str:
    """What to write for one process to have so many cards."""
    written = f"--visible-gpus {cards}"
    return tr(
        ko=f"한 프로세스가 카드 여러 장을 쓰는 프로그램이면 {f'--gpus {gpus} 대신 ' if gpus > 1 else ''}{written}로 "
        "실행한다",
        en=f"a program whose one process uses several cards is run with {written}"
        + (f" in place of --gpus {gpus}" if gpus > 1 else ""),
    )


def left_visible(said: str, number: int) -> int:
    """How many of so many cards CUDA_VISIBLE_DEVICES leaves: those before the first that is none; none if one is twice.

    Cards' names ("GPU-…") count where the driver gives them (`driver.properties`). torch.cuda._parse_visible_devices.
    """
    found: list[int] = []
    for one in said.split(","):
        name = re.fullmatch(r"GPU-[0-]+-([0-9]{12})", one.strip())
        place = name or re.match(r"\+?([0-9]+)", one.strip())  # what follows a number is passed over, as by strtoul
        if place is None or int(place[1]) >= number:
            break
        found.append(int(place[1]))
    return len(found) if len(set(found)) == len(found) else 0


def _chunks(tensors: Sequence[torch.Tensor], nbytes: int) -> list[list[int]]:
    """The places of the tensors that are sent together: of one type, until they are `nbytes` or more.

    torch/csrc/utils/tensor_flatten.cpp, take_tensors.
    """
    full: list[list[int]] = []
    open_: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        chunk = open_.setdefault(tensor.dtype, [])
        chunk.append(place)
        if sum(tensors[one].nbytes for one in chunk) >= nbytes:
            full.append(open_.pop(tensor.dtype))
    return full + list(open_.values())


def install(patches: Patches, gpu: ProgramGPU) -> None:
    """What PyTorch does with several cards alone."""
    # Each operation of a fake mode asks `torch.cuda.is_available()`, which starts CUDA (`ProgramGPU.counted_by_cuda`).
    patches.set(FakeTensorMode, "avoid_device_init", property(lambda mode: False))
    _in_backward(patches, gpu.several)
    _data_parallel(patches, gpu)


def _in_backward(patches: Patches, cards: SeveralCards) -> None:
    """Let functions of the program that backward calls have the card of the gradient they get for the current one.

    PyTorch has a thread for each card, with that card current, which runs the nodes whose first gradient on a card is
    there (torch/csrc/autograd/engine.cpp; InputBuffer::device in input_buffer.cpp). Inside, cards are CPUs, whose nodes
    the caller's thread runs.
    """
    node, tensor = torch.autograd.function.BackwardCFunction, torch.Tensor
    apply = node.apply

    def applied(self: Any, *gradients: Any) -> Any:
        with cards.current_is_that_of(gradients):
            return apply(self, *gradients)

    def registers(register: Callable) -> Callable:
        @functools.wraps(register)
        def registered(of: Any, hook: Callable) -> Any:
            @functools.wraps(hook)
            def on_its_card(*given: Any) -> Any:
                with cards.current_is_that_of(given[-1:]):  # of a node's two the gradients that it got
                    return hook(*given)

            return register(of, on_its_card)

        return registered

    patches.set(node, "apply", applied)
    for name in ("register_hook", "register_prehook"):  # with these modules have their backward hooks
        patches.set(node, name, registers(getattr(node, name)))
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        patches.set(tensor, name, registers(getattr(tensor, name)))


def _data_parallel(patches: Patches, gpu: ProgramGPU) -> None:
    """What C++ does on CUDA tensors alone, for `nn.DataParallel` (which the Trainer takes for a model on one card)."""

    def to_card(index: int) -> torch.device:
        return torch.device("cuda", index)

    def broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
        if tensor.is_cuda and tensor.get_device() != devices[0]:
            raise RuntimeError("device of broadcasted tensor must appear as the first on devices list")
        here = [tensor] if tensor.is_cuda else []
        gpu.uses_nccl |= tensor.is_cuda and len(devices) > 1
        alike = [torch.empty(tensor.shape, dtype=tensor.dtype, device=to_card(index)) for index in devices[len(here) :]]
        return [*here, *(copy.copy_(tensor) for copy in alike)]

    def into(*_: Any) -> None:
        raise NotImplementedError("torch.nn.parallel.comm with out=... on virtual GPUs")

    def broadcast_coalesced(
        tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
    ) -> list[list[torch.Tensor]]:
        found = [[*tensors] for _ in devices]  # the first card's are the tensors themselves
        for places in _chunks(tensors, buffer_size):
            chunk = [tensors[place] for place in places]
            copies = broadcast(_flatten_dense_tensors(chunk), devices)[1:]
            for of_card, flat in zip(found[1:], copies, strict=True):
                for place, part in zip(places, _unflatten_dense_tensors(flat, chunk), strict=True):
                    of_card[place] = part.detach()
        return found

    def gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None) -> torch.Tensor:
        device = torch.device("cpu") if destination == -1 else torch.device("cuda", destination)
        shape = list(tensors[0].shape)
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        whole, start = torch.empty(shape, dtype=tensors[0].dtype, device=device), 0
        for tensor in tensors:
            whole.narrow(dim, start, tensor.shape[dim]).copy_(tensor)
            start += tensor.shape[dim]
        return whole

    # torch/csrc/cuda/comm.cpp: what is sent together is one block there, of which the tensors are views.
    patches.set_all(
        torch._C,
        {
            "_broadcast": broadcast,
            "_broadcast_coalesced": broadcast_coalesced,
            "_gather": gather,
            **dict.fromkeys(("_broadcast_out", "_gather_out", "_scatter_out"), into),
        },
    )
