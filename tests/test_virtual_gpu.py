"""The meter of the virtual GPU: one storage, one count; capacity, exceptions, workspaces, and CUDA's kernels."""

import dataclasses
import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from versions import keeps_workspaces

from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.counting.meter import AllocationMeter
from virtual_gpu.counting.mode import on_virtual_gpu
from virtual_gpu.rules.cublas import cublas_workspace_bytes
from virtual_gpu.trace.timeline import CATEGORIES

KIB, MIB = 2**10, 2**20
WORKSPACE = 8_519_680  # ":4096:2:16:8", 8.125 MiB


def rounded(nbytes):
    return (nbytes + 511) // 512 * 512


def gpu_of(capacity_bytes):
    """A T4 with another capacity."""
    return VirtualGPU(dataclasses.replace(CATALOG["T4"], memory_bytes=capacity_bytes, usable_bytes=None))


@pytest.fixture
def gpu():
    return VirtualGPU(CATALOG["T4"])


def used(gpu):
    gc.collect()
    gpu.empty_cache()
    return gpu.memory_allocated()


# -- the meter --------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.integers(1, 6).map(lambda segments: segments * 20 * MIB),
    st.lists(st.tuples(st.booleans(), st.integers(0, 30 * MIB), st.sampled_from(CATEGORIES)), max_size=80),
)
def test_meter_against_a_recount(capacity, trace):
    meter = AllocationMeter(capacity)
    living, peak = {}, 0
    for is_release, number, category in trace:
        if is_release and living:
            block = sorted(living)[number % len(living)]
            del living[block]
            meter.free(block)
        elif not is_release:
            try:
                block = meter.allocate(number, category)
            except MemoryError:  # where it is raised, the allocator's own tests say; here it changes nothing
                block = None
            if block is not None:
                assert block not in living
                held = next((p.size for s in meter.allocator.segments() for p in s.pieces if p.name == block), 0)
                assert 0 <= held - rounded(number) <= MIB
                living[block] = (rounded(number), held, category)
        peak = max(peak, sum(held for _, held, _ in living.values()))
        assert meter.live_bytes == sum(held for _, held, _ in living.values())
        assert meter.allocator.allocated_bytes <= meter.allocator.reserved_bytes <= capacity
        assert meter.peak_bytes == peak
        assert meter.live_blocks() == living
    assert sum(meter.live_by_category().values()) == meter.live_bytes


def test_a_meter_without_a_limit():
    meter = AllocationMeter()
    meter.allocate(10**15, "parameters")
    assert meter.live_by_category()["parameters"] == meter.live_bytes == meter.allocator.allocated_bytes
    assert 0 <= meter.live_bytes - rounded(10**15) <= MIB


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["new", "view", "alias", "in place", "copy", "drop"]), st.integers(0, 5000)),
        max_size=30,
    )
)
def test_tensors_against_a_recount(trace):
    """Live bytes are those of the distinct storages that are still held, whatever aliases there are."""
    gpu = VirtualGPU(CATALOG["T4"])
    tensors = []
    for action, number in trace:
        tensor = tensors[number % len(tensors)] if tensors else None
        if action == "new":
            with gpu:
                tensors.append(torch.empty(number, dtype=torch.uint8))
        elif tensor is None:
            continue
        elif action == "drop":
            del tensors[number % len(tensors)]
        else:
            make = {
                "view": lambda t: t[: len(t) // 2],
                "alias": torch.detach,
                "in place": lambda t: t.add_(1),
                "copy": torch.clone,
            }
            tensors.append(make[action](tensor))
        del tensor
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        assert gpu.memory_allocated() == sum(map(rounded, storages.values()))
    tensors.clear()
    assert gpu.memory_allocated() == 0


# -- one storage, one count -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "more"),
    [
        (lambda t: t.view(10, 100), 0),
        (lambda t: t.chunk(4), 0),
        (lambda t: t.unbind(), 0),
        (lambda t: t.expand(3, 1000), 0),
        (lambda t: t.detach(), 0),
        (lambda t: t.data, 0),
        (lambda t: t.contiguous(), 0),
        (lambda t: t.to(torch.float32), 0),
        (lambda t: nn.Parameter(t), 0),
        (lambda t: t.mul_(2), 0),
        (lambda t: t.copy_(torch.ones(1000)), 0),
        (lambda t: torch.add(t, t, out=t), 0),
        (lambda t: t.new_empty(0), 0),
        (lambda t: t.clone(), 4096),
        (lambda t: t + 1, 4096),
        (lambda t: t.half(), 2048),
        (lambda t: t.sum(), 512),
        (lambda t: t.view(10, 100).T.contiguous(), 4096),
        (lambda t: torch.stack([t, t]), 8192),
        (lambda t: t.max(dim=0), 1024),  # a value and an index
        (lambda t: torch.add(t, t, out=t.new_empty(0)), 4096),
    ],
)
def test_what_an_operation_allocates(gpu, operation, more):
    tensor = gpu.place(torch.ones(1000))
    assert gpu.memory_allocated() == 4096
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `out=` of size 0
        result = operation(tensor)
    assert gpu.memory_allocated() == 4096 + more
    del result
    assert gpu.memory_allocated() == 4096


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.native_layer_norm(x, (61,), None, None, 1e-5),
        lambda x: torch.native_dropout(x, 0.1, True),
        lambda x: F.mse_loss(x, x, reduction="none"),
    ],
    ids=["layer norm", "dropout", "loss"],
)
def test_only_results_count(gpu, operation):
    """PyTorch finds a result by smaller operations, the first time that it meets the shape; a GPU runs one kernel."""
    x = gpu.place(torch.ones(7, 61))
    for _ in range(2):
        results = operation(x)
        assert gpu.max_memory_allocated() == gpu.memory_allocated() > 2048
        del results


