"""Attention by hand, its memory before and in backward, as students of Stanford's CS336 measured it.

(batch, length, width) without heads and mask, in fp32. Four scripts, which differ in what is still held when they look:
damek's and Wedsonlin's an output of the warm-up, MAGMA27's (with torch's own softmax) the one before, EnzoDing's none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch

from virtual_gpu.counting.gpu import VirtualGPU

from .cs336 import softmax
from .messages import message
from .recipe import ANY, SIZE, Prediction, Recipe, Refused, Row, from_source, gpu_of

Numbers = Mapping[str, int]  # metric → bytes
WARM_UP, TIMED = 2, 2  # steps: from the second on all are alike
_SHAPE = re.compile(r"attention B=(?P<batch>\d+) S=(?P<seq>\d+) d=(?P<d_model>\d+)")


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Scores, softmax by hand, sum; einops' einsum, which names the axes anew."""
    scores = torch.einsum("abc,adc->abd", query, key) / query.shape[-1] ** 0.5
    weights = softmax(scores)
    return torch.einsum("abd,adc->abc", weights, value)


def _inputs(s: SimpleNamespace) -> list[torch.Tensor]:
    return [torch.randn(s.batch, s.seq, s.d_model, requires_grad=True) for _ in range(3)]


def _drop_gradients(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None


def damek(gpu: VirtualGPU, s: SimpleNamespace) -> Numbers:
    """attention_benchmarking_script.py: five moments. The warm-up's output and loss keep their names."""
    inputs = _inputs(s)

    def step() -> None:
        out = attention(*inputs)
        loss = out.sum()
        loss.backward()
        _drop_gradients(inputs)

    for _ in range(WARM_UP):
        out = attention(*inputs)
        loss = out.sum()
        loss.backward()
        _drop_gradients(inputs)
    found = {}
    gpu.reset_peak_memory_stats()
    for _ in range(TIMED):
        attention(*inputs).sum()
    found["forward_peak"] = gpu.max_memory_allocated()
    found["mem_after_inputs"] = gpu.memory_allocated()
    out = attention(*inputs)
    loss = out.sum()
    found["mem_before_backward"] = gpu.memory_allocated()
    found["saved_activations"] = found["mem_before_backward"] - found["mem_after_inputs"]
    gpu.reset_peak_memory_stats()
    for _ in range(TIMED):
        step()
    found["backward_peak"] = gpu.max_memory_allocated()
    return found


def wedsonlin(gpu: VirtualGPU, s: SimpleNamespace) -> Numbers:
    """attention_benchmark.py: a given gradient; the warm-up's output keeps its name."""
    inputs = _inputs(s)
    given = torch.randn_like(inputs[0])
    for _ in range(WARM_UP):
        out = attention(*inputs)
        out.backward(given)
        _drop_gradients(inputs)
    output = attention(*inputs)  # noqa: F841
    return {"memory_allocated before backward": gpu.memory_allocated()}


def magma27(gpu: VirtualGPU, s: SimpleNamespace) -> Numbers:
    """pytorch_attention.py before it was compiled: torch's softmax; the leaves, and their gradients, are on the CPU."""
    inputs = _inputs(s)

    def forward() -> torch.Tensor:
        query, key, value = inputs
        scores = torch.matmul(query, key.transpose(-2, -1)) / query.size(-1) ** 0.5
        weights = torch.softmax(scores, dim=-1)
        output = torch.matmul(weights, value)
        return output

    for _ in range(WARM_UP):
        output = forward()
        output.sum().backward()
        _drop_gradients(inputs)
    output = forward()
    return {"memory_allocated before backward": gpu.memory_allocated()}


def enzoding(gpu: VirtualGPU, s: SimpleNamespace) -> Numbers:
    """attention_operator/benchmark.py: nothing of the warm-up is left but the workspaces."""
    for _ in range(WARM_UP):
        inputs = _inputs(s)
        out = attention(*inputs).sum()
        out.backward()
        _drop_gradients(inputs)
        del inputs, out
        gpu.empty_cache()
    inputs = _inputs(s)
    out = attention(*inputs).sum()  # noqa: F841
    return {"memory_allocated before backward": gpu.memory_allocated()}


SCRIPTS: dict[str, Callable[[VirtualGPU, SimpleNamespace], Numbers]] = {
    "damek/cs336-assignment2-systems": damek,
    "Wedsonlin/assignment2-systems": wedsonlin,
    "MAGMA27/assignment2-systems": magma27,
    "EnzoDing-rgb/cs336-assignment2-systems": enzoding,
}


def is_attention(row: Row) -> bool:
    """Whether a row is of one of these scripts: it has a length and a width, and no layers."""
    settings = row.get("settings", {})
    return from_source(*SCRIPTS)(row) and {"seq", "d_model"} <= set(settings) and "layers" not in settings


def predict(row: Row) -> int:
    """The bytes of the row's moment."""
    settings = {"batch": 8} | dict(row["settings"])
    gpu = card_of(row)
    with gpu:
        found = SCRIPTS[row["source"]](gpu, SimpleNamespace(**settings))
    if row["metric"] not in found:
        raise Refused(f"the script does not print {row['metric']!r}")
    return found[row["metric"]]


def card_of(row: Row) -> VirtualGPU:
    """ "Hopper class" is an H100; where no card is stated, an A100-80GB, whose cuBLAS workspace most others have."""
    return gpu_of(dict(row) | ({"gpu": "H100"} if str(row.get("gpu")).startswith("Hopper") else {}))


def predict_message(row: Row) -> Prediction:
    """What PyTorch's message says where EnzoDing's script dies: what it tried, holds, and has cached."""
    shape = _SHAPE.search(row["model"])
    gpu = card_of(row)
    try:
        with gpu:
            enzoding(gpu, SimpleNamespace(**{name: int(value) for name, value in shape.groupdict().items()}))
    except torch.OutOfMemoryError as error:
        ours = message(str(error))
        off = [
            f"{name}: {row[name]:,} in the message, {ours.get(name):,} here"
            for name in ("tried_bytes", "allocated_bytes", "reserved_unallocated_bytes")
            if name in row and abs(row[name] - ours.get(name, 0)) > row["resolution_bytes"]
        ]
        return Prediction(ours["tried_bytes"], died=True, agrees=not off, note="; ".join(off))
    return Prediction(None, agrees=False, note="fits here, and died on the card")


RECIPES = (
    Recipe(
        name="attention by hand",
        what="the students' attention benchmarks, eager, fp32",
        what_ko="손으로 쓴 어텐션, fp32",
        handles=is_attention,
        predict=predict,
        settings={
            **dict.fromkeys(("batch", "seq", "d_model"), SIZE),
            **dict.fromkeys(("causal", "compile"), (False,)),  # the eager script, without a mask
            "dtype": ("float32",),
            "torch": ANY,
        },
        fast=lambda row: True,
    ),
    Recipe(
        name="attention by hand, out of memory",
        what="EnzoDing's attention benchmark where it dies",
        what_ko="같은 어텐션이 메모리 부족으로 멈추는 곳",
        handles=lambda row: row["kind"] == "oom" and "EnzoDing" in row["source"] and bool(_SHAPE.search(row["model"])),
        predict=predict_message,
        fast=lambda row: True,
    ),
)
