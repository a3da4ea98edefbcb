"""`torch.cuda.nccl`: what NCCL does with tensors that one process has on several cards.

It writes into what it is given and allocates nothing of PyTorch's; what it takes for itself is in the report
(`Report.room`). Sums are numbers that nobody knows here. `is_available` is PyTorch's own. Source: nccl.cpp and
python_nccl.cpp in torch/csrc/cuda.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import known
from .device import ProgramGPU
from .patches import Patches


def install(patches: Patches, gpu: ProgramGPU) -> None:
    """The functions that `torch.cuda.nccl` calls; a CPU build of PyTorch lacks them."""

    def begins(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *sizes: int) -> None:
        _check(inputs, outputs, *sizes)
        gpu.uses_nccl |= len(inputs) > 1

    def reduce_(inputs: Sequence[torch.Tensor], output: torch.Tensor, root: int, *_: Any) -> None:
        _check_root(root, inputs)
        begins(inputs, [output if place == root else one for place, one in enumerate(inputs)])
        _unknown(output)

    def all_reduce(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *_: Any) -> None:
        begins(inputs, outputs)
        for output in outputs:
            _unknown(output)

    def broadcast(tensors: Sequence[torch.Tensor], root: int, *_: Any) -> None:
        _check_root(root, tensors)
        begins(tensors, tensors)
        for tensor in tensors:
            _write(tensor, tensors[root])

    def all_gather(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *_: Any) -> None:
        begins(inputs, outputs, len(inputs), 1)
        for output in outputs:
            for part, one in zip(output.view(len(inputs), -1), inputs, strict=True):
                _write(part, one.view(-1))

    def reduce_scatter(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *_: Any) -> None:
        begins(inputs, outputs, 1, len(inputs))
        for output in outputs:
            _unknown(output)

    def refused(name: str) -> Callable[..., None]:
        def refuse(*_: Any) -> None:
            raise NotImplementedError(f"torch.cuda.nccl.{name} on a virtual GPU")

        return refuse

    patches.set(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    patches.set_all(
        torch._C,
        {
            "_nccl_reduce": reduce_,
            "_nccl_all_reduce": all_reduce,
            "_nccl_broadcast": broadcast,
            "_nccl_all_gather": all_gather,
            "_nccl_reduce_scatter": reduce_scatter,
            "_nccl_unique_id": refused("unique_id"),
            "_nccl_init_rank": refused("init_rank"),
        },
    )


@torch.no_grad()
def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor is not value:
        tensor.copy_(value)


@torch.no_grad()
def _unknown(tensor: torch.Tensor) -> None:
    tensor.mul_(1)  # its numbers are others now
    known.forget(tensor)


def _check_root(root: int, tensors: Sequence[torch.Tensor]) -> None:
    if not 0 <= root < len(tensors):
        raise RuntimeError("invalid root")


def _check(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], times_input: int = 1, times_output: int = 1
) -> None:
    """RuntimeError, in PyTorch's words (check_inputs), for tensors that NCCL does not take."""
    if not inputs:
        raise RuntimeError("input sequence can't be empty")
    if len(inputs) != len(outputs):
        raise RuntimeError(
            "inputs and outputs sequences have to be of the same length, but got input of length "
            f"{len(inputs)} and output of length {len(outputs)}"
        )
    first, cards = inputs[0], set()
    for one, output in zip(inputs, outputs, strict=True):
        pair = (one, output)
        dense, as_large = all(t.is_cuda and not t.is_sparse for t in pair), first.numel() * times_input
        for wrong, said in (
            (not dense, "input and output elements have to be cuda dense Tensors"),
            (any(t.dtype != first.dtype for t in pair), "all inputs and outputs must be of the same Tensor dtype"),
            (not all(t.is_contiguous() for t in pair), "all inputs and outputs have to be contiguous"),
            (one.numel() != first.numel(), "all inputs must have the same number of elements"),
            (one.device != output.device, "input and output must be on the same device"),
            (output.numel() * times_output != as_large, "output must be of size input_size * size_multiplier"),
            (one.device in cards, "inputs must be on unique devices"),
        ):
            if wrong:
                raise RuntimeError(said)
        cards.add(one.device)