def test_a_view_keeps_the_whole_storage(gpu):
    tensor = gpu.place(torch.ones(1000))
    part = tensor[:1]
    del tensor
    assert gpu.memory_allocated() == 4096
    assert gpu.owns(part)


def test_tied_weights_stay_tied(gpu):
    model = nn.Sequential(nn.Embedding(16, 64), nn.Linear(64, 16, bias=False))
    model[1].weight = model[0].weight
    gpu.place(model)
    assert model[1].weight is model[0].weight
    assert gpu.memory_allocated() == 16 * 64 * 4
    assert len(list(model.parameters())) == 1
    before = model[0].weight
    assert gpu.place(model)[0].weight is before  # a second time changes nothing
    assert gpu.memory_allocated() == 16 * 64 * 4


def test_placing_keeps_what_a_parameter_is(gpu):
    model = nn.BatchNorm1d(4, dtype=torch.float16)
    model.bias.requires_grad_(False)
    gpu.place(model)
    assert isinstance(model.weight, nn.Parameter) and model.weight.requires_grad
    assert isinstance(model.bias, nn.Parameter) and not model.bias.requires_grad
    assert model.weight.dtype == torch.float16
    assert gpu.meter.live_by_category() == dict.fromkeys(CATEGORIES, 0) | {"parameters": 1024, "other": 3 * 512}


def test_placing_a_batch(gpu):
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.int64), "note": "text"}
    placed = gpu.place(batch)
    assert gpu.owns(placed["input_ids"]) and on_virtual_gpu(placed["input_ids"])
    assert placed["note"] == "text"
    assert not gpu.owns(batch["input_ids"]) and not on_virtual_gpu(batch["input_ids"])
    assert gpu.place(placed)["input_ids"] is placed["input_ids"]
    assert gpu.meter.live_by_category()["other"] == gpu.memory_allocated() == 512


def test_peak_and_reset(gpu):
    a = gpu.place(torch.ones(1000))
    b = a + 1
    del b
    assert (gpu.memory_allocated(), gpu.max_memory_allocated()) == (4096, 8192)
    gpu.reset_peak_memory_stats()
    gpu.empty_cache()
    assert gpu.max_memory_allocated() == 4096


# -- capacity and exceptions ------------------------------------------------------------------------------------------


WEIGHT, ROWS = 16 * MIB, 2 * 4096  # bytes of a layer's weight, and of a batch of two


