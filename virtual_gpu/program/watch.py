"""Watching a program: what each block of memory is for, who asked for it, in which phase of the program.

Nothing is asked of the program. Phases: a module that is called from outside any module begins "forward" (without
gradients "evaluation"), `backward()` "backward", `Optimizer.step` "step". A block belongs to the innermost module that
runs when it is allocated, and to the innermost line of the program's own files. What nothing else claims was saved
for backward where it outlives the forward phase, else it was temporary.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..trace.saved import Saved
from ..trace.snapshot import History, contents
from ..trace.timeline import CATEGORIES as trace_categories
from ..trace.trace import Trace
from .device import ProgramGPU
from .frames import Stacks
from .modules import NOWHERE, Modules, Name
from .patches import Patches
from .quantized import state_tensors

LOADING, FORWARD, BACKWARD, STEP, EVALUATION, SAVING, BETWEEN = (
    "loading", "forward", "backward", "step", "evaluation", "saving", "between",
)  # fmt: skip
CATEGORIES = (
    "parameters", "gradients", "optimizer", "saved for backward", "temporaries", "workspaces", "inputs", "buffers",
    "engine",
)  # fmt: skip

_OF_THE_CORE = {
    name: trace_categories.index(
        name
        if name in trace_categories
        else "activations"
        if name in ("saved for backward", "temporaries")
        else "other"
    )
    for name in CATEGORIES
}


@dataclass(slots=True)
class Block:
    """One allocation: when it was made and freed (index of the event), in which span, by which line and module.

    nbytes: asked for. held: what the allocator gave for it. category: as far as it was recognised; freed and freed_in
    are None while it lives.
    """

    nbytes: int
    held: int
    stream: int
    born: int
    span: int
    line: tuple[str, int]
    module: Name
    operation: str
    category: str | None = None
    freed: int | None = None
    freed_in: int | None = None


@dataclass
class Watch:
    """The recorder of a virtual GPU's meter. events: +id for an allocation, -id for a release, in their order.

    spans: (phase, index of its first event), in their order. history: the events of a snapshot, where one is kept;
    history_stays: whether the program cannot end it. step_ends: the events before each step's end.
    will_evaluate: whether a Trainer is to, sooner or later. unfed: how many events there were when an epoch was last
    given no batches (see `ends`).
    """

    gpu: ProgramGPU
    history: History | None = None
    history_stays: bool = False
    events: list[int] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)
    spans: list[tuple[str, int]] = field(default_factory=lambda: [(LOADING, 0)])
    reserved_peaks: list[int] = field(default_factory=lambda: [0])
    steps: int = 0
    step_ends: list[int] = field(default_factory=list)
    will_evaluate: bool = False
    unfed: int | None = None
    within_a_step: bool = False  # of something that counts its own
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.meter = self.gpu.meter  # of the card that is looked at, whichever computes
        self._stacks = Stacks()
        self.modules = Modules()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._steps_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    # -- what the meter tells ------------------------------------------------------------------------------------------

    def allocated(self, block: int, nbytes: int, held: int, category: str, stream: int = 0) -> None:
        """A block was made."""
        frame, operation = sys._getframe(1), self.gpu.mode.operation
        self.blocks[block] = Block(
            nbytes, held, stream, len(self.events), len(self.spans) - 1, self.modules.line(frame), self.modules.running,
            "" if operation is None else operation._opname,
        )  # fmt: skip
        if self.history is not None:
            self.history.allocated(block, nbytes, stream, self._stacks.of(frame))
        self.events.append(block)
        reserved = self.meter.allocator.reserved_bytes
        if reserved > self.reserved_peaks[-1]:
            self.reserved_peaks[-1] = reserved

    def freed(self, block: int) -> None:
        """A block was released."""
        if self.history is not None:
            self.history.freed(block)
        known = self.blocks.get(block)
        if known is not None:
            known.freed, known.freed_in = len(self.events), len(self.spans) - 1
            self.events.append(-block)

    def label(self, block: int, category: str) -> None:
        """The core's own labels; ours are finer."""

    def keep_history(self, keep: bool = True) -> None:
        """Keep events and their stacks from now on, as `torch.cuda.memory._record_memory_history` does; or end it."""
        if keep and self.history is None:
            with self.gpu.mode.turn:
                self.history = History(self.meter.allocator, self._alive())
        elif not keep and not self.history_stays:
            self.history = self.meter.allocator.driver_calls = None

    def snapshot(self) -> dict[str, Any]:
        """PyTorch's memory snapshot, as `torch.cuda.memory._snapshot` gives it."""
        gpu = self.gpu
        with gpu.mode.turn:
            alive = self._alive() if self.history is None else None
            return contents(
                self.meter.allocator,
                self.history,
                alive=alive,
                device=gpu.index if gpu.several is None else gpu.several.looked_at,
                devices=gpu.count,
            )

    def _alive(self) -> dict[int, tuple[int, int]]:
        """Block → (bytes asked for, stream) of what is there now."""
        live = (name for name in self.meter.live_blocks() if name in self.blocks)
        return {name: (self.blocks[name].nbytes, self.blocks[name].stream) for name in live}

    # -- what the program does -----------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """The phase that runs."""
        return self.spans[-1][0]

    def enter(self, phase: str) -> None:
        """A phase begins."""
        if phase != self.phase:
            self.spans.append((phase, len(self.events)))
            self.reserved_peaks.append(self.meter.allocator.reserved_bytes)

    def note(self, text: str) -> None:
        """Something that the report has to say, once."""
        if text not in self.notes:
            self.notes.append(text)

    def out_of_memory(self, nbytes: int) -> dict[str, Any]:
        """Where the memory ran out, for the report."""
        self.find_everything()  # where a model does not fit, it was never called
        file, line = self.modules.line(sys._getframe(1))
        module, allocated = self.modules.running, self.gpu.meter.allocator.allocated_bytes
        return dict(
            bytes=nbytes, allocated=allocated, file=file, line=line, module=module.text, phase=self.phase,
            steps=self.steps,
        )  # fmt: skip

    def install(self, patches: Patches) -> None:
        """Watch modules, backward and optimizers."""
        backward = torch.autograd.backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if not _on_gpu(args[0] if args else kwargs["tensors"]):
                return backward(*args, **kwargs)
            before = self.phase
            self.enter(BACKWARD)
            try:
                return backward(*args, **kwargs)
            finally:
                if sys.exc_info()[0] is None:
                    self.enter(BETWEEN if before != BACKWARD else before)

        self.modules.install(patches, self._begins)
        patches.set(torch.autograd, "backward", run_backward)
        patches.later(register_optimizer_step_pre_hook(self._before_step).remove)
        patches.later(register_optimizer_step_post_hook(self._after_step).remove)
        self.meter.recorder = self
        patches.later(lambda: setattr(self.meter, "recorder", None))

    def find_everything(self) -> None:
        """`name_everything`, also of models that were never called."""
        self.modules.find()
        self.name_everything()

    def name_everything(self) -> None:
        """Say of all blocks that are alive what they are, as far as modules and optimizers tell."""
        for root in list(self.modules.roots):
            self._claim_module(root)
        for optimizer in list(self._optimizers):
            self._claim_state(optimizer)
        for block in self.gpu._workspaces.values():
            if block in self.blocks:
                self.blocks[block].category, self.blocks[block].module = "workspaces", NOWHERE

    def claim(self, tensors: Iterable[torch.Tensor], category: str, module: Name = NOWHERE) -> None:
        """These tensors are this, and belong to this module."""
        storages = self.gpu.mode.storages
        for tensor in chain.from_iterable(map(_plain, tensors)):
            entry = storages.get(tensor.untyped_storage()._cdata)
            known = self.blocks.get(entry[1]) if entry is not None else None
            if known is not None:
                known.category = category
                if module is not NOWHERE:
                    known.module = module

    def _begins(self, module: torch.nn.Module) -> None:
        if self.phase in (BACKWARD, STEP):
            return  # a checkpoint runs again
        self.enter(FORWARD if torch.is_grad_enabled() else EVALUATION)
        if self.modules.add(module):
            self._claim_module(module)

    def _claim_module(self, root: torch.nn.Module) -> None:
        seen: set[int] = set()  # what is tied belongs to its first name, as in named_parameters()
        for module in root.modules():
            name = self.modules.name_of(module)
            buffers = [buffer for buffer in module._buffers.values() if buffer is not None and not is_lazy(buffer)]
            self.claim(buffers, "buffers", name)
            self.claim(state_tensors(module), "parameters", name)
            self.claim(getattr(module, "gradient_buckets", ()), "gradients", name)
            own = [p for p in module._parameters.values() if p is not None and id(p) not in seen and not is_lazy(p)]
            seen.update(map(id, own))
            self.claim(own, "parameters", name)
            self.claim([p.grad for p in own if p.grad is not None], "gradients", name)
            for parameter in own:  # what a library hangs on it, as ZeRO its part of it
                self.claim([kept for kept in vars(parameter).values() if isinstance(kept, torch.Tensor)], "parameters")

    def _claim_state(self, optimizer: torch.optim.Optimizer) -> None:
        owners: dict[int, Name] = {}
        trained = set()
        for root in self.modules.roots:
            for module in root.modules():
                for parameter in module._parameters.values():
                    owners.setdefault(id(parameter), self.modules.name_of(module))
                    if parameter is not None and parameter.requires_grad:
                        trained.add(id(parameter))
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if trained and trained.isdisjoint(map(id, stepped)):  # it steps copies of the weights, in fp32 and flat
            self.claim(stepped, "optimizer")
            self.claim([p.grad for p in stepped if p.grad is not None], "gradients")
        for parameter, state in optimizer.state.items():
            tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
            self.claim(tensors, "optimizer", owners.get(id(parameter), NOWHERE))

    def _claim_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Its gradients and what it keeps, without a look at the models."""
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.claim([p.grad for p in stepped if p.grad is not None], "gradients")
        states = (value for state in optimizer.state.values() for value in state.values())
        self.claim([value for value in states if isinstance(value, torch.Tensor)], "optimizer")

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.phase == BACKWARD:  # a parameter's own step there: what all others are is asked when it ends
            self._claim_stepped(optimizer)
            return
        if optimizer not in self._optimizers:
            self.modules.find()
            self._optimizers.add(optimizer)
        for root in list(self.modules.roots):
            self._claim_module(root)
        self._claim_state(optimizer)
        self.enter(STEP)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.phase == BACKWARD:
            self._claim_stepped(optimizer)
        else:
            self._claim_state(optimizer)
            self.enter(BETWEEN)
        if not self.within_a_step:
            self.count_step(optimizer)

    def count_step(self, of: Any) -> None:
        """Another step of an optimizer, or of what calls several optimizers' `step` in one of its own."""
        self._steps_of[of] = self._steps_of.get(of, 0) + 1
        if self._steps_of[of] > self.steps:
            self.steps = self._steps_of[of]
            self.step_ends.append(len(self.events))
        self.stepped()

    def stepped(self) -> None:
        """Called after each optimizer step; a run ends here."""

    def saved(self) -> Saved:
        """Every allocation and release, with what it was for and where it was asked for."""
        kinds, places, rows, births = {name: n for n, name in enumerate(CATEGORIES)}, {}, [], {}
        operations: dict[str, int] = {}
        for entry, event in enumerate(self.events):
            block = self.blocks[abs(event)]
            kind = category_of(block, self)
            file, line = block.line
            module = block.module.text
            place = f"{os.path.basename(file)}:{line} {module}" if file else module
            births.setdefault(abs(event), entry)
            row = (births[abs(event)], block.nbytes, block.held, _OF_THE_CORE[kind], block.stream, kinds[kind])
            operation = operations.setdefault(block.operation, len(operations))
            rows.append((*row, places.setdefault(place, len(places)), operation))
        born, nbytes, held, category, stream, kind, place, operation = np.array(rows, dtype=np.int64).reshape(-1, 8).T
        starts = np.array([start for _, start in self.spans])
        span = 2 * (np.searchsorted(starts, np.arange(len(rows)), side="right") - 1) + 1
        trace = Trace(born, nbytes, category, span, tuple(name for name, _ in self.spans), held, stream)
        rules = tuple(self.gpu.rules.acted())
        return Saved(trace, CATEGORIES, kind, tuple(places), place, tuple(operations), operation, rules=rules)


def category_of(block: Block, watch: Watch) -> str:
    """What a block was for; what nothing claims was saved for backward where it outlives the forward phase."""
    if block.category is not None:
        return block.category
    born = watch.spans[block.span][0]
    return "saved for backward" if born == FORWARD and block.freed_in != block.span else "temporaries"


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """What a tensor is made of: a rank's part of a DTensor, the codes and scales of torchao's optimizer states, a
    sparse one's indices and values.

    One that `torch.func` has wrapped has no bytes of its own.
    """
    if is_functorch_wrapped_tensor(tensor):
        return
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
        return
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
        if isinstance(part, torch.Tensor):  # a DTensor's mesh is among them
            yield from _plain(part)


def _on_gpu(tensors: Any) -> bool:
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return any(tensor.is_cuda for tensor in tensors)
