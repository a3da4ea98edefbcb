"""4-bit layers: what they hold counts as parameters, and which products dequantize the weight."""

import pytest
import torch
from torch import nn

from benchmarks.request_by_request import Requests
from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.models.quantized import VirtualLinear4bit
from virtual_gpu.rules import active

WIDTH = 512


def layer(gpu):
    linear = nn.Linear(WIDTH, WIDTH, bias=False, device="meta")
    return gpu.place(VirtualLinear4bit(linear, torch.float16))


def test_statistics_are_parameters():
    gpu = VirtualGPU(CATALOG["T4"])
    module = layer(gpu)
    weights, blocks = WIDTH * WIDTH, WIDTH * WIDTH // 64
    held = [weights // 2, blocks, 16 * 4, 4, blocks // 256 * 4, 256 * 4]
    by_category = gpu.meter.live_by_category()
    assert by_category["parameters"] == sum(-(-size // 512) * 512 for size in held)
    assert by_category["other"] == 0 and module.weight.dtype == torch.uint8


def peak_of_forward(rows, without=()):
    gpu = VirtualGPU(CATALOG["T4"], without=[*without, "cublas_workspace"])
    module = layer(gpu)
    with gpu, torch.no_grad():
        x = torch.empty(rows, WIDTH, dtype=torch.float16)
        before = gpu.memory_allocated()
        module(x)
    return gpu.max_memory_allocated() - before


COPY, SCALES = WIDTH * WIDTH * 2, WIDTH * WIDTH // 64 * 4


@pytest.mark.parametrize(
    ("rows", "without", "more"),
    [
        (5, (), COPY + 2 * SCALES),
        (5, ("nested_scales",), COPY),
        (4, (), 0),
        (4, ("gemm_4bit",), COPY + 2 * SCALES),
    ],
)
def test_the_weight_that_is_dequantized_in_forward(rows, without, more, monkeypatch):
    monkeypatch.setattr(active, "installed", lambda library: (2, 13) if library == "torch" else (0, 50))
    out = -(-rows * WIDTH * 2 // 512) * 512
    assert peak_of_forward(rows, without) == out + more


def test_before_the_kernel_every_product_dequantizes(monkeypatch):
    monkeypatch.setattr(active, "installed", lambda library: (2, 13) if library == "torch" else (0, 49))
    assert peak_of_forward(1) == WIDTH * 2 + COPY


@pytest.mark.parametrize("bias", [False, True])
def test_the_requests_of_forward_and_backward(bias, monkeypatch):
    """A card's: the scales twice, the weight, the output; the scales once, the weight, the gradient."""
    monkeypatch.setattr(active, "installed", lambda library: (2, 13) if library == "torch" else (0, 50))
    gpu = VirtualGPU(CATALOG["H100"], without=["cublas_workspace"])
    linear = nn.Linear(WIDTH, WIDTH, bias=bias, device="meta")
    module = gpu.place(VirtualLinear4bit(linear.requires_grad_(False), torch.float16))
    with gpu:
        x = torch.empty(64, WIDTH, dtype=torch.float16, requires_grad=True)
        gpu.meter.recorder = made = Requests(gpu)
        out = module(x)
        forward = len(made.made)
        out.backward(torch.empty_like(out))
        before = gpu.memory_allocated()
        module(x.detach())
    rows = 64 * WIDTH * 2
    asked = [size for action, size in made.made[:forward] if action == "alloc"]
    assert asked == [*([WIDTH * 2] if bias else []), SCALES, SCALES, COPY, rows]
    asked = [(action, size) for action, size in made.made[forward:] if size in (SCALES, COPY)][:4]
    assert asked == [("alloc", SCALES), ("alloc", COPY), ("free", SCALES), ("free", COPY)]
    assert gpu.memory_allocated() == before  # the bias was cast once, and stays
    assert not bias or module.bias.dtype == torch.float16
