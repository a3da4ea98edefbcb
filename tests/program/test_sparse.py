"""Sparse tensors (COO) on a virtual GPU: what they hold, what is made of them, and what is refused, nested ones too."""

import pytest
import torch
from torch import nn

from virtual_gpu.program import cuda
from virtual_gpu.program.runner import run
from virtual_gpu.program.values import ValueStop

NODES, ENTRIES, WIDTH = 1024, 8192, 64
HELD = (2 * 8 + 4) * ENTRIES  # two indices and a number each, whole blocks of 512 bytes


def entries(device="cpu"):
    numbers = torch.arange(ENTRIES, device=device)
    return torch.stack([numbers % NODES, numbers * 7 % NODES]), torch.ones(ENTRIES, device=device)


def adjacency(device):
    return torch.sparse_coo_tensor(*entries(), (NODES, NODES)).to(device)


def test_one_holds_its_indices_and_values():
    """Moved there, made there of real parts or of those that are there, from lists, in a module's buffer."""
    with cuda("T4"):
        moved = adjacency("cuda")
        assert moved.is_cuda and moved.is_sparse and moved.shape == (NODES, NODES) and moved._nnz() == ENTRIES
        assert torch.cuda.memory_allocated() == HELD
        indices, values = entries()
        made = torch.sparse_coo_tensor(indices=indices, values=values, size=(NODES, NODES), device="cuda")
        assert torch.cuda.memory_allocated() == 2 * HELD
        parts = entries("cuda")
        of_parts = torch.sparse_coo_tensor(*parts, (NODES, NODES))
        assert torch.cuda.memory_allocated() == 3 * HELD
        del moved, made, parts
        assert torch.cuda.memory_allocated() == HELD
        assert of_parts.half()._values().dtype == torch.float16 and of_parts.cpu().device.type == "cpu"
        del of_parts
        module = nn.Module()
        module.register_buffer("adjacency", adjacency("cpu"))
        module.cuda()
        assert module.adjacency.is_cuda and torch.cuda.memory_allocated() == HELD
        with torch.device("cuda"):
            assert torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2)).is_cuda


def results(device):
    """What a program gets of the operations that are known here, by shape, type, layout and number of entries."""
    one, x = adjacency(device), torch.ones(NODES, WIDTH, device=device, requires_grad=True)
    made = [one.coalesce(), one.t(), one.transpose(0, 1), one * 2, one / 3, one.clone(), one.double(), -one]
    made += [one + one, torch.sparse.mm(one, x), torch.spmm(one, x), one @ x, one.to_dense()]
    made += [torch.sparse.addmm(x.detach(), one, x), torch.zeros(NODES, NODES, device=device) + one]
    made += [torch.ones(NODES, NODES, device=device).sparse_mask(one.coalesce())]
    sum(each.sum() for each in made[9:12]).backward()
    weights = torch.ones(ENTRIES, device=device, requires_grad=True)
    torch.sparse.mm(torch.sparse_coo_tensor(one._indices(), weights, one.shape), x.detach()).sum().backward()
    made += [x.grad, weights.grad]
    return [
        (each.shape, each.dtype, each.layout, each.is_coalesced() if each.is_sparse else None, each.device.type)
        for each in made
    ]


def test_what_is_made_of_one_is_what_a_cpu_makes():
    expected = results("cpu")
    with cuda("T4"):
        assert results("cuda") == [(*each[:-1], "cuda") for each in expected]


