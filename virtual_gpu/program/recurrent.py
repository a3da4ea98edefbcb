"""Recurrent layers: cuDNN runs each in one call and keeps a reserve for backward, which nothing here counts.

Its size is cuDNN's own (closed source). What an H100 kept and took of a layer stands in benchmarks/README.md and its
records; as long as no rule counts it, the report says how much is missing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..language import tr
from .patches import Patches
from .watch import Watch


def install(patches: Patches, watch: Watch) -> None:
    """Say of LSTM, GRU and RNN that are trained on the card that their figure is off."""
    for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        patches.set(kind, "forward", _noting(kind.forward, watch))


def _noting(forward: Any, watch: Watch) -> Any:
    @functools.wraps(forward)
    def call(module: torch.nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
        on_card = any(parameter.is_cuda for parameter in module.parameters())
        if on_card and module.training and torch.is_grad_enabled():
            watch.note(_not_counted(module.mode.partition("_")[0]))
        return forward(module, *args, **kwargs)

    return call


def _not_counted(kind: str) -> str:
    return tr(
        ko=f"{kind}: cuDNN이 역전파를 위해 따로 두는 메모리를 세지 않았다. 여기 나온 값은 맞지 않고, LSTM이면 "
        "너무 작다. H100에서는 한 층이 fp32 출력의 5배(LSTM)나 6배(GRU)를 역전파까지 잡고, 순전파 동안 출력의 "
        "9~10배를 더 썼다",
        en=f"{kind}: what cuDNN keeps aside for backward is not counted: the figures here are off, an LSTM's far too "
        "low. On an H100 a layer kept 5 times (LSTM) or 6 times (GRU) its fp32 output until then; in forward it took "
        "another 9 to 10 times the output",
    )
