"""Autocast's lists are those of PyTorch's own header, and what they say holds for functions and methods alike."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.rules import autocast

HALF, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def gpu():
    return VirtualGPU(CATALOG["A100-40GB"])


@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("LOWER_PRECISION_FP", autocast.LOWER_PRECISION),
        ("FP32", autocast.FP32),
        ("FP32_SET_OPT_DTYPE", autocast.FP32_OUTPUT),
        ("PROMOTE", autocast.PROMOTE),
    ],
)
def test_the_lists_are_the_installed_headers(macro, ours):
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    body = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)+.*)\n", header.read_text())[1]
    theirs = {".".join(name.split(", ")) for name in re.findall(r"_\(([\w, ]+)\)", body)}
    assert ours == theirs


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.exp(),
        lambda x: torch.exp(x),
        lambda x: x**2,
        lambda x: 2**x,
        lambda x: x.pow(2),
        lambda x: x.rsqrt(),
        lambda x: x.sum(),
        lambda x: x.sum(-1, keepdim=True),
        lambda x: x.softmax(-1),
        lambda x: F.softmax(x, -1),
        lambda x: x.log_softmax(-1),
        lambda x: x.cumsum(0),
        lambda x: x.prod(),
        lambda x: x.norm(),
        lambda x: x.norm(dim=-1),
        lambda x: torch.linalg.vector_norm(x),
        lambda x: F.layer_norm(x, (16,)),
        lambda x: F.rms_norm(x, (16,)),
        lambda x: F.mse_loss(x, x),
        lambda x: F.cross_entropy(x, x.new_zeros(4, dtype=torch.int64)),
        lambda x: torch.addcmul(x, x, x.float()),
    ],
)
def test_what_stays_in_fp32(gpu, run):
    with gpu:
        x = torch.empty(4, 16, dtype=HALF)
        with gpu.autocast(HALF):
            assert run(x).dtype == FP32


@pytest.mark.parametrize(
    "run",
    [
        lambda x, w: F.linear(x, w),
        lambda x, w: x @ w,
        lambda x, w: torch.einsum("ab,cb->ac", x, w),
        lambda x, w: torch.mv(w, x[0]),
        lambda x, w: torch.addmm(x, x, w),
    ],
)
def test_what_goes_to_16_bits(gpu, run):
    with gpu, gpu.autocast(HALF):
        assert run(torch.empty(4, 16), torch.empty(16, 16)).dtype == HALF


def test_what_only_a_cpu_casts(gpu):
    """A CPU's autocast casts concatenated tensors, and those that are padded; CUDA's does not."""
    with gpu, gpu.autocast(HALF):
        x = torch.empty(1, 4, 16, dtype=HALF)
        assert F.pad(x, (1, 1), mode="reflect").dtype == HALF
        wide = x.float()
        before = gpu.memory_allocated()
        gpu.reset_peak_memory_stats()
        y = torch.cat([x, wide])
        assert y.dtype == FP32 and gpu.max_memory_allocated() == before + 512  # no cast beside it


@pytest.mark.parametrize("product", ["ab,cb->ac", "linear"])
def test_a_weight_is_cast_once_and_goes_when_autocast_ends(gpu, product):
    def run(x, w):
        return F.linear(x, w) if product == "linear" else torch.einsum(product, x, w)

    with gpu, torch.no_grad():
        w, x = torch.empty(1024, 1024, requires_grad=True), torch.empty(4, 1024, dtype=HALF)
        run(x.float(), w)  # the workspace
        held = gpu.memory_allocated()
        with gpu.autocast(HALF):
            for _ in range(2):
                run(x, w)
                assert gpu.memory_allocated() == held + 2 * 1024 * 1024
        assert gpu.memory_allocated() == held


def test_the_activation_is_cast_before_the_weight_in_an_einsum(gpu):
    """As a card's traces have it; both go in this order after the product, where no gradient is asked for."""
    from benchmarks.request_by_request import Requests

    with gpu, torch.inference_mode(), gpu.autocast(HALF):
        x, w = torch.empty(4, 1024), torch.empty(512, 1024, requires_grad=True)
        torch.einsum("ab,cb->ac", x, w)
        recorder = gpu.meter.recorder = Requests(gpu)
        torch.einsum("ab,cb->ac", x, w)
        gpu.meter.recorder = None
    activation, weight, out = 4 * 1024 * 2, 512 * 1024 * 2, 4 * 512 * 2
    made = [("alloc", activation), ("alloc", weight), ("alloc", out), ("free", activation), ("free", weight)]
    assert recorder.made == [*made, ("free", out)]


def test_real_tensors_keep_the_cpus_autocast(gpu):
    def run(x):
        ops = (F.mse_loss(x, x), x @ x, torch.cat([x, x.bfloat16()]), x.bfloat16().exp(), x.bfloat16().prod())
        return [*ops, torch.einsum("ij,kj->ik", x, x), F.layer_norm(x.bfloat16(), (4,)), x.norm(), x.bfloat16().sum()]

    torch.manual_seed(0)
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=HALF):
        expected = run(x)
        with gpu.rules:
            inside = run(x)
        after = run(x)
    for other in (inside, after):
        assert [t.dtype for t in other] == [t.dtype for t in expected]
        assert all(torch.equal(a, b) for a, b in zip(other, expected, strict=True))


def test_it_can_be_left_out():
    gpu = VirtualGPU(CATALOG["T4"], without=["autocast"])
    with gpu, gpu.autocast(HALF):
        assert torch.empty(4, 4, dtype=HALF).exp().dtype == HALF
