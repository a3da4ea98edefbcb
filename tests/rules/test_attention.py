"""Which attention kernel runs, and what it keeps."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from virtual_gpu.allocator import round_size
from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.rules import attention
from virtual_gpu.rules.attention import Request, attention_kernel

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
PLAIN = Request(HALF, 64, 64, 512, 512)


def chosen(capability, dtype=HALF, dim=64, **given):
    return attention_kernel(capability, replace(PLAIN, dtype=dtype, head_dim=dim, **{"value_dim": dim} | given))


@pytest.mark.parametrize(
    ("capability", "given", "kernel"),
    [
        ((7, 5), {}, "efficient"),
        ((7, 5), {"dtype": FP32}, "efficient"),
        ((7, 5), {"dtype": FP32, "dim": 5}, "efficient"),  # alignment 1
        ((7, 5), {"dtype": BF16}, "math"),
        ((7, 5), {"grouped_query": True}, "math"),
        ((7, 5), {"dim": 60}, "math"),  # tensor cores want 8
        ((8, 0), {}, "flash"),
        ((8, 0), {"dtype": BF16, "grouped_query": True, "dim": 128}, "flash"),
        ((8, 0), {"dim": 60}, "flash"),  # widened to 64
        ((8, 0), {"dim": 256}, "flash"),
        ((8, 0), {"dim": 264}, "efficient"),
        ((8, 0), {"has_mask": True}, "efficient"),
        ((8, 0), {"has_mask": True, "dim": 60}, "math"),
        ((8, 0), {"has_mask": True, "grouped_query": True}, "math"),
        ((8, 0), {"dtype": FP32}, "efficient"),
        ((8, 0), {"dtype": FP32, "dim": 6}, "math"),  # 4 for fp32
        ((8, 0), {"dtype": FP32, "grouped_query": True}, "math"),
        ((8, 0), {"is_causal": True, "key_length": 513}, "efficient"),
        ((8, 0), {"dim": 24, "value_dim": 16}, "efficient"),
        ((8, 0), {"dim": 200}, "flash"),
        ((8, 6), {"dim": 192}, "flash"),
        ((8, 6), {"dim": 200}, "efficient"),
        ((8, 6), {"dim": 200, "trains": False}, "flash"),
        ((8, 9), {"dim": 256}, "flash"),
        ((8, 9), {"dim": 256, "dropout": 0.1}, "efficient"),
        ((12, 0), {"dim": 224}, "efficient"),
        ((9, 0), {"dtype": BF16, "grouped_query": True, "dim": 128}, "flash"),
    ],
)
def test_which_kernel_runs(capability, given, kernel):
    assert chosen(capability, **given) == kernel


@pytest.mark.parametrize(
    ("given", "kernel"),
    [
        ({}, "cudnn"),
        ({"has_mask": True, "grouped_query": True}, "cudnn"),
        ({"head_dim": 192, "value_dim": 128}, "cudnn"),
        ({"head_dim": 160, "value_dim": 160}, "flash"),
        ({"dropout": 0.125}, "cudnn"),
        ({"dropout": 0.1}, "flash"),
        ({"has_mask": True, "mask_trains": True}, "efficient"),
        ({"dtype": FP32}, "efficient"),
    ],
)
def test_where_cudnn_goes_first(given, kernel):
    rules = ["cudnn_attention", "cudnn_dropout"]
    assert attention_kernel((9, 0), replace(PLAIN, **given), rules=rules) == kernel


def test_what_an_h100_gave_cudnn_with_torch_2_11():
    """attention: bf16 256 train, attention: dropout 0.1 bf16 train of the record."""
    rules = ["cudnn_attention", "cudnn_wide_heads"]
    assert attention_kernel((9, 0), replace(PLAIN, head_dim=256, value_dim=256), rules=rules) == "cudnn"
    assert attention_kernel((9, 0), replace(PLAIN, dropout=0.1), rules=rules) == "cudnn"
    assert attention_kernel((9, 0), replace(PLAIN, head_dim=264, value_dim=264), rules=rules) == "efficient"


@pytest.mark.parametrize(
    ("backend", "dtype", "kernel"),
    [("MATH", HALF, "math"), ("EFFICIENT_ATTENTION", HALF, "efficient"), ("FLASH_ATTENTION", FP32, None)],
)
def test_a_kernel_that_the_program_chose(monkeypatch, backend, dtype, kernel):
    chosen, choose = [], attention.attention_kernel
    monkeypatch.setattr(attention, "attention_kernel", lambda *a, **kw: chosen.append(choose(*a, **kw)) or chosen[-1])
    with VirtualGPU(CATALOG["A100-40GB"]), sdpa_kernel(getattr(SDPBackend, backend)):
        q = torch.empty(1, 2, 64, 64, dtype=dtype)
        if kernel is None:
            with pytest.raises(RuntimeError, match="No available kernel"):
                F.scaled_dot_product_attention(q, q, q)
        else:
            F.scaled_dot_product_attention(q, q, q)
            assert chosen == [kernel]


def test_grouped_heads_where_the_efficient_kernel_takes_them():
    request = replace(PLAIN, grouped_query=True)
    assert attention_kernel((7, 5), request) == "math"
    assert attention_kernel((7, 5), request, rules=["efficient_gqa"]) == "efficient"


def kept(gpu, dtype=HALF, mask=None, length=512, **given):
    """Bytes that are held after attention, beside its inputs."""
    with gpu:
        q, k, v = (torch.empty(1, 2, length, 64, dtype=dtype, requires_grad=True) for _ in range(3))
        mask = None if mask is None else torch.empty(1, 1, length, length, dtype=mask)
        before = gpu.memory_allocated()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **given)
        return gpu.memory_allocated() - before, out


def test_what_the_efficient_kernel_saves():
    """The output, and one fp32 number a row of queries (logsumexp); no length × length matrix."""
    held, out = kept(VirtualGPU(CATALOG["T4"]))
    assert held == out.numel() * 2 + 2 * 512 * 4  # the random state is on the CPU
    with torch.no_grad():
        held, out = kept(VirtualGPU(CATALOG["T4"]))
    assert held == out.numel() * 2


def test_a_bool_mask_becomes_a_float_one():
    """Two bytes an element in place of one: the kernel saves the mask that it was given."""
    gpu = VirtualGPU(CATALOG["A100-40GB"])
    plain = kept(gpu)[0]
    assert kept(gpu, mask=HALF)[0] == plain - 2 * 512  # its own mask is an input; flash keeps a random state
    assert kept(gpu, mask=torch.bool)[0] - kept(gpu, mask=HALF)[0] == 512 * 512 * 2


@pytest.mark.parametrize(("length", "padded"), [(512, 0), (504, 0), (500, 504)])
def test_a_mask_with_odd_rows_is_padded_once_for_all_heads(length, padded):
    gpu = VirtualGPU(CATALOG["A100-40GB"])
    copy = kept(gpu, mask=HALF, length=length)[0] - kept(gpu, length=length)[0]
    assert copy == round_size(length * padded * 2) - 2 * 512  # 1 of the 2 heads; flash keeps a random state


def test_only_math_keeps_the_square():
    gpu = VirtualGPU(CATALOG["T4"])
    assert kept(gpu, HALF)[0] < 512 * 512 * 2 <= kept(gpu, BF16)[0]


@pytest.mark.parametrize(("name", "dtype"), [("T4", HALF), ("T4", BF16), ("A100-40GB", BF16), ("H100", FP32)])
@pytest.mark.parametrize("dim", [64, 60])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_shape_and_dtype(name, dtype, dim, mode):
    gpu = VirtualGPU(CATALOG[name])
    with gpu, mode():
        q, k = torch.empty(2, 4, 8, dim, dtype=dtype), torch.empty(2, 2, 8, dim, dtype=dtype)
        out = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    assert (out.shape, out.dtype) == (q.shape, dtype)


def test_cudnn_forward_and_backward():
    gpu = VirtualGPU(CATALOG["H100"])
    gpu.rules._names |= {"cudnn_attention"}
    with gpu:
        q, k = (torch.empty(2, heads, 128, 64, dtype=BF16, requires_grad=True) for heads in (4, 4))
        out = F.scaled_dot_product_attention(q, k, k, is_causal=True)
        out.sum().backward()
    assert out.shape == q.shape and q.grad.shape == q.shape


def count(monkeypatch):
    calls, choose = [], attention.attention_kernel
    monkeypatch.setattr(attention, "attention_kernel", lambda *args, **kw: calls.append(1) or choose(*args, **kw))
    return calls


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_checkpoint_takes_cudas_kernel_too(monkeypatch, reentrant):
    calls, gpu = count(monkeypatch), VirtualGPU(CATALOG["T4"])
    with gpu:
        x = torch.empty(1, 2, 8, 16, dtype=HALF, requires_grad=True)
        out = checkpoint(lambda x: F.scaled_dot_product_attention(x, x, x), x, use_reentrant=reentrant)
        assert len(calls) == 1
        out.sum().backward()
    assert len(calls) == 2


def test_a_module_takes_cudas_kernel_too(monkeypatch):
    calls, gpu = count(monkeypatch), VirtualGPU(CATALOG["T4"])
    model = gpu.place(nn.MultiheadAttention(64, 4, batch_first=True, device="meta", dtype=HALF))
    with gpu:
        x = torch.empty(2, 8, 64, dtype=HALF)
        model(x, x, x, need_weights=False)
    assert calls


def test_real_tensors_keep_the_cpus(monkeypatch):
    calls, gpu = count(monkeypatch), VirtualGPU(CATALOG["T4"])
    torch.manual_seed(0)
    q = torch.randn(1, 2, 8, 16)
    expected = F.scaled_dot_product_attention(q, q, q)
    with gpu.rules:
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), expected)
    assert not calls


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", None])
def test_a_last_dimension_that_is_not_dense_goes_to_math(name):
    """T5's position bias, whose heads lie last: an H100 kept its encoder's squares (the program run_summarization)."""
    gpu, shapes = VirtualGPU(CATALOG["H100"]), dict.fromkeys(("query", "key", "value"), (1, 2, 512, 64))
    with gpu:
        given = {key: torch.empty(shape) for key, shape in {**shapes, "attn_mask": (1, 2, 512, 512)}.items()}
        if name is not None:
            given[name] = given[name].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        F.scaled_dot_product_attention(**given)
        gpu.reset_peak_memory_stats()
        before = gpu.memory_allocated()
        F.scaled_dot_product_attention(**given)
    square = 2 * 512 * 512 * 4
    assert (gpu.max_memory_allocated() - before >= square) == (name is not None)
