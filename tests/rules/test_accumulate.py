"""Backward on the virtual GPU allocates what an unwatched backward allocates, not what a watched one does."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU

WIDTH, ROWS = 96, 40
# These tell CUDA from a CPU; what is left is autograd, which is the same on both.
CPUS = ("cublas_workspace", "cublas_operands", "reduction_buffers", "index_temporaries", "attention_temporaries")


class Network(nn.Module):
    """Gradients that meet at residuals and at a weight used twice; indices, a maximum, a gather."""

    def __init__(self):
        super().__init__()
        self.table, self.weight = (nn.Parameter(torch.ones(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, ids):
        x = self.table[ids]
        for _ in range(3):
            x = x + torch.tanh(x) * torch.sigmoid(x)
            x = x + self.weight[0].exp() * x.max(-1, keepdim=True)[0]
        return x.gather(-1, ids[:, None]).exp()


def step(model, ids):
    model(ids).backward(torch.ones(ROWS, 1))


def on_the_virtual_gpu(without=()):
    """How often each number of bytes is allocated in a step, in blocks of 512."""
    gpu = VirtualGPU(CATALOG["T4"], without=[*CPUS, *without])
    model, ids = gpu.place(Network()), gpu.place(torch.zeros(ROWS, dtype=torch.int64))
    sizes = Counter()
    allocate = gpu._allocate
    gpu._allocate = lambda nbytes, category: sizes.update([nbytes]) or allocate(nbytes, category)
    with gpu:
        step(model, ids)
    return sizes


def unwatched():
    """The same on a CPU, by the profiler, which does not stand between autograd and its operations."""
    model, ids = Network(), torch.zeros(ROWS, dtype=torch.int64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=False) as run:
        step(model, ids)
    events = run.profiler.kineto_results.events()
    return Counter(e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0)


BIG = ROWS * WIDTH * 4  # an activation
TABLE = WIDTH * WIDTH * 4  # a weight


def test_as_many_tensors_as_an_unwatched_step():
    ours, theirs = on_the_virtual_gpu(), unwatched()
    assert ours[BIG] == theirs[BIG] > 20
    assert ours[TABLE] == theirs[TABLE] > 2


def test_a_watched_step_makes_more():
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            added.append(func)
            return func(*args, **(kwargs or {}))

    added = []
    model, ids = Network(), torch.zeros(ROWS, dtype=torch.int64)
    with Watch():
        step(model, ids)
    assert torch.ops.aten.add.Tensor in added and torch.ops.aten.index_put.default in added
    assert on_the_virtual_gpu(["accumulate_in_place"])[BIG] > on_the_virtual_gpu()[BIG]


def test_a_gradient_that_is_held_elsewhere_is_not_added_to():
    held = []

    class Holds(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            held.append(grad * 2)
            return held[-1]

    def run(holds):
        gpu = VirtualGPU(CATALOG["T4"])
        with gpu:
            x = torch.ones(1024, requires_grad=True)
            y = x * 1
            a, b = y.sin(), (Holds.apply(y) if holds else y.cos())
            (a + b).backward(torch.ones(1024))
        if holds:
            assert held.pop().untyped_storage()._cdata != x.grad.untyped_storage()._cdata

    run(False)
    run(True)


def test_a_sum_written_in_python_makes_a_tensor():
    class Adds(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            a = grad * 2
            b = a + grad
            assert b.untyped_storage()._cdata != a.untyped_storage()._cdata
            return b

    with VirtualGPU(CATALOG["T4"]):
        Adds.apply(torch.ones(8, requires_grad=True)).backward(torch.ones(8))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_graph_of_gradients_is_not_touched(mode):
    with VirtualGPU(CATALOG["T4"]), mode(), torch.enable_grad():
        x = torch.ones(8, requires_grad=True)
        (grad,) = torch.autograd.grad((x.exp() + x.sin()).sum(), x, create_graph=True)
        grad.sum().backward()
        assert x.grad.shape == x.shape


@pytest.mark.parametrize("pick", [lambda x, i: x.index_select(0, i), lambda x, i: x.take(i)])
def test_what_was_picked_goes_back_into_one_tensor_of_zeros(pick):
    gpu = VirtualGPU(CATALOG["T4"])
    with gpu:
        x, ids = torch.empty(1000, 64, requires_grad=True), torch.zeros(8, dtype=torch.int64)
        out = pick(x, ids)
        gradient, before = torch.empty_like(out), gpu.memory_allocated()
        gpu.reset_peak_memory_stats()
        out.backward(gradient)
        assert gpu.max_memory_allocated() - before < 2 * x.nbytes