class Scale(nn.Module):
    """Element-wise, so that no cuBLAS workspace blurs the numbers. It keeps the mean of its weight and its output."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4096, 1024))

    def forward(self, x):
        return (x * self.weight.mean(0)).tanh()


def four_layers(gpu):
    return gpu.place(nn.Sequential(*[Scale() for _ in range(4)]))


def train_step(model, optimizer):
    model(model[0].weight.new_ones(2, 1024)).sum().backward()
    optimizer.step()


def test_what_is_reserved_is_enough_and_less_than_the_tensors_is_not():
    """Less than what a step needs runs out somewhere in it, and leaves nothing behind."""
    free = VirtualGPU(CATALOG["T4"], limited=False)
    model = four_layers(free)
    train_step(model, torch.optim.AdamW(model.parameters(), foreach=True))
    needed, reserved = free.max_memory_allocated(), free.max_memory_reserved()
    died_with = set()
    for capacity in (reserved, needed - 512, *range(4 * WEIGHT + 2 * MIB, 8 * WEIGHT, 8 * MIB)):
        gpu = gpu_of(capacity)
        model = four_layers(gpu)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        if capacity == reserved:
            train_step(model, optimizer)
        else:
            with pytest.raises(torch.OutOfMemoryError):
                train_step(model, optimizer)
        assert gpu.max_memory_allocated() <= gpu.max_memory_reserved() <= capacity
        died_with.add(sum(p.grad is not None for p in model.parameters()))
        optimizer.state.clear()
        optimizer.zero_grad()
        assert used(gpu) == gpu.memory_reserved() == 4 * WEIGHT
    assert died_with >= {0, 2, 4}  # gradients: in forward, in the middle of backward, in the step


def test_reserved_memory_stays_until_it_is_given_back(gpu):
    a = gpu.place(torch.ones(3 * MIB))  # 12 MiB: a segment of its own
    b = gpu.place(torch.ones(1000))  # the small pool's first segment
    assert gpu.memory_allocated() == 12 * MIB + 4096
    assert gpu.memory_reserved() == gpu.max_memory_reserved() == 14 * MIB
    del a
    assert (gpu.memory_allocated(), gpu.memory_reserved()) == (4096, 14 * MIB)
    gpu.empty_cache()
    assert (gpu.memory_reserved(), gpu.max_memory_reserved()) == (2 * MIB, 14 * MIB)
    gpu.reset_peak_memory_stats()
    assert gpu.max_memory_reserved() == 2 * MIB
    assert b.numel() == 1000


def test_out_of_memory_says_what_cuda_says():
    gpu = gpu_of(30 * MIB)
    with gpu, pytest.raises(torch.OutOfMemoryError) as caught:
        kept = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in (12 * MIB, MIB, 20 * MIB)]
    assert str(caught.value).startswith(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 (T4, virtual) has a total capacity of 30.00 MiB of "
        "which 16.00 MiB is free. Including non-PyTorch memory, this process has 14.00 MiB memory in use. Of the "
        "allocated memory 13.00 MiB is allocated by PyTorch, and 1024.00 KiB is reserved by PyTorch but unallocated. "
        "If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
    )
    assert caught.value.__context__ is None
    del caught
    assert used(gpu) == gpu.memory_reserved() == 0
    with pytest.raises(NameError):
        print(kept)


def test_expandable_segments_find_room_where_fixed_ones_do_not():
    def fill(gpu):
        with gpu:
            kept = [torch.empty(30 * MIB, dtype=torch.uint8) for _ in range(4)]
            del kept[1::2]  # two holes of 30 MiB
            kept.append(torch.empty(45 * MIB, dtype=torch.uint8))
        return gpu.memory_reserved()

    spec = gpu_of(140 * MIB).spec
    assert fill(VirtualGPU(spec)) == 60 * MIB + 46 * MIB  # both holes went back to the driver first
    # The pages of a hole serve elsewhere in the address space.
    assert fill(VirtualGPU(spec, expandable_segments=True)) <= 140 * MIB


def test_a_hundred_times_out_of_memory():
    gpu = gpu_of(8 * MIB)
    for _ in range(100):
        try:
            with gpu:
                [torch.empty(2**18) for _ in range(10)]
        except torch.OutOfMemoryError:
            continue
        raise AssertionError("it fitted")
    assert used(gpu) == gpu.memory_reserved() == 0
    assert not gpu.mode.storages
    with gpu:
        assert torch.empty(2**18).numel()  # and it works as before


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_any_exception_leaves_the_model_alone(gpu, where):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if where == "forward":
                raise ZeroDivisionError
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError

    model = four_layers(gpu)
    weights = gpu.memory_allocated()
    functions = dict(vars(F))
    with pytest.raises(ZeroDivisionError), gpu:
        Fails.apply(model(model[0].weight.new_ones(2, 1024))).sum().backward()
    assert {name: getattr(F, name) for name in functions} == functions
    assert type(torch.ones(1)) is torch.Tensor
    model.zero_grad()
    assert used(gpu) == weights


# -- several GPUs -----------------------------------------------------------------------------------------------------


def test_several_gpus_at_once():
    first, second = VirtualGPU(CATALOG["T4"]), VirtualGPU(CATALOG["H100"])
    a, b = first.place(torch.ones(1000)), second.place(torch.ones(2000))
    c, d = a + 1, b + 1
    assert first.owns(c) and second.owns(d) and not first.owns(d)
    assert (first.memory_allocated(), second.memory_allocated()) == (8192, 2 * 8192)
    with first:
        with second:
            e = torch.ones(1)
        f = torch.ones(1)
    assert second.owns(e) and first.owns(f)
    assert type(torch.ones(1)) is torch.Tensor
    del a, c, f
    assert (first.memory_allocated(), second.memory_allocated()) == (0, 2 * 8192 + 512)


def test_from_one_gpu_to_the_next():
    first, second = VirtualGPU(CATALOG["T4"]), VirtualGPU(CATALOG["A100-40GB"])
    model = four_layers(first)
    assert first.memory_allocated() == 4 * WEIGHT
    second.place(model)
    assert (first.memory_allocated(), second.memory_allocated()) == (0, 4 * WEIGHT)


def test_the_same_gpu_entered_twice(gpu):
    with gpu, gpu:
        tensor = torch.ones(1)
    assert gpu.owns(tensor)
    assert type(torch.ones(1)) is torch.Tensor


# -- cuBLAS workspaces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "nbytes"),
    [((7, 5), WORKSPACE), ((8, 0), WORKSPACE), ((8, 9), WORKSPACE), ((9, 0), 32 * 2**20), ((12, 0), WORKSPACE)],
)
def test_the_workspace_of_a_handle(capability, nbytes):
    assert cublas_workspace_bytes(capability) == nbytes


@keeps_workspaces
@pytest.mark.parametrize(("name", "workspace"), [("T4", WORKSPACE), ("H100", 32 * 2**20)])
def test_one_workspace_for_forward_and_one_for_backward(name, workspace):
    gpu = VirtualGPU(CATALOG[name])
    layer = gpu.place(nn.Linear(64, 64, bias=False))  # with one PyTorch 2.9 to 2.11 has cuBLASLt's too
    weights = gpu.memory_allocated()
    x = layer.weight.new_ones(8, 64)
    layer(x)
    assert gpu.memory_allocated() == weights + workspace + 2048
    for _ in range(2):
        layer(x).sum().backward()
    layer.zero_grad()
    del x
    assert used(gpu) == weights + 2 * workspace
    assert gpu.meter.live_by_category()["other"] == 2 * workspace
    gpu.release_workspaces()
    assert gpu.memory_allocated() == weights
    layer(layer.weight.new_ones(8, 64))
    assert used(gpu) == weights + workspace  # and a new one for whoever multiplies next


def test_no_workspace_without_a_product(gpu):
    four_layers(gpu)(gpu.place(torch.ones(2, 1024)))
    assert used(gpu) == 0


def test_a_workspace_that_does_not_fit():
    gpu = gpu_of(WORKSPACE)
    a = gpu.place(torch.ones(8, 8))
    with pytest.raises(torch.OutOfMemoryError, match=r"8\.12 MiB"):
        a @ a
    assert used(gpu) == 512


# -- recording --------------------------------------------------------------------------------------------------------


def test_what_a_byte_is_for(gpu):
    model = four_layers(gpu)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = gpu.place(torch.ones(2, 1024))
    with gpu.record(model, optimizer) as record:
        with record.phase("forward"):
            loss = model(x).sum()
        with record.phase("backward"):
            loss.backward()
        with record.phase("step"):
            optimizer.step()
    forward, backward, step = (record.timeline().at_end(i) for i in range(3))
    assert [phase.name for phase in record.timeline().phases] == ["forward", "backward", "step"]
    assert forward["parameters"] == backward["gradients"] == step["gradients"] == 4 * WEIGHT
    assert forward["gradients"] == backward["optimizer"] == 0
    assert forward["activations"] == 3 * 4096 + 4 * ROWS + 512  # means (the first needs none), outputs, the loss
    assert backward["activations"] == 512
    assert step["optimizer"] == 2 * 4 * WEIGHT  # momentum and variance; AdamW's step counters are on the CPU
    assert forward["other"] == ROWS
    assert gpu.meter.recorder is None
    assert sum(step.values()) == gpu.memory_allocated()


def test_what_was_half_done_is_labelled_too():
    gpu = gpu_of(7 * WEIGHT)
    model = four_layers(gpu)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(torch.OutOfMemoryError), gpu.record(model, optimizer) as record, record.phase("backward"):
        model(model[0].weight.new_ones(2, 1024)).sum().backward()
    timeline = record.timeline()
    assert timeline.at_end(0)["gradients"] in (WEIGHT, 2 * WEIGHT)
    assert timeline.peak_bytes == gpu.max_memory_allocated()
    assert gpu.meter.recorder is None and not gpu.in_step


# -- CUDA's kernels ---------------------------------------------------------------------------------------------------

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(("name", "dtype"), [("T4", HALF), ("T4", BF16), ("A100-40GB", BF16), ("H100", FP32)])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_attention_keeps_its_shape_and_dtype(name, dtype, mask):
    gpu = VirtualGPU(CATALOG[name])
    with gpu:
        query = torch.empty(2, 4, 8, 64, dtype=dtype, requires_grad=True)
        key = torch.empty(2, 2, 8, 64, dtype=dtype)
        masks = {"bool": torch.ones(1, 1, 8, 8, dtype=torch.bool), "float": torch.zeros(1, 1, 8, 8, dtype=dtype)}
        out = F.scaled_dot_product_attention(query, key, key, attn_mask=masks.get(mask), enable_gqa=True)
        out.sum().backward()
    assert (out.shape, out.dtype) == (query.shape, dtype)
    assert query.grad.shape == query.shape


def test_only_the_math_kernel_keeps_the_square(gpu):
    """Memory-efficient attention, which a T4 has, saves no length × length matrix; math does."""

    def saved(dtype):
        with gpu:
            query = torch.empty(1, 1, 512, 64, dtype=dtype, requires_grad=True)
            before = gpu.memory_allocated()
            out = F.scaled_dot_product_attention(query, query, query)
            return gpu.memory_allocated() - before - rounded(out.numel() * 2)

    square = 512 * 512 * 2
    assert saved(HALF) < square <= saved(BF16)


def test_a_checkpoint_holds_its_input_only(gpu):
    model = four_layers(gpu)
    x = gpu.place(torch.ones(2, 1024))
    before = gpu.memory_allocated()
    plain = model(x)
    without = gpu.memory_allocated() - before
    del plain
    out = checkpoint(model, x, use_reentrant=False)
    assert gpu.memory_allocated() - before == ROWS < without
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_value_cannot_be_read(gpu):
    with pytest.raises(Exception, match="_local_scalar_dense"):
        gpu.place(torch.ones(1)).item()


def test_repr_names_it(gpu):
    assert repr(gpu) == "VirtualGPU('T4', 14.64 GiB)"


# -- interrupts ------------------------------------------------------------------------------------------------------


def test_an_interrupt_waits_for_the_next_operation():
    """So that none falls into a callback of the meter, where it would be swallowed."""
    import os
    import signal

    gpu = VirtualGPU(CATALOG["T4"])
    model = gpu.place(torch.nn.Linear(256, 256, device="meta"))
    before, handler = gpu.memory_allocated(), signal.getsignal(signal.SIGINT)
    with (
        pytest.raises(KeyboardInterrupt),
        gpu.record(model, torch.optim.SGD(model.parameters())) as record,
        record.phase("forward"),
    ):
        x = gpu.place(torch.zeros(8, 256))
        os.kill(os.getpid(), signal.SIGINT)
        model(x)
    del x
    assert signal.getsignal(signal.SIGINT) is handler
    assert gpu.memory_allocated() == before and not gpu.interrupted


@pytest.mark.parametrize("look", [torch.nonzero, torch.Tensor.item, lambda x: x[x > 0], lambda x: list(range(x.int()))])
def test_values_are_not_there(gpu, look):
    with pytest.raises(ValueError, match=r"^가상 GPU의 텐서에는 값이 없는데 .*aten\..*진짜 GPU에서만 잴 수 있다\.$"):
        look(gpu.place(torch.ones(1)))


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="PyTorch 2.9 has no such function")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_grouped_product(gpu, dtype):
    """The experts' rows side by side, forward and both gradients: shapes as with values."""
    a, b, ends = torch.ones(6, 16, dtype=dtype), torch.ones(3, 16, 8, dtype=dtype), torch.tensor([1, 4, 6]).int()
    real = [t.requires_grad_() for t in (a, b)]
    fake = [gpu.place(t).requires_grad_() for t in (a, b)]
    with gpu:
        out = F.grouped_mm(*fake, offs=gpu.place(ends))
        out.backward(torch.ones_like(out))
    expected = F.grouped_mm(*real, offs=ends)
    expected.backward(torch.ones_like(expected))
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    assert [(t.grad.shape, t.grad.dtype) for t in fake] == [(t.grad.shape, t.grad.dtype) for t in real]
