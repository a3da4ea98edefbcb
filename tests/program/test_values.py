"""Values that a program has after all, and what is taken where it has none: as programs of others need it."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import virtual_gpu
from virtual_gpu.program import known
from virtual_gpu.program.frames import is_program
from virtual_gpu.program.values import ValueStop


@pytest.fixture
def card():
    with virtual_gpu.cuda("T4") as card:
        yield card


def test_a_detectors_little_float_targets_are_known(card):
    """ultralytics' loss: the picture, class and box of each object are one tensor of floats."""
    targets = torch.tensor([[0.0, 3.0, 0.5], [0.0, 7.0, 0.1], [1.0, 3.0, 0.5]]).cuda()
    _, counts = targets[:, 0].long().unique(return_counts=True)
    assert torch.zeros(2, counts.max(), 5, device="cuda").shape == (2, 2, 5)
    assert int(torch.tensor([300.0, 500.0]).cuda().max()) == 500


def test_a_parameter_is_not_data(card):
    layer = torch.nn.Linear(4, 4)
    frozen = torch.nn.Linear(4, 4).requires_grad_(False)
    assert all(known.values_of(one) is None for module in (layer, frozen) for one in module.cuda().parameters())
    assert known.values_of(torch.zeros(4, 4).cuda()) is not None


def test_the_labels_of_a_batch_of_pictures_are_known(card):
    labels = torch.randint(0, 21, (8, 512, 512))
    labels[:, :16] = 255
    labels = labels.cuda()
    assert labels[labels != 255].numel() == 8 * 496 * 512
    edges = torch.randint(0, 100_000, (2, 400_000))
    assert int(edges.cuda().max()) == int(edges.max())


def test_a_mask_that_compares_by_the_picture_picks_all_or_nothing(card):
    boxes = torch.rand(100, 4, device="cuda")
    keep = torch.where((boxes[:, 2] - boxes[:, 0]) >= 1e-3)[0]  # torchvision's remove_small_boxes
    assert boxes[keep].shape == (100, 4)
    assert len(card.watch.notes) == 1 and "많아야" in card.watch.notes[0]
    weight = torch.randn(1000, 64, device="cuda")
    assert torch.where(torch.amax(weight, axis=1) <= 1e-16)[0].shape == (0,)  # unsloth's untrained tokens


def test_pictures_of_padding_are_none(card):
    """Idefics3 and SmolVLM: what is zero everywhere is no picture."""
    pixels = torch.rand(2, 3, 8, 8).to("cuda", torch.bfloat16)
    real = (pixels == 0.0).sum(dim=(-1, -2, -3)) != pixels.shape[1:].numel()
    assert pixels[real].shape == pixels.shape and int(real.sum()) == 2


@pytest.mark.parametrize(
    "write",
    [
        lambda mask, other: mask[:, 0].fill_(True),
        lambda mask, other: mask[3, 1].fill_(True),
        lambda mask, other: mask.copy_(other),
    ],
)
def test_a_mask_that_is_written_is_no_longer_told(card, write):
    scores = torch.randn(8, 4, device="cuda") * 1.0
    mask = scores > 2
    assert scores[scores > 2].shape == (0,)
    write(mask, torch.rand(8, 4, device="cuda") < 0.5)
    with pytest.raises(ValueStop):
        scores[mask]


def test_a_buffer_that_a_kernel_writes_is_known_no_longer(card):
    norm = torch.nn.BatchNorm1d(4).cuda()
    assert float(norm.running_mean[0]) == 0.0
    norm(torch.randn(8, 4, device="cuda"))
    assert known.values_of(norm.running_mean) is None
    kept = [torch.zeros(4).cuda()]
    torch._foreach_add_(kept, [torch.randn(4, device="cuda")])
    assert known.values_of(kept[0]) is None


def test_what_was_drawn_picks_neither_all_nor_nothing(card):
    with pytest.raises(ValueStop, match=r"test_values\.py"):
        torch.ones(8, 16, device="cuda")[torch.rand(8, 16, device="cuda") < 0.15]


