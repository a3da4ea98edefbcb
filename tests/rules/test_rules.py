"""The registry: which rules hold, how they are switched, and that nothing of them stays behind."""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F

from benchmarks.request_by_request import Requests
from virtual_gpu.allocator import round_size
from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.rules import active
from virtual_gpu.rules.active import NEWEST, RULES, ActiveRules, warn_of_unknown_versions
from virtual_gpu.rules.attention_memory import (
    cudnn_backward,
    efficient_forward,
    efficient_workspace,
    flash_backward,
    flash_forward,
)
from virtual_gpu.rules.cub import sort_pairs_bytes
from virtual_gpu.rules.cublas import cublas_workspace_bytes
from virtual_gpu.rules.embedding import most_parts
from virtual_gpu.rules.foreach import norm_partials
from virtual_gpu.rules.norms import group_norm_backward, group_norm_forward
from virtual_gpu.rules.reductions import reduction_buffers
from virtual_gpu.rules.registry import Rule, overload, version
from virtual_gpu.rules.sort import sort_requests

HALF = torch.float16
A100 = 108 * 2048


def names(capability=(8, 0), **given):
    return {rule.name for rule in ActiveRules(capability, **given).active()}


@pytest.fixture
def installed(monkeypatch):
    def pretend(number):
        monkeypatch.setattr(active, "installed", lambda library: version(number))

    return pretend


def test_versions():
    assert version("2.13.0+cpu") == (2, 13) and version("2.14.0a0+git1") == (2, 14) and version("0.50.2") == (0, 50)
    rule = Rule("x", "", "", since="2.8", until="2.10", capability=((8, 0), (9, 0)))
    holds = [rule.holds((2, minor), (8, 6)) for minor in (7, 8, 9, 10)]
    assert holds == [False, True, True, False]
    assert not rule.holds((2, 8), (7, 5)) and not rule.holds((2, 8), (9, 0)) and rule.holds((2, 8), (8, 0))


def test_what_holds_when(installed):
    installed("2.10")
    assert "cudnn_attention" not in names((9, 0)) and "cublas_workspace" in names()
    installed("2.11")
    assert "cudnn_wide_heads" in names((9, 0)) - names((10, 0)) and "cudnn_dropout" not in names((9, 0))
    installed("2.12")
    assert {"cudnn_wide_heads", "cudnn_dropout"} <= names((9, 0))
    installed("2.13")
    assert "cudnn_attention" in names((9, 0)) and "cudnn_attention" not in names((8, 0)) | names((12, 0))
    assert "efficient_gqa" not in names() and "cudnn_wide_heads" not in names((9, 0))
    installed("2.14")
    assert {"efficient_gqa", "cublas_workspace"} <= names() and "cublas_workspace_not_kept" not in names()
    installed("2.15")
    assert "cublas_workspace_not_kept" in names() and "cublas_workspace" not in names()


def test_every_rule_has_a_source_and_is_listed():
    assert all(rule.what and rule.source and rule.name == name for name, rule in RULES.items())
    text = str(VirtualGPU(CATALOG["T4"]).rules)
    assert text.startswith(f"PyTorch {torch.__version__}")
    assert "\ndropout_mask (torch 2.6 on): a mask of one byte" in text