def test_a_product_takes_what_its_kernel_takes():
    """Its result, the zeros that it is added to, and its turned copy; then 32-bit indices, in whole blocks."""
    with cuda("T4"):
        one, x = adjacency("cuda").coalesce(), torch.ones(NODES, WIDTH, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        held, dense = torch.cuda.memory_allocated(), 4 * NODES * WIDTH
        product = torch.sparse.mm(one, x)
        assert torch.cuda.memory_allocated() - held == dense
        compressed = 4 * (NODES + 1) + 508
        assert torch.cuda.max_memory_allocated() - held == 3 * dense + compressed + 4 * ENTRIES
        assert product.shape == (NODES, WIDTH)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_with_sparse_gradients(mode):
    """A row for each token of a bag, as of an embedding; the optimizer steps on it."""
    with cuda("T4"):
        bag = nn.EmbeddingBag(4096, WIDTH, mode=mode, sparse=True).cuda()
        optimizer = torch.optim.SparseAdam(bag.parameters(), lr=0.1)
        tokens, starts = torch.arange(128).cuda(), torch.tensor([0, 8, 100]).cuda()
        bag(tokens, starts).sum().backward()
        held = torch.cuda.memory_allocated()
        gradient = bag.weight.grad
        assert (gradient.is_sparse, gradient._nnz(), gradient.shape) == (True, 128, (4096, WIDTH))
        assert gradient._values().shape == (128, WIDTH) and gradient._indices().shape == (1, 128)
        optimizer.step()
        assert torch.cuda.memory_allocated() - held == 2 * 4096 * WIDTH * 4


@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.SGD])
def test_embeddings_with_sparse_gradients(kind):
    """A gradient has a row for each token, also a second time; Adam's states are the whole table."""
    with cuda("T4"):
        table = nn.Embedding(4096, WIDTH, sparse=True).cuda()
        optimizer = kind(table.parameters(), lr=0.1)
        held = torch.cuda.memory_allocated()
        for times in (1, 2):
            table(torch.arange(128).cuda()).sum().backward()
            assert table.weight.grad.is_sparse and table.weight.grad._nnz() == 128 * times
        assert torch.cuda.memory_allocated() - held == 2 * 128 * (8 + 4 * WIDTH)
        optimizer.step()
        optimizer.zero_grad()
        states = 2 if kind is torch.optim.SparseAdam else 0
        assert torch.cuda.memory_allocated() - held == states * 4096 * WIDTH * 4


def test_a_graph_network_is_run_and_reported(tmp_path):
    script = tmp_path / "gcn.py"
    script.write_text(
        "import torch\n"
        "adjacency = torch.sparse_coo_tensor(torch.arange(64).repeat(2, 1), torch.ones(64), (64, 64)).cuda()\n"
        "layers = torch.nn.ModuleList([torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)]).cuda()\n"
        "optimizer = torch.optim.Adam(layers.parameters())\n"
        "for _ in range(3):\n"
        "    x = torch.ones(64, 32, device='cuda')\n"
        "    for layer in layers:\n"
        "        x = torch.spmm(adjacency, layer(x)).relu()\n"
        "    torch.nn.functional.nll_loss(x.log_softmax(1), torch.zeros(64, dtype=torch.int64).cuda()).backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "torch.save({'adjacency': adjacency}, 'a.pt')\n"
        "assert torch.load('a.pt')['adjacency']._nnz() == 64\n"
    )
    report = run(str(script), through_evaluation=True)
    assert report.steps == 3 and report.error is None


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_by_name(layout):
    """Made there, made of parts that are there, or moved; on the CPU they stay what they are."""
    parts = [torch.ones(3, 4), torch.ones(5, 4)]
    with cuda("T4"):
        there = [part.cuda() for part in parts]
        on_cpu = torch.nested.nested_tensor(parts, layout=layout)
        assert on_cpu.is_nested and on_cpu.to(torch.float64).dtype == torch.float64
        for make in (
            lambda: torch.nested.nested_tensor(parts, layout=layout, device="cuda"),
            lambda: torch.nested.as_nested_tensor(there, layout=layout),
            lambda: on_cpu.cuda(),
            lambda: on_cpu.to(device="cuda"),
        ):
            with pytest.raises(NotImplementedError, match="nested"):
                make()


def test_what_is_not_known_is_refused_by_name():
    with cuda("T4"):
        with pytest.raises(ValueStop, match="_to_sparse"):
            (torch.ones(2048, 2048, device="cuda") * torch.randn(2048, 2048, device="cuda")).to_sparse()
        with pytest.raises(NotImplementedError, match="sparse_csr"):
            torch.eye(4).to_sparse_csr().cuda()
        with pytest.raises(NotImplementedError, match="softmax"):
            torch.sparse.softmax(adjacency("cuda"), 1)
        with pytest.raises(NotImplementedError, match="sparse_sparse"):  # how many entries are in it hangs on values
            torch.sparse.mm(adjacency("cuda"), adjacency("cuda"))
