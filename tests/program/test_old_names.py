"""Names from before PyTorch 0.4, as programs that are still about write them."""

import io

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from virtual_gpu import cuda
from virtual_gpu.program.old_names import NAMES
from virtual_gpu.program.runner import run


def test_types_make_ask_and_name():
    """What a card's `torch.cuda.FloatTensor` does, and its bytes."""
    shipped = torch.cuda.FloatTensor
    with cuda("T4") as gpu:
        before = torch.cuda.memory_allocated()
        sized = torch.cuda.FloatTensor(64, 784).fill_(1.0)
        assert torch.cuda.memory_allocated() - before == 64 * 784 * 4
        drawn = torch.cuda.FloatTensor(np.zeros((64, 100)))
        whole = torch.cuda.LongTensor([1, 2, 3])
        assert (sized.shape, drawn.dtype, whole.dtype) == ((64, 784), torch.float32, torch.int64)
        assert all(one.is_cuda for one in (sized, drawn, whole)) and whole.tolist() == [1, 2, 3]
        assert torch.cuda.HalfTensor().shape == (0,) and torch.cuda.IntTensor(torch.Size([2, 3])).shape == (2, 3)
        assert isinstance(sized, torch.cuda.FloatTensor) and not isinstance(whole, torch.cuda.FloatTensor)
        assert not isinstance(torch.zeros(2), torch.cuda.FloatTensor)
        assert sized.type() == "torch.cuda.FloatTensor" and torch.zeros(2).type() == "torch.FloatTensor"
    assert torch.cuda.FloatTensor is shipped and gpu is not None


@pytest.mark.parametrize("name", NAMES)
def test_type_moves_as_its_name_says(name):
    with cuda("T4"):
        there = torch.zeros(4, 4).type(getattr(torch.cuda, name))
        again = torch.zeros(4, 4).type(f"torch.cuda.{name}")
        back = there.type(getattr(torch, name))
        assert (there.device.type, again.device.type, back.device.type) == ("cuda", "cuda", "cpu")
        assert there.dtype == again.dtype == back.dtype == NAMES[name]
        assert there.type(torch.float64).dtype == torch.float64 and there.type(torch.float64).is_cuda
        assert there.type() == f"torch.cuda.{name}"


def test_new_is_of_the_tensor_s_kind():
    """The hidden state of PyTorch's old language model: `weight.new(layers, batch, hidden).zero_()`."""
    with cuda("T4"):
        net = nn.LSTM(64, 64, 2).half().cuda()
        weight = next(net.parameters())
        hidden = tuple(weight.new(2, 8, 64).zero_() for _ in range(2))
        assert all(one.is_cuda and one.dtype == torch.float16 for one in hidden)
        out, _ = net(torch.randn(16, 8, 64).half().cuda(), hidden)
        out.mean().backward()
        assert weight.new([1.0, 2.0]).shape == (2,) and weight.new().shape == (0,)


def test_the_default_type_puts_a_model_on_the_card():
    dtype = torch.get_default_dtype()
    try:
        with cuda("T4"):
            torch.set_default_tensor_type("torch.cuda.HalfTensor")
            assert nn.Linear(4, 4).weight.type() == "torch.cuda.HalfTensor"
            torch.set_default_device(None)
            torch.set_default_tensor_type("torch.FloatTensor")
            assert nn.Linear(4, 4).weight.type() == "torch.FloatTensor"
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)


def test_anomaly_detection_finds_none():
    """It asks of every gradient whether any is not a number."""
    with cuda("T4"), torch.autograd.detect_anomaly(check_nan=True):
        net = nn.Linear(8, 8).cuda()
        net(torch.randn(4, 8, device="cuda")).mean().backward()
        assert net.weight.grad.is_cuda


def test_a_card_s_tensors_are_shared_already():
    with cuda("T4"):
        net = nn.Linear(8, 8).cuda()
        before = torch.cuda.memory_allocated()
        assert net.share_memory() is net and torch.cuda.memory_allocated() == before


def test_counts_and_distinct_numbers_that_are_not_known():
    """As many as there can be, and said; of what is known the true ones."""
    with cuda("T4") as gpu:
        net = nn.Conv2d(3, 5, 3).cuda()
        found = net(torch.randn(2, 3, 16, 16).cuda()).argmax(1)
        assert torch.bincount(found.flatten(), minlength=25).shape == (25,)
        assert torch.bincount(found.flatten(), torch.ones(found.numel()).cuda(), 7).dtype == torch.float32
        values, places, counts = torch.unique(found, return_inverse=True, return_counts=True)
        assert (values.shape, places.shape, counts.shape) == ((2 * 14 * 14,), (2, 14, 14), (2 * 14 * 14,))
        assert torch.unique(found, dim=1).shape == found.shape
        assert torch.unique_consecutive(found.flatten()).shape == (2 * 14 * 14,)
        labels = torch.tensor([3, 1, 3, 0]).cuda()
        assert labels.unique().tolist() == [0, 1, 3] and torch.bincount(labels).tolist() == [1, 1, 0, 2]
        with pytest.raises(RuntimeError, match="bincount"):
            torch.bincount(found.flatten())
        notes = "\n".join(gpu.watch.notes)
    assert "minlength" in notes and "test_old_names.py" in notes