def test_nothing_is_taken_where_the_program_is_to_stop():
    with virtual_gpu.cuda("T4", values="stop"), pytest.raises(ValueStop):
        ones = torch.randn(8, device="cuda")
        ones[ones > 0.5]


def test_packed_sequences_and_ctc_need_lengths_alone(card):
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(3, 5, 4).cuda(), torch.tensor([5, 3, 2]), True)
    assert packed.data.shape == (10, 4) and packed.data.is_cuda and packed.batch_sizes.tolist() == [3, 3, 2, 1, 1]
    scores = torch.randn(50, 8, 32, device="cuda", requires_grad=True)
    targets, times, lengths = torch.randint(1, 32, (8, 10)).cuda(), torch.full((8,), 50), torch.full((8,), 10)
    for reduction, shape in (("mean", ()), ("sum", ()), ("none", (8,))):
        loss = F.ctc_loss(scores.log_softmax(2), targets, times, lengths, reduction=reduction)
        assert loss.shape == shape and loss.is_cuda
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss.sum().backward()
    assert scores.grad.shape == scores.shape
    alphas = 8 * 50 * (2 * 10 + 1) * 4  # log_beta, as large as log_alpha, is there beside the gradient
    assert torch.cuda.max_memory_allocated() - before >= alphas + scores.numel() * 4


def test_the_same_ctc_on_the_cpu_is_pytorchs(card):
    scores, targets = torch.randn(5, 2, 4).log_softmax(2), torch.ones(2, 2, dtype=torch.int64)
    lengths = torch.tensor([5, 5]), torch.tensor([2, 1])
    lists = torch.ctc_loss(scores, targets, *(one.tolist() for one in lengths), 0, 1, False)
    torch.testing.assert_close(F.ctc_loss(scores, targets, *lengths), lists)


def test_data_parallel_on_one_card_is_the_module(card):
    model = torch.nn.DataParallel(torch.nn.Linear(4, 1)).cuda()
    out = model(torch.randn(8, 4).cuda())
    out.sum().backward()
    assert out.shape == (8, 1) and model.module.weight.grad is not None
    assert model(torch.randn(8, 4)).is_cuda  # scattered from the CPU


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_program_sets_the_allocator_before_it_allocates(name, monkeypatch):
    for one in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(one, raising=False)

    def reserved(*, late: bool = False) -> int:
        with virtual_gpu.cuda("T4"):
            if late:
                torch.empty(8, device="cuda")
            monkeypatch.setenv(name, "expandable_segments:True")
            kept = torch.empty(21 * 2**20, dtype=torch.uint8, device="cuda")
            return torch.cuda.memory_reserved() // 2**20 if kept.numel() else 0

    assert reserved() == 40
    monkeypatch.delenv(name)
    assert reserved(late=True) == 24  # as PyTorch, which reads it once


def test_the_allocators_own_function_is_followed_before_the_first_allocation(card, monkeypatch):
    for one in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(one, raising=False)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    kept = torch.empty(21 * 2**20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == 40 * 2**20 and kept.is_cuda and not card.watch.notes
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    assert len(card.watch.notes) == 1 and "expandable_segments:False" in card.watch.notes[0]


def test_a_saver_looks_like_itself(card):
    from transformers import PreTrainedModel

    assert (
        PreTrainedModel.push_to_hub.__doc__ and "repo_id" in inspect.signature(PreTrainedModel.push_to_hub).parameters
    )


@pytest.mark.parametrize(
    "path, own",
    [
        ("/home/me/train.py", True),
        ("/home/me/.local/lib/python3.11/site-packages/lib/a.py", False),
        ("/usr/lib/python3/dist-packages/lib/a.py", False),
        ("/tmp/target/site-packages.py", True),
    ],
)
def test_a_package_is_a_library_wherever_it_lies(path, own):
    assert is_program(compile("", path, "exec")) is own