def test_a_newer_pytorch_says_so_once(installed):
    warn_of_unknown_versions.cache_clear()
    installed("3.0")
    with pytest.warns(UserWarning, match=NEWEST):
        ActiveRules((8, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ActiveRules((8, 0))
    warn_of_unknown_versions.cache_clear()


def test_a_rule_that_does_not_exist():
    with pytest.raises(ValueError, match="dropout_mask"):
        VirtualGPU(CATALOG["T4"], without=["dropout"])


# -- left out, one at a time ------------------------------------------------------------------------------------------


def dropped(x):
    return F.dropout(x)


def dropped_by_a_method(x):
    return torch.nn.Dropout()(x)


def normalized(x):
    return F.layer_norm(x, (1024,))


def attended(x):
    q = x.view(1, 32, 512, 64).bfloat16()  # of which a T4 keeps all probabilities
    return F.scaled_dot_product_attention(q, q, q)


def multiplied(x):
    return x @ x


KEPT = {  # what is held after the operation on 1024 × 1024 in fp16 with CUDA's way, less with the CPU's
    "dropout_mask": (dropped, 2**20 - 2 * 2**20),  # one byte an element, not two
    "layer_norm_statistics": (normalized, 2 * 1024 * (4 - 2)),
    "attention": (attended, None),
    "cublas_workspace": (multiplied, 8_519_680),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_without_a_rule(name):
    run, more = KEPT[name]
    held = []
    for without in ((), (name,)):
        gpu = VirtualGPU(CATALOG["T4"], without=without)
        with gpu:
            out = run(torch.empty(1024, 1024, dtype=HALF, requires_grad=True))
        held.append(gpu.memory_allocated())
        assert out.requires_grad
    assert held[0] != held[1]
    assert more is None or held[0] - held[1] == more


def peak(run, *shapes, dtype=HALF, card="T4", without=()):
    """The most bytes held beside the inputs in `run`, a second time."""
    gpu = VirtualGPU(CATALOG[card], without=without)
    with gpu:
        inputs = [torch.empty(shape, dtype=dtype, requires_grad=dtype.is_floating_point) for shape in shapes]
        run(*inputs)
        gpu.reset_peak_memory_stats()
        before = gpu.memory_allocated()
        run(*inputs)
    return gpu.max_memory_allocated() - before


@pytest.mark.parametrize("softmax", [torch.softmax, torch.log_softmax, F.softmax])
def test_softmax_of_fp16_in_fp32_makes_no_copy(softmax):
    def run(x):
        softmax(x.detach(), dim=-1, dtype=torch.float32)

    whole = 1024 * 1024 * 4
    assert peak(run, (1024, 1024)) == whole
    assert peak(run, (1024, 1024), without=["softmax_half"]) == 2 * whole
    assert peak(run, (1024, 1024), dtype=torch.bfloat16) == 2 * whole


@pytest.mark.parametrize("softmax", [torch.softmax, torch.log_softmax])
def test_softmax_of_a_slice_copies_it(softmax):
    """Its kernels want rows that lie densely: logits without each last token are copied, but not of one sequence."""

    def run(x):
        softmax(x.detach()[:, :-1], dim=-1)

    one = 511 * 1024 * 2
    assert peak(run, (4, 512, 1024)) == 2 * 4 * one
    assert peak(run, (4, 512, 1024), without=["softmax_dense"]) == 4 * one
    assert peak(run, (1, 512, 1024)) == one
    typed = lambda x: softmax(x.detach()[:, :-1], dim=-1, dtype=torch.float32)  # noqa: E731
    assert peak(typed, (4, 512, 1024)) == 3 * 4 * one  # the copy is in fp16


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_softmaxs_backward_makes_a_product(dtype, size):
    """A card's figure (Liger-Kernel, RTX 3090): six tensors of 2,048 numbers at the peak, one of them the product."""

    def run(x):
        y = torch.softmax(x, -1)
        y.backward(torch.ones_like(y))

    block = 2048 * size
    assert peak(run, (2048,), dtype=dtype) == 4 * block  # output, its gradient, the input's and the product
    assert peak(run, (2048,), dtype=dtype, without=["softmax_backward"]) == 3 * block
    log = lambda x: torch.log_softmax(x, -1).backward(torch.ones_like(x))  # noqa: E731
    assert peak(log, (2048,), dtype=dtype) == 3 * block


def test_a_sorts_second_arrays():
    """A card's figure (Liger-Kernel's sparsemax at 2,048 × 16,384): 5 more arrays of 4 bytes, and 512."""
    numel = 2048 * 16384
    h100 = (9, 0)
    assert sort_requests(2048, 16384, 4, h100) == ((8 * numel,), [(12 * numel + 255,)])
    assert sort_requests(2048, 4096, 4, h100) == ((8 * 4096,), [])  # in shared memory
    # what one H100 asked for
    assert sort_requests(8, 50_257, 4, h100) == ((3_216_448,) * 2, [(1_608_224, 4_910_591), (74_239,)])
    assert sort_requests(100, 5000, 2, h100) == ((4_000_000,) * 2, [(1_000_000, 5_095_935), (91_647,)])
    assert sort_requests(1, 1_000_000, 2, h100) == ((8_000_000,), [(10_187_007,)])
    assert sort_requests(4, 1_000_001, 4, h100) == ((8_000_008,), [(12_200_703,)] * 4)
    assert sort_requests(1, 5000, 8, h100) == ((40_000,), [(99_327,)])

    def run(x):
        torch.sort(x.detach(), descending=True)

    outputs = 256 * 8192 * (2 + 8)
    assert peak(run, (256, 8192)) == outputs + 256 * 8192 * (8 + 2 + 8) + 512
    assert peak(run, (256, 8192), without=["sort_temporaries"]) == outputs


def test_group_norms_sums():
    """A card's figure (Liger-Kernel, B200, 128 × 32 × 512 in groups of 4): 57,344 bytes in backward."""
    x = torch.empty(128, 32, 512, device="meta")
    weight = torch.empty(32, device="meta")
    forward = group_norm_forward((x, weight, weight, 128, 32, 512, 8))
    assert forward == (128 * 32 * 4,) * 2
    backward = group_norm_backward((x, x, None, None, weight, 128, 32, 512, 8, [True, True, True]))
    assert sum(backward) == 57_344
    assert group_norm_backward((x, x, None, None, weight, 128, 32, 1, 8, [True, True, True])) == (128 * 8 * 4,) * 2
    half = group_norm_forward((x.half(), weight.half(), None, 128, 32, 512, 8))
    assert half == (128 * 8 * 4,) * 2 + (128 * 32 * 4,) * 2

    def run(x):
        F.group_norm(x, 8).sum().backward()
        x.grad = None

    shape = (128, 32, 512)
    more = peak(run, shape, dtype=torch.float32) - peak(
        run, shape, dtype=torch.float32, without=["group_norm_temporaries"]
    )
    assert more == 2 * 128 * 32 * 4 + 2 * 128 * 8 * 4


@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_is_one_kernel(weighted, installed):
    """A card's figure (Liger-Kernel, H100, 4,096 × 1,024 in bf16): a row's number, no fp32 copies."""

    def run(x, weight):
        y = F.rms_norm(x, (1024,), weight if weighted else None)
        y.backward(torch.ones_like(y))
        x.grad = weight.grad = None

    shapes, block = ((4096, 1024), (1024,)), 4096 * 1024 * 2
    expected = 3 * block + 4096 * 4 + 2048 * weighted  # output, its gradient, the input's; a number a row
    assert peak(run, *shapes, dtype=torch.bfloat16, card="H100") == expected
    assert peak(run, *shapes, dtype=torch.bfloat16, card="H100", without=["fused_rms_norm"]) > 5 * block
    installed("2.8")
    assert "fused_rms_norm" not in names()


def test_rms_norm_of_another_type_than_its_weight_is_made_of_operations():
    """PyTorch warns: "Mismatch dtype between input and weight … Cannot dispatch to fused implementation"."""
    shapes, x = ((4096, 1024), (1024,)), 2 * 2**12 * 2**10

    def run(x, weight):
        F.rms_norm(x, (1024,), weight.float()).sum().backward()

    with_it, without = (
        peak(run, *shapes, dtype=torch.bfloat16, card="H100", without=one) for one in ((), ["fused_rms_norm"])
    )
    assert with_it == without > 5 * x


def test_an_operand_without_dense_rows_is_copied():
    def run(x):
        torch.bmm(x.detach(), x.detach()[:, :1, :1].expand(2, 512, 512))

    output = 2 * 512 * 512 * 2
    assert peak(run, (2, 512, 512)) == 2 * output
    assert peak(run, (2, 512, 512), without=["cublas_operands"]) == output


def test_experts_in_one_product_can_be_left_out():
    def run(gpu):
        with gpu:
            offsets = torch.empty(2, dtype=torch.int32)
            return torch._grouped_mm(torch.empty(64, 32), torch.empty(2, 32, 16), offs=offsets).shape

    assert run(VirtualGPU(CATALOG["H100"])) == (64, 16)
    with pytest.raises(RuntimeError, match="BF16"):  # PyTorch's own rule
        run(VirtualGPU(CATALOG["H100"], without=["grouped_mm"]))


def test_grouped_heads_are_not_copied(installed):
    """Since 2.14 the efficient kernel reads the few keys as they are: it saves them, and gives each its gradient."""
    installed("2.14")
    gpu = VirtualGPU(CATALOG["T4"])
    with gpu:
        q, k, v = (torch.empty(2, heads, 512, 64, dtype=HALF, requires_grad=True) for heads in (8, 2, 2))
        before = gpu.memory_allocated()
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        assert gpu.memory_allocated() - before == out.numel() * 2 + 2 * 8 * 512 * 4  # logsumexp
        out.sum().backward()
    assert (k.grad.shape, v.grad.shape, q.grad.shape) == (k.shape, v.shape, q.shape)


def test_a_workspace_that_is_not_kept(installed):
    installed("2.15")
    gpu = VirtualGPU(CATALOG["T4"])
    with gpu:
        x = torch.empty(64, 64)
        x @ x
    assert gpu.memory_allocated() == 64 * 64 * 4
    assert gpu.max_memory_allocated() == 2 * 64 * 64 * 4 + cublas_workspace_bytes((7, 5))


def held_at(op, *tensors, **given):
    """Bytes that stay of an operation on an H100 beside its output."""
    gpu = VirtualGPU(CATALOG["H100"], **given)
    with gpu:
        inputs = [torch.empty(shape, dtype=dtype) for shape, dtype in tensors]
        before = gpu.memory_allocated()
        out = op(*inputs)
        return gpu.memory_allocated() - before - out.numel() * out.element_size()


def test_a_product_of_vectors_takes_the_workspace_too():
    """A card's requests of a dot product in a new process: 4, 33554432."""
    assert held_at(torch.dot, *[((1000,), torch.float32)] * 2) == 33_554_432 + 512 - 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, HALF, torch.bfloat16])
def test_a_product_with_a_bias_has_a_workspace_of_its_own_up_to_2_11(installed, dtype):
    """A card's requests of a linear layer with a bias in a new process: the output, 33554432, 1048576."""
    linear = ((512, 1024), dtype), ((768, 1024), dtype), ((768,), dtype)
    cublas, lt = 33_554_432, 1_048_576
    for number, expected in (("2.11", cublas + lt), ("2.12", cublas)):
        installed(number)
        assert held_at(F.linear, *linear) == expected
        assert held_at(F.linear, *linear[:2]) == cublas
    installed("2.11")
    assert held_at(F.linear, *linear, without=["cublaslt_workspace"]) == cublas
    one_row = ((1, 1024), dtype), ((768, 1024), dtype), ((768,), dtype)
    assert held_at(F.linear, *one_row) == cublas
    added = ((512, 768), dtype), ((512, 1024), dtype), ((1024, 768), dtype)
    assert held_at(torch.addmm, *added) == cublas


def requests(run, *inputs, without=(), card="H100"):
    """Bytes that a run asks for on the card, in blocks, releases negative, in their order."""
    gpu = VirtualGPU(CATALOG[card], without=without)
    with gpu:
        given = [torch.empty(shape, dtype=dtype, requires_grad=dtype.is_floating_point) for shape, dtype in inputs]
        kept, run = run(*given)
        gpu.meter.recorder = made = Requests(gpu)
        kept = kept, run()
        gpu.meter.recorder = None
    return [size if action == "alloc" else -size for action, size in made.made]


def blocks(*sizes):
    return [-round_size(-size) if size < 0 else round_size(size) for size in sizes]


CUMSUMS = [  # a card's requests
    ((8, 32768), torch.bool, None, (2097152, 2097152, -2097152)),
    ((3, 5, 7), torch.int32, None, (840, 840, -840)),
    ((8, 32768), torch.int64, None, (2097152,)),
    ((1000,), torch.bool, None, (8000, 8000, 1279, -1279, -8000)),
    ((100003,), torch.int64, None, (800024, 2815, -2815)),
    ((16777219,), torch.int64, None, (134217752, 300799, -300799)),
    ((1048576,), torch.float32, None, (4194304, 5375, -5375)),
    ((1, 50257), torch.float32, None, (201028, 1023, -1023)),
    ((3, 5, 7), HALF, torch.float32, (420, 420, -420)),
]


@pytest.mark.parametrize(("shape", "dtype", "result", "card"), CUMSUMS)
def test_what_is_summed_up_is_cast_first_and_a_single_row_takes_storage(shape, dtype, result, card):
    def ready(x):
        return x, lambda: x.detach().cumsum(-1, dtype=result)

    assert requests(ready, (shape, dtype)) == blocks(*card)
    assert requests(ready, (shape, dtype), without=["scan_temporaries"]) == blocks(card[0])


def test_a_sum_over_rows_in_another_order_is_shared_as_well():
    """A card's requests for the gradient of a norm's weight over 16 heads of 4 × 256 tokens: 16777216."""

    def ready(x):
        return x, lambda: x.detach().transpose(1, 2).sum([0, 1, 2])

    card = blocks(512, 16777216, 4, -4, -16777216)
    assert requests(ready, ((4, 16, 256, 128), torch.float32)) == card
    narrow = requests(ready, ((4, 16, 256, 128), torch.float32), without=["reduction_buffers"])
    assert narrow == blocks(512)


EMBEDDINGS = [  # a card's requests of a backward: indices, rows, width, type
    ((3072,), 50257, 768, HALF, (77194752,)),
    (
        (8, 512), 50257, 768, torch.float32,
        (32768, 32768, 32768, 83455, -83455, -32768, 154389504, 32768, 8, 32768, 1279, -1279, -32768, 32768, 32768,
         1279, -1279, 8, 36040, 13839360, -13839360, -36040, -8, -32768, -32768, -8, -32768, -32768, -32768),
    ),
    (
        (1, 100001), 50257, 768, torch.bfloat16,
        (800008, 800008, 800008, 1639935, -1639935, -800008, 77194752, 800008, 8, 800008, 1535, -1535, -800008, 402056,
         402056, 2047, -2047, 8, 482056, 185109504, -185109504, -482056, -8, -402056, -402056, -8, -800008, -800008,
         -800008),
    ),
    (
        (8, 1024), 1000, 33, HALF,
        (65536, 65536, 65536, 150015, -150015, -65536, 66000, 65536, 8, 65536, 1279, -1279, -65536, 8000, 8000, 1279,
         -1279, 8, 14552, 240108, -240108, -14552, -8, -8000, -8000, -8, -65536, -65536, -65536),
    ),
    (
        (8, 1024), 7, 64, torch.float32,
        (65536, 65536, 65536, 150015, -150015, -65536, 1792, 65536, 8, 65536, 1279, -1279, -65536, 56, 56, 1279, -1279,
         8, 6608, 6608, -6608, -6608, -8, -56, -56, -8, -65536, -65536, -65536),
    ),
    (
        (8, 1024), 2, 768, HALF,
        (65536, 65536, 65536, 150015, -150015, -65536, 3072, 65536, 8, 65536, 1279, -1279, -65536, 16, 16, 1279, -1279,
         8, 6568, 6568, 6144, -6144, -6568, -6568, -8, -16, -16, -8, -65536, -65536, -65536),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("ids", "rows", "width", "dtype", "card"), EMBEDDINGS)
def test_an_embeddings_backward_request_by_request(ids, rows, width, dtype, card, installed):
    def ready(weight, indices):
        out = F.embedding(indices, weight)
        grad = torch.empty_like(out)
        return (out, grad), lambda: torch.autograd.grad(out, weight, grad)

    assert requests(ready, ((rows, width), dtype), (ids, torch.int64)) == blocks(*card)
    installed("2.10")  # without sums in the gradient
    before = requests(ready, ((rows, width), dtype), (ids, torch.int64))
    assert (before != blocks(*card)) == (rows < 10)
    assert requests(ready, ((rows, width), dtype), (ids, torch.int64), without=["embedding_backward"]) == blocks(
        rows * width * dtype.itemsize
    )


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm"])
def test_a_product_into_an_output_that_is_given(name):
    gpu, batch = VirtualGPU(CATALOG["T4"]), (3,) if "bmm" in name else ()
    with gpu:
        a, b, total = (torch.empty(*batch, *shape) for shape in ((128, 256), (256, 512), (128, 512)))
        before = gpu.memory_allocated()
        product = functools.partial(getattr(torch, name), *([total] if "add" in name else []), out=total)
        assert product(a, b) is total
        assert gpu.memory_allocated() - before == cublas_workspace_bytes((7, 5))  # what is given is all that there is
        product(torch.empty(*batch, 1, 1).expand(*batch, 128, 256), b)
    assert gpu.max_memory_allocated() == gpu.memory_allocated() + a.numel() * 4 + 512  # a copy of rows that are one


@pytest.mark.skipif(overload("addmm.dtype") is None, reason="PyTorch has it from 2.8 on")
@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm"])
def test_a_product_with_a_type_of_its_output(name):
    gpu, batch = VirtualGPU(CATALOG["T4"]), (3,) if "bmm" in name else ()
    with gpu:
        a, b = torch.empty(*batch, 128, 256, dtype=HALF), torch.empty(*batch, 256, 512, dtype=HALF)
        total = torch.empty(*batch, 128, 512)
        before = gpu.memory_allocated()
        product = functools.partial(getattr(torch, name), *([total] if "add" in name else []), out_dtype=torch.float32)
        assert product(a, b, out=total) is total
        assert gpu.memory_allocated() - before == cublas_workspace_bytes((7, 5))
        made = product(a, b)
        assert (made.shape, made.dtype) == (total.shape, torch.float32)
        assert gpu.memory_allocated() - before == cublas_workspace_bytes((7, 5)) + 4 * total.numel()
        with pytest.raises(RuntimeError, match="dtype"):  # as on a card
            getattr(torch, name)(*([total] if "add" in name else []), a, b, out_dtype=torch.bfloat16)


# -- temporaries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "inputs", "fastest", "expected"),
    [
        (1024, 2048, False, (16_777_216, 32)),  # a card's trace: the gradient of a norm's weight, 4 × 512 tokens
        (1, 524_288, True, (256, 4)),  # a card's trace: the sum of 2 MiB
        (1024, 512, False, (0, 0)),  # a card's trace: the same at 4 × 128 tokens
        (2048, 1024, True, (0, 0)),
        (1, 2048, True, (0, 0)),
    ],
)
def test_buffers_of_a_sum(outputs, inputs, fastest, expected):
    found = reduction_buffers(outputs, inputs, fastest=fastest, vectors=4 if outputs != 2048 else 1, resident=A100)
    assert found == expected


H100 = {"card": "H100", "dtype": torch.float32}


@pytest.mark.parametrize(
    ("run", "more"),
    [  # of 4096 × 4096 in fp32: what one H100 held beside the output
        (lambda x: x.sum(0), 134_217_728 + 512),
        (lambda x: x.amax(0), 134_217_728 + 512),
        (lambda x: x.any(0), 134_217_728 + 512),
        (lambda x: x.std(0), 536_870_912 + 512),
        (lambda x: x.argmax(0), 536_870_912 + 512),
        (lambda x: x.max(0), 536_870_912 + 512),
        (lambda x: x.std(), 8_704 + 512),
        (lambda x: x.count_nonzero(), 16_777_216 + 134_217_728 + 4_608 + 512),
        (lambda x: x.logsumexp(0), 16_384 + 67_108_864 + 134_217_728 + 512),
    ],
)
def test_buffers_of_reductions(run, more):
    """The accumulators are numbers, or a number and its index, or what Welford's method needs."""
    outputs = []

    def without_grad(x):
        out = run(x.detach())
        outputs[:] = [sum(round_size(t.nbytes) for t in (out if isinstance(out, tuple) else (out,)))]

    assert peak(without_grad, (4096, 4096), **H100) - outputs[0] == more


def test_flags_are_cast_to_be_counted():
    """sum (1000,) torch.bool of one H100: int64 numbers beside the result."""
    assert peak(lambda x: x.sum(), (1000,), dtype=torch.bool, card="H100") == 512 + round_size(8 * 1000)
    assert peak(lambda x: x.sum(), (1000,), dtype=torch.int64, card="H100") == 512


def test_a_sum_over_a_dimension_before_one_of_a_single_element():
    assert peak(lambda x: x.sum(0), (50_257, 1), card="H100") > 0  # as a dense sum; once a division by zero


def test_a_loss_of_every_element_is_reduced():
    """mse_loss mean fp32 of one H100 at 512 × 1024: what is reduced, and an output that stays as large."""
    nbytes = 512 * 1024 * 4
    gpu = VirtualGPU(CATALOG["H100"])
    with gpu:
        x, y = torch.empty(512, 1024), torch.empty(512, 1024)
        before = gpu.memory_allocated()
        out = F.mse_loss(x, y)
        assert out.shape == () and gpu.memory_allocated() - before == nbytes
        assert gpu.max_memory_allocated() - before == 2 * nbytes + 1024
        del out
        huber = F.huber_loss(x, y)
        assert gpu.memory_allocated() - before == 512 and huber.shape == ()
        signs = torch.nn.functional.logsigmoid(x)
        assert gpu.memory_allocated() - before == 512 + signs.nbytes  # a CPU keeps a second one


def test_clipping_takes_a_number_for_each_chunk():
    """clip_grad_norm_ of one H100: 640 bytes for ten tensors, the largest of 16 chunks."""
    assert norm_partials([2048 * 512, *[7] * 9], 4) == 640
    assert norm_partials([512] * 100, 2) == 400

    def run(x):
        torch._foreach_norm([x.detach(), x.detach()[:3]])

    assert peak(run, (2**22,)) == 1024 + 512 == peak(run, (2**22,), without=["foreach_norm"]) + 512


def test_one_hot_scatters():
    """No comparison with every class, as for the compiler: what one H100 asked for is the output alone."""

    def run(x):
        F.one_hot(x, 50)

    assert peak(run, (5000,), dtype=torch.int64) == round_size(5000 * 50 * 8)
    assert peak(run, (5000,), dtype=torch.int64, without=["one_hot"]) > 5000 * 50 * 9


def test_expanded_indices_are_copied():
    """find_packed_sequence_indices of transformers at 4 × 128, and the token types of its BERT, on one H100."""

    def picked(x):
        x.detach().view(4, 128)[torch.arange(4)[:, None], torch.arange(128)[None]]

    def looked_up(x):
        F.embedding(torch.zeros(1, 128, dtype=torch.int64).expand(4, 128), x.detach().view(256, 2))

    indices = 512 + 1024  # of picked
    assert peak(picked, (512,)) == indices + 2 * 4096 + 1024
    assert peak(picked, (512,), without=["index_temporaries"]) == indices + 1024
    assert peak(looked_up, (512,)) == 1024 + 4096 + 4 * 128 * 2 * 2
    assert peak(looked_up, (512,), without=["index_temporaries"]) == 1024 + 4 * 128 * 2 * 2


def test_only_as_many_bits_are_sorted_as_places_have():
    """index 50257×768 4096, index 50×0 4000 and column 50257×768 4096 of one H100."""
    found = [sort_pairs_bytes(*given, bits=bits) for given, bits in (((4096, (9, 0)), 16), ((4000, (9, 0)), 6))]
    assert found == [71_167, 3_583]
    assert sort_pairs_bytes(4096, (9, 0), bits=26) == 75_263


def test_a_smaller_card_makes_fewer_blocks():
    small = reduction_buffers(4096, 8192, fastest=False, vectors=4, resident=40 * 1024)
    assert 0 < small[0] < reduction_buffers(4096, 8192, fastest=False, vectors=4, resident=A100)[0]


def test_temporaries_by_their_sources():
    q, k = torch.empty(2, 8, 500, 40, dtype=HALF, device="meta"), torch.empty(2, 2, 500, 40, dtype=HALF, device="meta")
    expanded = 2 * 500 * 8 * 40 * 2
    assert flash_backward(q, k) == (2 * 8 * 512 * 4, 2 * 512 * 8 * 64 * 4, expanded, expanded)
    assert flash_backward(q, q)[2:] == (0, 0)
    assert cudnn_backward(q, k, k) == 2 * 8 * 500 * 4 * (1 + 40) + 2 * expanded + 256
    assert most_parts(4096, 50_257) == 4505  # a card's trace
    assert most_parts(4096, 96) == 409 + 96


@pytest.mark.parametrize(
    ("dtype", "dim", "capability", "nbytes"),
    [  # the last of each: the workspace that one H100 asked for, at batch 2, 8 heads, 512 rows
        (torch.bfloat16, 64, (9, 0), 2_099_200),
        (torch.bfloat16, 80, (9, 0), 4_195_328),
        (torch.bfloat16, 192, (9, 0), 23_071_744),
        (torch.bfloat16, 256, (9, 0), 25_169_920),
        (torch.float32, 36, (9, 0), 2_099_200),
        (torch.float32, 128, (9, 0), 4_196_352),
        (torch.float32, 192, (9, 0), 6_294_528),
        (torch.bfloat16, 64, (8, 9), 2_099_200),  # by the source alone from here on
        (torch.bfloat16, 128, (8, 9), 2 * 8 * (2 * 8 * 64 * 128 + 8 * 2 * (4 + 64 * 64)) * 4),
        (HALF, 64, (7, 5), 2_099_200),
    ],
)
def test_workspaces_of_the_efficient_backward(dtype, dim, capability, nbytes):
    q = torch.empty(2, 8, 512, dim, dtype=dtype, device="meta")
    assert efficient_workspace(q, q, q, capability) == nbytes


def test_more_heads_than_200_are_not_split():
    q = torch.empty(32, 8, 128, 192, dtype=HALF, device="meta")
    assert efficient_workspace(q, q, q, (9, 0)) == 256 * (2 * 64 * 256 + 3 * (4 + 128 * 64)) * 4


def test_attentions_sums_in_forward():
    """What one H100 with 132 multiprocessors asked for, forced to flash or efficient."""
    q, wide = (torch.empty(2, 8, 512, dim, dtype=torch.bfloat16, device="meta") for dim in (64, 192))
    assert flash_forward(q, q, 0.0, 132) == (65_536, 4_194_304)
    assert flash_forward(q, q, 0.1, 132) == ()
    more = q.expand(4, 2, 8, 512, 64).flatten(0, 1)
    assert flash_forward(more, more, 0.0, 132) == ()
    assert efficient_forward(wide, wide) == 6_291_456
    assert efficient_forward(q, q) == efficient_forward(wide.float(), wide.float()) == 0


@pytest.mark.parametrize(("card", "dtype"), [("T4", HALF), ("A100-40GB", torch.bfloat16)])
def test_attentions_temporaries_count_at_the_peak(card, dtype):
    def run(q):
        F.scaled_dot_product_attention(q, q, q).sum().backward()
        q.grad = None

    shape = (2, 8, 2048, 64)
    more = peak(run, shape, card=card, dtype=dtype) - peak(
        run, shape, card=card, dtype=dtype, without=["attention_temporaries"]
    )
    q = torch.empty(shape, dtype=dtype, device="meta")
    if card == "T4":  # the gradient of a sum, one element expanded, is copied; the random state is on the CPU
        assert more == q.numel() * 2 + 2 * 8 * 2048 * 4 + efficient_workspace(q, q, q, (7, 5)) - 2 * 512
    else:  # copies of the output and its gradient: these heads are not a projection's
        assert more == sum(flash_backward(q, q)) + 2 * q.numel() * 2


# -- nothing stays behind ---------------------------------------------------------------------------------------------


def state():
    keys = ("AutocastCPU", "AutogradCPU")
    kernels = [sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in keys]
    return kernels, {name: getattr(F, name) for name in dir(F)}, dict(vars(torch.Tensor))


def test_leaving_leaves_pytorch_as_it_was():
    before, (one, two) = state(), (VirtualGPU(CATALOG["T4"]), VirtualGPU(CATALOG["H100"]))
    with pytest.raises(ZeroDivisionError), one, two, one:
        raise ZeroDivisionError
    one.rules.__enter__()
    two.rules.__enter__()  # contexts that overlap
    one.rules.__exit__()
    two.rules.__exit__()
    assert state() == before


def test_entering_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with VirtualGPU(CATALOG["T4"]):
            pass


def test_real_tensors_keep_their_values_inside():
    gpu = VirtualGPU(CATALOG["T4"])
    real = torch.tensor([0.0, 3.0])
    with gpu.rules:
        assert not real[0].item() and F.dropout(real, 0.0)[1].item() == 3
        assert torch.equal(real.half().softmax(0, dtype=torch.float32), torch.softmax(real.half().float(), 0))
