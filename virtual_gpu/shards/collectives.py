"""Counts what ranks say to each other."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NOTHING_SENT = {"wait_tensor", "wrap_tensor_autograd", "barrier"}


def of_dtensors(types: tuple[type, ...]) -> bool:
    """Whether an operation has a DTensor: what that sends meanwhile (ring attention) comes to the mode by itself."""
    return any(kind.__name__ == "DTensor" for kind in types)  # its module brings PyTorch's compiler


class Collectives(TorchDispatchMode):
    """Counts the calls and the elements of every collective: the larger of what goes in and what comes out.

    DDP, ZeroRedundancyOptimizer and FSDP2 call c10d's collectives (`elements`: parameters and gradients), tensor
    parallelism the functional ones (`activations`), and so does who gathers a DTensor. `calls`: both. `nbytes` and
    `functional_nbytes`: the same in bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter = Counter()
        self.elements: Counter = Counter()
        self.nbytes: Counter = Counter()
        self.activations: Counter = Counter()
        self.functional_nbytes: Counter = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see CountingMode

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if of_dtensors(types):
            return NotImplemented
        self.count(func, args)
        return func(*args, **(kwargs or {}))

    def count(self, func: Any, args: Any) -> None:
        """Take `func` down if it is a collective."""
        if func.namespace not in ("c10d", "_c10d_functional"):
            return
        name = func._schema.name.split("::")[1].strip("_")
        if name in NOTHING_SENT:
            return
        tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        elements = max(t.numel() for t in tensors)
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:  # makes what c10d's is given to fill
            elements *= args[1]
        if func.namespace == "c10d":
            self.elements[name] += elements
            self.nbytes[name] += max(t.numel() * t.itemsize for t in tensors)
        else:
            self.activations[name] += elements
            self.functional_nbytes[name] += elements * max(t.itemsize for t in tensors)
        self.calls[name] += 1
