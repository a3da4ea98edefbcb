"""Losses on CUDA: what is reduced is made first, and some outputs stay as large as it was."""

from __future__ import annotations

from typing import Any

import torch

from .reductions import buffers
from .registry import Rule

_aten = torch.ops.aten
_NONE = 0  # at::Reduction
_KEEP = (_aten.mse_loss.default, _aten.smooth_l1_loss.default)


def _pointwise_loss(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> torch.Tensor:
    """The loss of each element, which is then reduced; the output of mse_loss and smooth_l1_loss was made as large.

    TORCH_META_FUNC(mse_loss) makes the output by the inputs and resizes it to one number, which gives nothing back.
    """
    out, first, second = run(), *args[:2]
    if (args[2] if len(args) > 2 else 1) == _NONE or not first.numel():
        return out
    numel = torch.broadcast_shapes(first.shape, second.shape).numel()
    if op in _KEEP:
        out = out.new_empty(numel).as_strided((), ())
        mode.count(out)
    with mode.gpu.holding(numel * out.element_size()):
        mode.count(out)
        mode.gpu.temporaries(*buffers(mode, first, 1, None, max(4, out.element_size())))
    return out


def _log_sigmoid(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> tuple:
    """The second output, a CPU's buffer, is empty on CUDA."""
    out, _ = run()
    return out, out.new_empty(0)


REDUCED = Rule(
    name="pointwise_losses",
    what="the loss of every element before it is reduced; mse_loss and smooth_l1_loss keep as much as their input",
    source="TORCH_META_FUNC and TORCH_IMPL_FUNC of mse_loss and smooth_l1_loss, huber_loss in "
    "aten/src/ATen/native/Loss.cpp; log_sigmoid_forward_cuda in cuda/Activation.cpp",
    operators={
        _aten.mse_loss.default: _pointwise_loss,
        _aten.smooth_l1_loss.default: _pointwise_loss,
        _aten.huber_loss.default: _pointwise_loss,
        _aten.log_sigmoid_forward.default: _log_sigmoid,
    },
)
