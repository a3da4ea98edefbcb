"""Liger-Kernel's table of memory (linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv, BSD-2-Clause).

A row is the highest `max_memory_allocated` of a call, the median of ten calls in a row, of one operation: of the eager
reference ("huggingface" or "torch"), or of Liger's own Triton kernel, which is refused. The programs, written anew from
the scripts of the row's date, are in the modules liger_* beside this.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from . import liger_attention, liger_layers, liger_losses, liger_preferences
from .recipe import ANY, NUMBER, SIZE, Prediction, Recipe, Refused, Row, Stated, from_source, gpu_of

PROGRAMS = liger_layers.PROGRAMS | liger_losses.PROGRAMS | liger_preferences.PROGRAMS | liger_attention.PROGRAMS
EAGER = ("huggingface", "torch")
CALLS = 3  # the first makes the gradients; from the second on all are alike, so that the third is the median of ten
_MODEL = re.compile(r"(?P<kernel>\w+) \((?:eager )?(?P<provider>\w+)")
DTYPES = ("torch.float32", "torch.float16", "torch.bfloat16")
SETTINGS = {
    **dict.fromkeys(
        ("B", "T", "V", "D", "H", "BT", "M", "N", "S", "L", "C", "E", "K", "C_in", "C_out", "bsz", "hidden_size",
         "intermediate_size", "intermediate_dim", "seq_len", "num_q_heads", "num_kv_heads", "num_heads", "batch_size",
         "kernel_size", "groups", "channels_per_group", "vocab_size", "ffn_local", "num_shards"), SIZE
    ),
    **dict.fromkeys(("weight_hard_loss", "weight_soft_loss", "ignore_index", "beta", "eps", "dilation"), NUMBER),
    "bias": (False, True),
    "dim": (-1,),
    "dtype": DTYPES,
    "hidden_act": ("gelu_pytorch_tanh", "silu"),
    "activation_type": ("geglu", "swiglu"),
    "importance_sampling_level": ("token", "sequence"),
    "op_mode": ("forward", "backward", "full"),
    **dict.fromkeys(("mode", "sweep_dim"), ANY),
}  # fmt: skip
_SLOW = ("fused_moe",)
# The figure holds what the script's other programs left in the process, which no source states.
LEFT_BEHIND = {"embedding": "12 GB and more in each figure are of torch.compile's copies of every size before"}


def predict(row: Row) -> Prediction:
    """The bytes of a row of the table."""
    found = _MODEL.match(row.get("model") or "")
    if not found:
        raise Refused(f"names no operation: {row.get('model')!r}")
    if found["provider"] not in EAGER:
        raise Refused(f"{found['provider']}: a kernel of Liger's own, in Triton")
    if found["kernel"] not in PROGRAMS:
        raise Refused(f"{found['kernel']}: this operation has not been written here")
    if found["kernel"] in LEFT_BEHIND:
        raise Refused(f"{found['kernel']}: {LEFT_BEHIND[found['kernel']]}")
    settings = Stated({name: _value(value) for name, value in row["settings"].items()})
    gpu = gpu_of(row)
    with gpu:
        if settings.op_mode == "forward":  # in that process "full" was measured before: both threads have multiplied
            PROGRAMS[found["kernel"]](gpu, settings).calls("full")()
        program = PROGRAMS[found["kernel"]](gpu, settings)
        call = program.calls(settings.op_mode)
        for _ in range(CALLS):
            gpu.reset_peak_memory_stats()
            call()
    return Prediction(gpu.max_memory_allocated(), note=program.note)


def _value(value: Any) -> Any:
    """ "torch.bfloat16" → the dtype."""
    return getattr(torch, value.removeprefix("torch.")) if value in DTYPES else value


RECIPES = (
    Recipe(
        name="liger",
        what="single operations and losses, forward and backward",
        what_ko="연산 하나와 손실의 순전파와 역전파",
        handles=from_source("linkedin/Liger-Kernel"),
        predict=predict,
        settings=SETTINGS,
        fast=lambda row: not any(name in row["model"] for name in _SLOW),
    ),
)
