"""`torch.compile` on a virtual GPU: PyTorch's own compiler, for a card that is not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import virtual_gpu
from benchmarks.recipes import compiled as measured
from benchmarks.truth import MEASURED
from virtual_gpu.language import set_language
from virtual_gpu.program import known
from virtual_gpu.rules.active import installed
from virtual_gpu.step.predict import predict_memory

pytestmark = pytest.mark.skipif(installed("torch") < (2, 13), reason="run eagerly before PyTorch 2.13")


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    """The tests' environment switches Dynamo off."""
    set_language("en")
    with measured.compiler_on():
        yield


class Block(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        texts, tokens, width = x.shape
        query, key, value = (
            part.view(texts, tokens, 4, width // 4).transpose(1, 2) for part in self.qkv(self.norm(x)).split(width, 2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(texts, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks: int = 2):
        super().__init__()
        self.embedding, self.places = nn.Embedding(503, 64), nn.Embedding(512, 64)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(blocks)), nn.Linear(64, 503, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.places(torch.arange(ids.shape[1], device="cuda"))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(texts: int = 4, tokens: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 503, (texts, tokens), device="cuda"), torch.randint(0, 503, (texts, tokens), device="cuda")


def step(model, ids, labels) -> int:
    """Bytes above what was there, at the peak of a forward and backward under autocast."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(ids, labels)
    loss.backward()
    return torch.cuda.max_memory_allocated() - before


def not_compiled(gpu) -> list[str]:
    return [note for note in gpu.watch.notes if "without compiling" in note]


def test_a_step_of_compiled_code_holds_less_than_the_same_step_eager():
    with virtual_gpu.cuda("A100") as gpu:
        eager, model = Model().cuda(), Model().cuda()
        ids = batch()
        compiled = torch.compile(model)
        step(eager, *ids), step(compiled, *ids)  # workspaces and gradients, which stay
        peaks = [(step(eager, *ids), step(compiled, *ids)) for _ in range(2)]
        assert not not_compiled(gpu)
        assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
    assert peaks[0] == peaks[1]
    assert peaks[0][1] < peaks[0][0]


def test_a_compiled_block_keeps_what_the_compilers_partition_says():
    """In fp32 a chain of pointwise operations keeps its input alone: its intermediate results are computed again."""
    with virtual_gpu.cuda("A100"):
        x = torch.randn(1024, 1024, device="cuda", requires_grad=True)

        def chain(x: torch.Tensor) -> torch.Tensor:
            return torch.sin(torch.exp(torch.tanh(x))) * 2

        def kept(function) -> int:
            before = torch.cuda.memory_allocated()
            y = function(x)
            held = torch.cuda.memory_allocated() - before
            y.sum().backward()
            return held

        assert kept(chain) == 3 * 4 * 1024 * 1024  # tanh's result, exp's, which sin keeps too, and the output
        assert kept(torch.compile(chain)) == 4 * 1024 * 1024  # the output


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_compiled_rms_norm_keeps_what_comes_before_it(dtype, weighted):
    """As on a CPU, where Inductor's graph is the same: nanochat's and Llama's norms."""

    def kept(norm: bool) -> int:
        torch._dynamo.reset()
        up, down, head = (
            nn.Linear(*size, bias=False, dtype=dtype, device="cuda") for size in ((64, 256), (256, 64), (64, 32))
        )
        weight = nn.Parameter(torch.ones(64, dtype=dtype, device="cuda")) if weighted else None

        def model(x: torch.Tensor) -> torch.Tensor:
            y = x + down(F.relu(up(x)).square())
            return head(F.rms_norm(y, (64,), weight) if norm else y).float().pow(2).mean()

        x = torch.randn(2048, 64, dtype=dtype, device="cuda")
        torch.compile(model)(x).backward()
        up.weight.grad = down.weight.grad = head.weight.grad = None
        before = torch.cuda.memory_allocated()
        loss = torch.compile(model)(x)
        bytes_ = torch.cuda.memory_allocated() - before
        loss.backward()
        assert all(layer.weight.grad is not None for layer in (up, down, head))
        return bytes_

    with virtual_gpu.cuda("A100-80GB"):
        row = 2048 * dtype.itemsize
        assert kept(norm=True) >= kept(norm=False) > 2048 * 256 * dtype.itemsize
        assert kept(norm=True) - kept(norm=False) <= 2 * 64 * row  # its input or output, and a number a row


@pytest.mark.parametrize(
    "dropout, backend",
    (pytest.param(0.0, "inductor", marks=pytest.mark.stress), (0.1, "inductor"), (0.1, "aot_eager")),
)
def test_checkpointed_blocks_compile(dropout, backend):
    """What draws is run again in backward with the generator's state of before, which PyTorch hands to the graphs."""

    class Checkpointed(Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            for block in self.blocks:
                x = F.dropout(checkpoint(block, x, use_reentrant=False), dropout)
            return x

    kept = []
    for checkpointed in (False, True):
        through = (
            nullcontext() if checkpointed else mock.patch(f"{__name__}.checkpoint", lambda block, x, **_: block(x))
        )
        with virtual_gpu.cuda("T4") as gpu, through:
            model = torch.compile(Checkpointed(4).cuda(), backend=backend)
            ids, _ = batch()
            model(ids).sum().backward()  # which compiles
            model.zero_grad()
            before = torch.cuda.memory_allocated()
            out = model(ids)
            kept.append(torch.cuda.memory_allocated() - before)
            out.sum().backward()
            assert not [note for note in gpu.watch.notes if note.startswith("torch.compile")]
    texts_and_widths = 4 * 128 * 64 * 4
    masks = 4 * texts_and_widths if dropout else 0
    assert kept[1] < kept[0] / (4 if backend == "inductor" else 3) and kept[1] <= (4 + 2) * texts_and_widths + masks


def test_shapes_that_change_breaks_in_the_graph_and_oom():
    with virtual_gpu.cuda("T4") as gpu:
        model = Model(blocks=1).cuda()
        compiled = torch.compile(model)
        for tokens in (64, 96):
            compiled(*batch(tokens=tokens)).backward()

        @torch.compile
        def looks(ids, labels):
            loss = model(ids, labels)
            if loss.item() > 0:  # Dynamo ends the graph here and goes on
                loss = loss * 2
            return loss

        looks(*batch()).backward()
        with pytest.raises(torch.cuda.OutOfMemoryError):
            compiled(*batch(texts=100_000, tokens=512)).backward()
        assert not not_compiled(gpu)


def test_devices_and_autocast_that_are_named_within():
    with virtual_gpu.cuda("A100") as gpu:
        model, ids = Model().cuda(), batch()

        @torch.compile
        def within(ids, labels):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return model(ids.to("cuda").to(device="cuda"), labels.cuda())

        def held(function) -> int:
            function(*ids)  # workspaces, which stay
            before = torch.cuda.memory_allocated()
            loss = function(*ids)
            assert loss.requires_grad
            return torch.cuda.memory_allocated() - before

        assert held(within) < held(torch.compile(model))  # 16 bits are kept, not 32
        assert not not_compiled(gpu)


def test_what_is_called_while_tracing_has_the_programs_card():
    """`assume_constant_result`, as Unsloth marks its question which kernel attention would take."""

    @torch.compiler.assume_constant_result
    def math_alone(heads: int) -> bool:
        query, key = (torch.empty(1, n, 8, 64, device="cuda", dtype=torch.float16) for n in (heads, 2))
        return torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=True) == 0

    def first(x: torch.Tensor) -> torch.Tensor:
        return x[:1] * 2 if math_alone(8) else x * 2

    for card, rows in (("T4", 1), ("A100", 6)):
        torch._dynamo.reset()
        with virtual_gpu.cuda(card) as gpu:
            x = torch.ones(6, 4, device="cuda")
            assert torch.compile(first)(x).shape == first(x).shape == (rows, 4)
            assert not not_compiled(gpu)
            assert torch.cuda.memory_allocated() == 512


def test_nothing_of_ours_breaks_a_graph():
    predict_memory(batch_size=1, model_id="gpt2", gpu="T4")  # what it replaces in transformers stays so
    with virtual_gpu.cuda("A100") as gpu:
        model = measured.LastHiddenSum(layers=1).cuda()
        compiled = torch.compile(model, fullgraph=True)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                compiled(batch()[0]).backward()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
        assert not not_compiled(gpu)


def test_what_is_compiled_again_with_the_same_settings_is_compiled_once():
    """As torchao's optimizers do, parameter by parameter: another backend, however alike, would be compiled anew."""
    with virtual_gpu.cuda("A100-40GB"):
        tensors = [torch.randn(64, 64, device="cuda") for _ in range(3)]
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for settings in ({}, {"options": {"epilogue_fusion": False}}, {"backend": "aot_eager"}):
            for tensor in tensors:
                torch.compile(doubled, fullgraph=True, dynamic=False, **settings)(tensor)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 3


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2 + 1


def test_what_differs_from_call_to_call_is_compiled_anew():
    """Guards on None, False and a module's mode stay, though PyTorch has such values where the card's facts stand."""
    with virtual_gpu.cuda("A100") as gpu:

        @torch.compile(backend="eager")
        def longer(x, y=None, twice=False):
            x = x if y is None else torch.cat((x, y))
            return torch.cat((x, x)) if twice else x

        x = torch.ones(3, device="cuda")
        shapes = [longer(x).shape, longer(x, x).shape, longer(x, None, True).shape, longer(x).shape]
        assert [shape[0] for shape in shapes] == [3, 6, 6, 3]

        class Moded(nn.Module):
            def forward(self, x):
                return torch.cat((x, x)) if self.training else x

        model = Moded().eval()
        compiled = torch.compile(model, backend="eager")
        assert [compiled(x).shape[0], (model.train(), compiled(x))[1].shape[0]] == [3, 6]
        assert not not_compiled(gpu)


def test_what_was_compiled_elsewhere_is_compiled_for_this_card():
    double = torch.compile(lambda x: torch.cat((x, x)))
    assert double(torch.ones(2)).tolist() == [1, 1, 1, 1]
    for card in ("T4", "A100"):
        with virtual_gpu.cuda(card) as gpu:
            x = torch.ones(1024, device="cuda", requires_grad=True)
            before = torch.cuda.memory_allocated()
            out = double(x)
            assert torch.cuda.memory_allocated() - before == 8 * 1024
            out.sum().backward()
            assert x.grad.shape == x.shape
            assert not not_compiled(gpu)
    assert double(torch.ones(3)).tolist() == [1] * 6


def test_traced_code_finds_its_tensors_on_the_card():
    with virtual_gpu.cuda("A100") as gpu:

        @torch.compile(fullgraph=True)
        def where(x):
            if x.is_cuda and x.device.type == "cuda":
                return torch.cat((x, torch.zeros(2, device=x.device)))
            return x

        assert where(torch.ones(3, device="cuda")).shape == (5,)
        assert not not_compiled(gpu)


def test_numbers_that_change_and_filters_of_guards():
    with virtual_gpu.cuda("A100") as gpu:
        x = torch.ones(3, device="cuda")
        scaled = torch.compile(lambda x, scale: x * scale + torch.full((3,), scale, device="cuda"), backend=None)
        for scale in (1.5, 2.5, 3.5):
            assert scaled(x, scale).shape == (3,)
        seen = []

        def all_but_none(guards):
            seen.append(len(guards))
            return [True] * len(guards)

        torch.compile(lambda x: x + 1, options={"guard_filter_fn": all_but_none})(x)
        assert seen
        assert not not_compiled(gpu)


def test_flex_attention_is_one_kernel():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    with virtual_gpu.cuda("A100") as gpu:
        query = torch.randn(1, 2, 256, 64, device="cuda", requires_grad=True)
        mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 2, 256, 256, device="cuda")
        before = torch.cuda.memory_allocated()
        out = torch.compile(flex_attention)(query, query, query, block_mask=mask)
        kept = torch.cuda.memory_allocated() - before
        out.sum().backward()
        assert query.grad.shape == query.shape
        assert not not_compiled(gpu)
    output, logsumexp = 4 * 2 * 256 * 64, 4 * 2 * 256
    assert output + logsumexp <= kept < output + 4 * logsumexp  # and no matrix of length × length


def test_attention_that_is_written_out_becomes_one_kernel_where_inductor_knows_it():
    def attention(query, key, value):
        return torch.softmax(query @ key.transpose(-2, -1) / 8.0, -1) @ value

    def kept(function, dtype) -> int:
        heads = [torch.randn(2, 4, 512, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
        before = torch.cuda.memory_allocated()
        out = function(*heads)
        held = torch.cuda.memory_allocated() - before
        out.sum().backward()
        assert [head.grad.shape for head in heads] == [head.shape for head in heads]
        return held

    matrix, output = 2 * 4 * 512 * 512, 2 * 4 * 512 * 64
    with virtual_gpu.cuda("A100") as gpu:
        compiled = torch.compile(attention)
        kept(attention, torch.bfloat16), kept(compiled, torch.bfloat16)  # workspaces, which stay
        assert kept(attention, torch.bfloat16) >= 2 * matrix
        assert kept(compiled, torch.bfloat16) < 2 * (output + matrix // 2)  # as flash attention
        assert kept(compiled, torch.float32) >= 4 * matrix  # without TF32 it stays as it is written
        assert not not_compiled(gpu)


def test_buffers_in_pools_have_their_shapes_and_the_pools_are_counted():
    """Inductor's memory planning: one allocation, and buffers of other types and shapes inside it."""

    def chain(x, weight):
        wide = torch.mm(x, weight)
        half = torch.relu(wide).half()
        return torch.mm(half.t(), half), torch.softmax(torch.mm(wide, weight.t()), -1)

    with virtual_gpu.cuda("A100") as gpu:
        x, weight = torch.randn(300, 64, device="cuda"), torch.randn(64, 500, device="cuda")
        peaks = []
        for function in (chain, torch.compile(chain, options={"memory_planning": True})):
            function(x, weight)  # workspaces, which stay
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            squares, rows = function(x, weight)
            assert (squares.shape, squares.dtype) == ((500, 500), torch.float16)
            assert (rows.shape, rows.dtype) == ((300, 64), torch.float32)
            peaks.append(torch.cuda.max_memory_allocated() - before)
            del squares, rows
        assert not not_compiled(gpu)
    wide = 300 * 500
    assert 4 * wide + 2 * wide <= peaks[1] <= peaks[0]


def test_sums_along_a_sequence_ask_for_their_scratch():
    """Inductor's scan in parts keeps a word for each part, which Triton's types give it the size of."""
    with virtual_gpu.cuda("A100") as gpu, torch.no_grad():
        x = torch.zeros(2**20, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = torch.compile(lambda x: x.cumsum(0))(x)
        assert not not_compiled(gpu)
        assert out.shape == x.shape
        assert torch.cuda.max_memory_allocated() - before > x.nbytes


@pytest.mark.parametrize("names", [{"mode": "no such mode"}, {"options": {"no_such_option": True}}])
def test_what_is_no_mode_or_option_is_pytorchs_error(names):
    with virtual_gpu.cuda("A100"), pytest.raises(RuntimeError, match=r"no.such"):
        torch.compile(Model().cuda(), **names)


def test_an_older_pytorch_is_asked_for_nothing(monkeypatch):
    """Colab's has no default backend to ask for, and a compiler that was not read."""
    monkeypatch.setattr("virtual_gpu.program.compiled.installed", lambda library: (2, 11))
    monkeypatch.delattr("torch._dynamo.backends.registry.get_default_backend")
    with virtual_gpu.cuda("A100") as gpu:
        model = nn.Linear(4, 4).cuda()
        assert torch.compile(model) is model
        assert "< 2.13" in not_compiled(gpu)[0]
        model.compile()
        assert model(torch.ones(1, 4, device="cuda")).shape == (1, 4)


def test_what_is_not_followed_is_said(monkeypatch):
    with virtual_gpu.cuda("A100") as gpu:
        model = Model().cuda()
        assert torch.compile(model, backend=lambda graph, inputs: graph.forward) is model
        assert "backend=" in not_compiled(gpu)[0]
        torch.compile(model, mode="max-autotune")
        assert any("mode='max-autotune' not followed" in note for note in gpu.watch.notes)
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
        assert torch.compile(model) is model
        assert "TORCHDYNAMO_DISABLE" in not_compiled(gpu)[1]


def test_tensors_of_the_cpu_stay_real():
    with virtual_gpu.cuda("A100"):
        assert torch.compile(lambda x: x * 2 + 1)(torch.ones(3)).tolist() == [3, 3, 3]


def test_an_optimizers_step_runs_eagerly_where_inductor_would_write_for_the_cpu():
    with virtual_gpu.cuda("A100") as gpu:
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        step = torch.compile(optimizer.step)
        for _ in range(2):
            model(torch.ones(2, 64, device="cuda")).sum().backward()
            step()
        assert len(optimizer.state) == 2
        assert any("kernel of another kind" in note for note in not_compiled(gpu))


def test_what_a_graph_writes_is_known_no_longer():
    with virtual_gpu.cuda("A100"):
        counter, labels = torch.zeros(4).cuda(), torch.arange(4).cuda()

        @torch.compile
        def count(counter, labels, scores):
            counter.add_(labels * scores)
            return labels + 1

        for _ in range(2):
            count(counter, labels, torch.randn(4, device="cuda"))
        assert known.values_of(counter) is None and known.values_of(labels).tolist() == [0, 1, 2, 3]


def test_nothing_of_it_is_left():
    from torch._dynamo.callback import callback_handler

    before = torch.compile, torch._dynamo.reset, torch._dynamo.config.suppress_errors
    listeners = len(callback_handler.start_callbacks)
    with virtual_gpu.cuda("A100"):
        compiled = torch.compile(Model().cuda())
        compiled(*batch()).backward()
        assert len(callback_handler.start_callbacks) == listeners + 1
    assert (torch.compile, torch._dynamo.reset, torch._dynamo.config.suppress_errors) == before
    assert len(callback_handler.start_callbacks) == listeners
    again = torch.compile(lambda x: x + 1, backend="eager")
    assert again(torch.ones(2)).tolist() == [2, 2]


def test_a_card_measured_the_same_bytes():
    """Sixteen layers under a budget of PyTorch's partitioner, on a GTX 1650."""
    rows = json.loads((MEASURED / "siddddd17_ackaudit.json").read_text(encoding="utf-8"))
    row = next(row for row in rows if row["id"] == "ackaudit-llama/16x512/aot_eager/0.15")
    off = measured.RECIPES[0].predict(measured.RECIPES[0].of(row)) - row["value_bytes"]
    assert abs(off) <= 2**19 + 2**15  # that far two of the card's own processes were apart, and 32 KiB
