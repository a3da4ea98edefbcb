"""The memory of operations: with it and without it, the same traces, and tensors that are what real ones are."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from versions import keeps_workspaces

from virtual_gpu.cards import CATALOG
from virtual_gpu.counting import mode
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.counting.outputs import _IN_ONE_STEP, FakeOutputs, _in_one_step
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.depth import with_depth
from virtual_gpu.step.optimizers import make_optimizer
from virtual_gpu.step.predict import virtual_run
from virtual_gpu.step.setting import Setting


@pytest.fixture
def outputs(monkeypatch):
    fresh = FakeOutputs()
    monkeypatch.setattr(mode, "_outputs", fresh)
    return fresh


@pytest.fixture
def gpu(outputs):
    return VirtualGPU(CATALOG["T4"])


def is_remembered(outputs, work):
    """Whether the second of two runs of the same work adds nothing, and the last thing it ran is known."""
    seen = []
    real = outputs._remember
    outputs._remember = lambda key, recipe: (seen.append(key[0]), real(key, recipe))
    work()
    first = len(seen)
    work()
    return first > 0 and len(seen) == first


# -- predictions ------------------------------------------------------------------------------------------------------

MODEL = "EleutherAI/polyglot-ko-1.3b"


SETTINGS = {
    " ".join(map(str, setting.values())): setting
    for setting in (
        {"batch_size": 1},
        {"batch_size": 2, "gradient_accumulation_steps": 3},
        {"batch_size": 2, "gradient_checkpointing": True},
        {"batch_size": 2, "peft": "lora"},
        {"batch_size": 2, "peft": "qlora", "lora_targets": "all-linear", "gradient_checkpointing": True},
        {"batch_size": 2, "precision": "mixed_fp16"},
        {"batch_size": 2, "optimizer": "adamw_fused"},
        {"batch_size": 2, "optimizer": "adamw_8bit"},
        {"batch_size": 2, "optimizer": "sgd"},
        {"batch_size": 2, "optimizer": "adafactor"},
        {"batch_size": 2, "attention": "eager"},
        {"batch_size": 2, "model_id": "meta-llama/Llama-3.2-1B"},
        {"batch_size": 2, "model_id": "gpt2"},
    )
}
ATTENTION = ("1", "2 True", "2 eager", "2 meta-llama/Llama-3.2-1B")  # of another card other kernels of attention alone
CASES = [
    pytest.param(name, gpu, marks=() if gpu == "T4" or name in ATTENTION else pytest.mark.stress)
    for name in SETTINGS
    for gpu in ("T4", "H100")
]


@pytest.mark.parametrize("name, gpu", CASES)
def test_a_run_is_the_same_without_the_memory(monkeypatch, name, gpu):
    chosen = Setting(**SETTINGS[name])
    config = with_depth(load_config(chosen.model_id), 2)

    def run():
        found = virtual_run(chosen, config, CATALOG[gpu])
        return found.trace, (found.parameters, found.gradients, found.optimizer)

    with_it = [run() for _ in range(2)]  # the second hits in all
    without = FakeOutputs(limit=0)
    monkeypatch.setattr(mode, "_outputs", without)
    expected, numbers = run()
    assert not without.recipes
    for trace, its_numbers in with_it:
        assert (trace.names, its_numbers) == (expected.names, numbers)
        for name in ("born", "nbytes", "held", "category", "span"):
            assert np.array_equal(getattr(trace, name), getattr(expected, name)), name


def test_a_step_of_bitsandbytes_is_known_whatever_its_number(gpu, outputs):
    """Each step has another number, and another rate where there is a schedule."""
    layer = gpu.place(torch.nn.Linear(256, 256, bias=False))
    optimizer, known = make_optimizer("adamw_8bit", layer, 1e-3, gpu), []
    with gpu.record(layer, optimizer) as record:
        for step in range(3):
            layer.weight.grad = gpu.place(torch.empty(256, 256))
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)
            with record.phase("step"):
                optimizer.step()
            update = torch.ops.bitsandbytes.optimizer_update_8bit_blockwise.default
            known.append(sum(key[0] == id(update) for key in outputs.recipes))
    assert known == [1, 1, 1]


# -- programs of operations, beside real tensors ----------------------------------------------------------------------

OPERATIONS = {
    "transpose": lambda x, y: x.transpose(0, -1),
    "flat": lambda x, y: x.reshape(-1),
    "slice": lambda x, y: x[..., 1:] if x.dim() else x.view(1),
    "expand": lambda x, y: x.unsqueeze(0).expand(2, *x.shape),
    "detach": lambda x, y: x.detach(),
    "chunks": lambda x, y: x.chunk(2, dim=-1)[-1] if x.dim() else x[None],
    "strided": lambda x, y: x.as_strided((2,), (1,)) if x.numel() > 2 else x.clone(),
    "add": lambda x, y: x + y if x.shape == y.shape else x + 1,
    "times 1": lambda x, y: x * 1,
    "times 1.0": lambda x, y: x * 1.0,
    "or": lambda x, y: x == 1,
    "divide": lambda x, y: x / 2,
    "half": lambda x, y: x.to(torch.float16),
    "same dtype": lambda x, y: x.to(x.dtype),
    "sum": lambda x, y: x.sum(-1) if x.dim() else x.sum(),
    "stack": lambda x, y: torch.stack([x, x]),
    "like": lambda x, y: torch.zeros_like(x),
    "largest": lambda x, y: x.max(dim=0).values if x.dim() and x.shape[0] else x.clone(),
    "clone": lambda x, y: x.clone(),
    "contiguous": lambda x, y: x.contiguous(),
    "fill": lambda x, y: x.fill_(1) if not has_overlap(x) else x.clone(),
    "unsqueeze in place": lambda x, y: x.unsqueeze_(0),
    "transpose in place": lambda x, y: x.transpose_(0, -1),
    "other storage": lambda x, y: x.set_(y) if x.dtype == y.dtype else x,
    "list": lambda x, y: torch._foreach_add([x, x], 1)[1],
    "list in place": lambda x, y: (torch._foreach_zero_([x]), x)[1] if not has_overlap(x) else x,
}


def has_overlap(x):
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def played(program, make):
    """What a program leaves: metadata of every tensor, and which of them share a storage or are one object."""
    tensors = [make((3, 4), torch.float32), make((4,), torch.int64)]
    for name, a, b in program:
        x, y = tensors[a % len(tensors)], tensors[b % len(tensors)]
        if x.dim() < 4 and x.numel() < 1000:
            tensors.append(OPERATIONS[name](x, y))
    storages = [t.untyped_storage()._cdata for t in tensors]
    shared = [storages.index(storage) for storage in storages]
    same = [[other is t for other in tensors].index(True) for t in tensors]
    seen = [(t.dtype, t.shape, t.untyped_storage().nbytes()) for t in tensors]
    return [*zip(seen, shared, same, strict=True)], [(t.storage_offset(), t.stride()) for t in tensors]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_what_is_remembered_is_what_real_tensors_are(program):
    real, _ = played(program, lambda shape, dtype: torch.ones(shape, dtype=dtype))
    places = []
    # The strides are compared with other fake tensors': of a side of length one theirs are not the real ones.
    for remembers in (False, True, True):
        card = VirtualGPU(CATALOG["T4"])
        with pytest.MonkeyPatch.context() as patch:
            if not remembers:
                patch.setattr(mode, "_outputs", FakeOutputs(limit=0))
            seen, place = played(program, lambda shape, dtype, card=card: card.place(torch.ones(shape, dtype=dtype)))
        assert seen == real
        assert card.memory_allocated() == 0
        places.append(place)
    assert places[0] == places[1] == places[2]


# -- what is remembered, and what is not ------------------------------------------------------------------------------


def test_a_view_shares_and_an_operation_in_place_gives_the_tensor_itself(outputs, gpu):
    x = gpu.place(torch.ones(4, 4))
    held = gpu.memory_allocated()

    def work():
        assert x.t().untyped_storage()._cdata == x.untyped_storage()._cdata
        assert x.add_(1) is x
        assert gpu.memory_allocated() == held

    assert is_remembered(outputs, work)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.clone().unsqueeze_(0),
        lambda x: x.clone().resize_(99),
        lambda x: x.clone().set_(x.clone()),
        lambda x: x.clone().t_(),
    ],
    ids=["unsqueeze_", "resize_", "set_", "t_"],
)
def test_what_changes_its_input_is_not_remembered(outputs, gpu, work):
    x = gpu.place(torch.ones(4, 4))
    for _ in range(2):
        work(x)
    known = torch.ops.aten.clone.default, torch.ops.aten.empty.memory_format
    assert {key[0] for key in outputs.recipes} <= set(map(id, known))


def test_a_known_value_is_not_forgotten(gpu):
    with gpu:
        for value in (3, 5):
            number = torch.tensor(value)
            assert (number + 1).item() == value + 1


def test_the_default_dtype_is_part_of_the_question(gpu):
    x = gpu.place(torch.ones(3, dtype=torch.int64))
    assert (x / 2).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (x / 2).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_memory_runs_out_in_a_remembered_operation_too(gpu):
    small = VirtualGPU(CATALOG["T4"])
    x, y = (card.place(torch.empty(2**30, dtype=torch.float16, device="meta")) for card in (gpu, small))
    z = x.repeat(3)  # 6 GiB: known from here on
    del z
    blocker = small.place(torch.empty(5 * 2**30, dtype=torch.float16, device="meta"))
    with pytest.raises(torch.OutOfMemoryError):
        y.repeat(3)
    assert blocker.numel() == 5 * 2**30


@keeps_workspaces
def test_each_gpu_gets_its_workspace(outputs):
    held = []
    for _ in range(2):
        card = VirtualGPU(CATALOG["T4"])
        a = card.place(torch.ones(8, 8))
        product = a @ a
        held.append(card.memory_allocated())
        del product
    assert held == [2 * 512 + 8_519_680] * 2


@keeps_workspaces
def test_what_asks_for_a_workspace_inside_is_not_remembered(monkeypatch, outputs, gpu):
    x, real = gpu.place(torch.ones(8, 8)), mode.FakeTensorMode.__torch_dispatch__

    def multiplies(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.erf.default:
            with self:
                torch.mm(args[0], args[0])
        return real(self, func, types, args, kwargs)

    monkeypatch.setattr(mode.FakeTensorMode, "__torch_dispatch__", multiplies)
    for _ in range(2):
        gpu.release_workspaces()
        held = gpu.memory_allocated()
        erf = x.erf()
        assert gpu.memory_allocated() == held + 512 + 8_519_680
        del erf
    assert id(torch.ops.aten.erf.default) not in {key[0] for key in outputs.recipes}


def test_it_is_bounded(monkeypatch):
    bounded = FakeOutputs(limit=60)
    monkeypatch.setattr(mode, "_outputs", bounded)
    card = VirtualGPU(CATALOG["T4"])
    for n in range(1, 50):
        x = card.place(torch.ones(n))
        assert (x + n).shape == (n,)
        assert bounded.held == sum(map(len, bounded.recipes)) <= 60
    assert bounded.recipes


# -- in one step ------------------------------------------------------------------------------------------------------

ATEN = torch.ops.aten
LAYOUTS = {  # how a tensor of a shape lies: dense, a view of a wider one, the other way round, one row for all
    "dense": lambda new, shape: new(shape),
    "part": lambda new, shape: new((*shape[:-1], 3 * shape[-1]))[..., shape[-1] : 2 * shape[-1]],
    "transposed": lambda new, shape: new(shape[::-1]).permute(*range(len(shape))[::-1]),
    "expanded": lambda new, shape: new((1, *shape[1:])).expand(shape),
}


def samples(lay, new, long):
    """(operation, arguments, perhaps named ones): `lay` gives tensors in a layout, `new` dense ones, `long` indices."""
    x, y, rows, few = lay((4, 6, 8)), lay((4, 6, 8)), lay((24, 8)), new((1, 6, 1))
    unary = "cos exp gelu neg relu rsqrt sigmoid silu sin sqrt tanh"
    yield from ((getattr(ATEN, name).default, (x,)) for name in unary.split())
    yield from ((op, (x, 2.5)) for op in (ATEN.mul.Scalar, ATEN.div.Scalar))
    for memory_format in (torch.preserve_format, torch.contiguous_format):
        yield ATEN.clone.default, (x,), {"memory_format": memory_format}
        yield ATEN._to_copy.default, (x,), {"dtype": torch.float16, "memory_format": memory_format}
    yield ATEN._to_copy.default, (few,), {"dtype": torch.float64}
    for name in ("gelu_backward", "sigmoid_backward", "silu_backward", "tanh_backward"):
        yield getattr(ATEN, name).default, (x, y)
    yield ATEN.threshold_backward.default, (x, y, 0)
    for name in ("add", "sub", "mul", "div"):
        op = getattr(ATEN, name).Tensor
        yield from ((op, (x, other)) for other in (y, few, x.to(torch.float32), new(()), long((4, 6, 8)), 2, 0.5))
    yield from ((op, (x, 1)) for op in (ATEN.eq.Scalar, ATEN.ne.Scalar, ATEN.pow.Tensor_Scalar))
    for dim in (0, -1):
        yield ATEN._softmax.default, (x, dim, False)
        yield ATEN._log_softmax.default, (x, dim, False)
        yield ATEN._softmax_backward_data.default, (x, y, dim, x.dtype)
        yield ATEN._log_softmax_backward_data.default, (x, y, dim, x.dtype)
        yield ATEN.cumsum.default, (long((4, 6)), dim)
        yield ATEN.cumsum.default, (x, dim)
        yield ATEN.cat.default, ([x, y], dim)
        yield ATEN.index_select.default, (x, dim, long((3,)))
        yield ATEN.select.int, (x, dim, 2)
        yield ATEN.slice.Tensor, (x, dim, 1, 3)
        yield ATEN.slice.Tensor, (x, dim, -3, 2**63 - 1, 2)
        yield ATEN.split.Tensor, (x, 3, dim)
        yield ATEN.unsqueeze.default, (x, dim)
        yield ATEN.squeeze.dim, (few, dim)
        for keep in (False, True):
            yield ATEN.sum.dim_IntList, (x, [dim], keep)
            yield ATEN.mean.dim, (x, [dim], keep)
    yield ATEN.split_with_sizes.default, (x, [3, 5], -1)
    yield ATEN.slice_backward.default, (x, [4, 9, 8], 1, 0, 6, 1)
    yield ATEN.permute.default, (x, [2, 0, 1])
    yield ATEN.transpose.int, (x, 1, 2)
    yield ATEN.t.default, (rows,)
    yield ATEN.expand.default, (few, [4, 6, 8])
    yield ATEN.view.default, (new((4, 6, 8)), [24, 8])
    yield ATEN._unsafe_view.default, (new((4, 6, 8)), [4, -1])
    yield ATEN.mm.default, (rows, lay((8, 5)))
    yield ATEN.addmm.default, (new((5,)), rows, lay((8, 5)))
    yield ATEN.addmm.default, (lay((24, 5)), rows, lay((8, 5)))
    yield ATEN.bmm.default, (x, lay((4, 8, 5)))
    yield ATEN.baddbmm.default, (lay((4, 6, 5)), x, lay((4, 8, 5)))
    weight, statistics = new((8,)), new((4, 6, 1)).float()
    given = (new((4, 6, 8)), x, [8], statistics, statistics, weight, weight)
    yield from (
        (ATEN.native_layer_norm_backward.default, (*given, wanted)) for wanted in ([True] * 3, [True, False, True])
    )
    for reduction in range(3):
        labels, weigh = long((24,)), new(())
        yield ATEN.nll_loss_forward.default, (rows, labels, None, reduction, -100)
        grad = new((24,)) if reduction == 0 else new(())
        yield ATEN.nll_loss_backward.default, (grad, rows, labels, None, reduction, -100, weigh)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_one_step_gives_what_the_whole_way_gives(dtype, layout):
    device, mode = torch.device("cpu"), FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        new, long = (
            lambda shape, dtype=dtype: torch.empty(shape, dtype=dtype, device=device) for dtype in (dtype, torch.int64)
        )
        calls = [
            (op, args, named[0] if named else {})
            for op, args, *named in samples(lambda shape: LAYOUTS[layout](new, shape), new, long)
        ]
        wanted = [op(*args, **kwargs) for op, args, kwargs in calls]
    for (op, args, kwargs), whole in zip(calls, wanted, strict=True):
        storages = {
            part.untyped_storage()._cdata: place
            for place, part in enumerate(tree_leaves(args)) if isinstance(part, torch.Tensor)
        }  # fmt: skip

        def described(out, storages=storages):
            return type(out), [
                part if part is None else (
                    part.shape, part.stride(), part.storage_offset(), part.dtype, part.fake_device,
                    storages.get(part.untyped_storage()._cdata), part.untyped_storage().nbytes(),
                )
                for part in tree_leaves(out)
            ]  # fmt: skip

        assert described(_in_one_step(mode, op, args, kwargs, device)) == described(whole), (op, args, kwargs)
    assert {op for op, _, _ in calls} == _IN_ONE_STEP
