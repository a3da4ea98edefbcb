"""A recorder that also notes what each tensor is: for a run of its own, since it looks at every operation's stack."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..trace.details import Details, Origin, Place
from ..trace.recorder import TimelineRecorder

if TYPE_CHECKING:
    from .gpu import VirtualGPU

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OPTIMIZERS = os.path.join(_TORCH, "optim", "")
_OURS = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_INNER = tuple(os.path.join(_OURS, room, "") for room in ("counting", "rules"))
_NOWHERE = Place("", None, None)


class _Tells(dict[CodeType, bool]):
    """Whether code tells a reader what it does: a model's, an optimizer's, a loop's; not PyTorch's own, nor ours."""

    def __missing__(self, code: CodeType) -> bool:
        file = code.co_filename
        inner = file.startswith((*_INNER, "<frozen")) or (file.startswith(_TORCH) and not file.startswith(_OPTIMIZERS))
        self[code] = not inner
        return self[code]


_tells = _Tells().__getitem__


class DetailRecorder(TimelineRecorder):
    """A recorder that knows of each block which tensor lies in it, who made it, and whose backward kept it.

    An operation belongs to the innermost module whose forward runs. One of backward belongs to the module and the line
    whose forward made its node: both carry the node's sequence number, as in PyTorch's profiler. A checkpoint's second
    forward is a forward.
    """

    def __init__(self, gpu: VirtualGPU, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        super().__init__(gpu.meter.live_blocks())
        self.gpu, self.model, self.optimizer = gpu, model, optimizer
        self.origins = {block: Origin(_NOWHERE) for block in gpu.meter.live_blocks()}
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._calls: list[str] = []
        self._here = _NOWHERE
        self._nodes: dict[int, Place] = {}  # sequence number → where forward made the node
        self._next_node = 0
        self._in_backward: set[int] = set()  # blocks
        self._name_tensors()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow modules and operations in the block."""

        def enters(module: torch.nn.Module, _: Any) -> None:
            self._calls.append(self._modules.get(id(module), type(module).__name__))

        def leaves(*_: Any) -> None:
            self._calls.pop()

        hooks = register_module_forward_pre_hook(enters), register_module_forward_hook(leaves, always_call=True)
        self.gpu.mode.details = self
        try:
            yield
        finally:
            self.gpu.mode.details = None
            for hook in hooks:
                hook.remove()

    def runs(self, operation: Any) -> None:
        """An operation begins."""
        name = operation._opname
        node = self._node()
        if node is not None:
            made = self._nodes.get(node._sequence_nr())
            self._here = Place(name, made and made.module, made and made.line)
        else:
            module = self._calls[-1] if self._calls else None
            self._here = Place(name, module, _line(sys._getframe(1)))
        # Autograd makes an operation's node before the operation comes here.
        now = torch.autograd._get_sequence_nr()
        for number in range(self._next_node, now) if self._next_node else ():
            self._nodes[number] = self._here
        self._next_node = now

    def allocated(self, block: int, nbytes: int, held: int, category: str, stream: int = 0) -> None:
        """A block was made, by the operation that runs."""
        super().allocated(block, nbytes, held, category, stream)
        self.origins[block] = Origin(self._here)
        if self._node() is not None:
            self._in_backward.add(block)

    def holds(self, block: int, tensor: torch.Tensor) -> None:
        """This tensor lies in the block."""
        self._describe(self.origins[block], tensor)

    def freed(self, block: int) -> None:
        """A block was released; where a node of backward did, that node has kept it."""
        super().freed(block)
        node, origin = self._node(), self.origins[block]
        if node is not None and block not in self._in_backward and not origin.name:
            made = self._nodes.get(node._sequence_nr())
            origin.kept = made and made._replace(operation=node.name())

    def leave(self) -> None:
        """A phase ends: what it has left is known by name."""
        super().leave()
        self._name_tensors()

    def details(self) -> Details:
        """All that was recorded so far."""
        return Details(self.trace(), [self.origins[block] for block in self.births()])

    def _node(self) -> torch.autograd.graph.Node | None:
        """The node that backward is at; None in a checkpoint's second forward."""
        return None if self._calls else torch._C._current_autograd_node()

    def _name_tensors(self) -> None:
        for (library, *_), block in self.gpu._workspaces.items():
            origin = self.origins[block]
            origin.name, origin.made = f"{library} workspace", _NOWHERE
        owners: dict[int, tuple[str, str]] = {}
        for module_name, module in self.model.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    owners.setdefault(id(tensor), (module_name, name))
                    self._name(tensor, module_name, name)
                    if tensor.grad is not None:
                        self._name(tensor.grad, module_name, f"{name}.grad")
        for parameter, state in self.optimizer.state.items():
            module_name, parameter_name = owners.get(id(parameter), (None, ""))
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    self._name(value, module_name, f"{parameter_name}: {name}" if parameter_name else name)

    def _name(self, tensor: torch.Tensor, module: str | None, name: str) -> None:
        _, block = self.gpu.mode.storages.get(tensor.untyped_storage()._cdata, (None, None))
        origin = self.origins.get(block)
        if origin is not None and not origin.name:
            self._describe(origin, tensor)
            origin.name, origin.made, origin.kept = name, origin.made._replace(module=module), None

    @staticmethod
    def _describe(origin: Origin, tensor: torch.Tensor) -> None:
        origin.shape, origin.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _line(frame: FrameType | None) -> tuple[str, int] | None:
    while frame is not None:
        if _tells(frame.f_code):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None