def test_a_file_that_the_program_emptied_is_told_of(tmp_path):
    """`open` in the program empties it, and no weights come: nothing that could be undone."""
    path = tmp_path / "model.pt"
    path.write_bytes(b"weights")
    with cuda("T4") as gpu:
        net = nn.Linear(8, 8).cuda()
        torch.save(net.state_dict(), str(path))
        assert not any(str(path) in note for note in gpu.watch.notes)
    assert path.read_bytes() == b"weights"
    with cuda("T4") as gpu:
        with path.open("wb") as file:
            torch.save(net.state_dict(), file)
        assert sum(str(path) in note for note in gpu.watch.notes) == 1


@pytest.mark.parametrize("kind", ["archive", "before 1.6", "safetensors"])
def test_a_checkpoint_that_is_there_is_kept(kind, tmp_path):
    """Opened by the program to write over it, by name or by path, for torch.save or for bytes (as Lightning does)."""
    path = tmp_path / "best.ckpt"
    weights = {"weight": torch.arange(6.0)}
    if kind == "safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=kind == "archive")
    before = path.read_bytes()
    with cuda("T4") as gpu:
        net = nn.Linear(8, 8).cuda()
        with open(path, "wb") as file:
            torch.save(net.state_dict(), file)
            assert file.name == str(path) and file.writable()
        buffer = io.BytesIO()
        torch.save(net.state_dict(), buffer)
        with path.open("wb") as file:
            assert file.write(buffer.getvalue()) == len(buffer.getvalue()) == file.tell()
        (tmp_path / "new.ckpt").write_bytes(b"1")  # nothing was there
        (tmp_path / "notes.bin").write_bytes(b"old")
        (tmp_path / "notes.bin").write_bytes(b"new")
        notes = [note for note in gpu.watch.notes if str(path) in note]
    assert path.read_bytes() == before and len(notes) == 1 and "--write-files" in notes[0]
    assert (tmp_path / "new.ckpt").read_bytes() == b"1" and (tmp_path / "notes.bin").read_bytes() == b"new"
    with path.open("wb") as file:
        file.write(b"after")
    assert path.read_bytes() == b"after"


def test_results_of_kernels_without_a_rule_of_shapes_stay_on_the_card():
    """PyTorch asks the CPU's kernel there: a gradient of Gamma's, and quantization for training."""
    with cuda("T4"):
        net = nn.Linear(8, 8).cuda()
        rate = nn.functional.softplus(net(torch.randn(4, 8, device="cuda")))
        drawn = torch.distributions.Gamma(rate, rate).rsample()
        shares = torch.distributions.Dirichlet(rate).rsample()
        (drawn + shares).mean().backward()
        assert net.weight.grad.is_cuda
        held = torch.fake_quantize_per_tensor_affine(torch.randn(8, 8, device="cuda"), 0.1, 0, -128, 127)
        assert net(held).is_cuda


def test_forward_mode_goes_through_pytorch_s_own_scripts():
    from torch.func import jvp

    with cuda("T4"):
        net = nn.Linear(4, 4).cuda()
        x = torch.randn(8, 4, device="cuda")
        _, along = jvp(net, (x,), (torch.ones_like(x),))
        along.mean().backward()
        assert net.weight.grad.is_cuda


def test_what_a_report_could_be_taken_for(tmp_path):
    """No GPU was used; weights were updated by hand, and `--steps` waits for an optimizer."""
    alone = tmp_path / "alone.py"
    alone.write_text("import torch\ntorch.nn.Linear(2, 2)(torch.zeros(1, 2)).sum().backward()\n", encoding="utf-8")
    by_hand = tmp_path / "by_hand.py"
    by_hand.write_text(
        "import torch\nnet = torch.nn.Linear(4, 4).cuda()\nfor _ in range(9):\n"
        "    net.zero_grad()\n    net(torch.ones(1, 4).cuda()).sum().backward()\n"
        "    with torch.no_grad():\n        for one in net.parameters():\n            one -= 0.1 * one.grad\n",
        encoding="utf-8",
    )
    with_one = tmp_path / "with_one.py"
    with_one.write_text(
        "import torch\nnet = torch.nn.Linear(4, 4).cuda()\nstep = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for _ in range(9):\n    net(torch.ones(1, 4).cuda()).sum().backward()\n    step.step()\n",
        encoding="utf-8",
    )
    said = {path.stem: "\n".join(run(str(path), [], gpu="T4").notes) for path in (alone, by_hand, with_one)}
    assert "GPU를 쓰지 않았다" in said["alone"] and "--steps" not in said["alone"]
    assert "9번" in said["by_hand"] and "--steps" in said["by_hand"]
    assert "--steps" not in said["with_one"] and "쓰지 않았다" not in said["with_one"]
