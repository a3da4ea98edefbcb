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


PYTORCHS_CTC = torch.ctc_loss  # before a card replaces it


def unknown(*shape):
    """What a model computes: neither known nor drawn."""
    return torch.randn(*shape[:-1], 8, device="cuda") @ torch.randn(8, shape[-1], device="cuda")


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
    boxes = unknown(100, 4)
    keep = torch.where((boxes[:, 2] - boxes[:, 0]) >= 1e-3)[0]  # torchvision's remove_small_boxes
    assert boxes[keep].shape == (100, 4)
    assert len(card.watch.notes) == 1 and "많아야" in card.watch.notes[0]
    weight = unknown(1000, 64)
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
    scores = unknown(8, 4)
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


def test_little_that_is_drawn_on_the_card_is_drawn(card):
    mask = torch.rand(8, 512, device="cuda") < 0.15
    masked = torch.ones(8, 512, 4, device="cuda")[mask]
    assert 500 < len(masked) < 730 and int(mask.sum()) == len(masked) and not card.watch.notes
    assert sorted(torch.randperm(50, device="cuda").tolist()) == list(range(50))
    assert {*torch.randint(3, 6, (200,), device="cuda").tolist()} == {3, 4, 5}
    before = torch.get_rng_state()
    torch.rand(4, device="cuda")
    assert torch.equal(torch.get_rng_state(), before)  # the program's own draws on the CPU stay what they were


def test_much_that_is_drawn_picks_neither_all_nor_nothing(card):
    with pytest.raises(ValueStop, match=r"test_known_values\.py"):
        torch.ones(2**19, device="cuda")[torch.rand(2**19, device="cuda") < 0.15]
    with pytest.raises(ValueStop):
        torch.ones(8, device="cuda")[torch.randn(8, device="cuda") < 0.15]


def test_a_detector_samples_as_many_as_it_does_on_a_card(card):
    """torchvision's BalancedPositiveNegativeSampler, of matches that are not known."""
    matches = unknown(5, 2000).max(0).indices
    chosen = []
    for wanted, labels in ((128, matches >= 1), (384, matches == 0)):
        places = torch.where(labels)[0]
        assert places.numel() == 2000  # the most it can be
        mask = torch.zeros_like(matches, dtype=torch.uint8)
        mask[places[torch.randperm(places.numel(), device="cuda")[:wanted]]] = 1
        chosen.append(mask)
        assert torch.where(mask)[0].numel() == wanted
    assert 384 < torch.where(chosen[0] | chosen[1])[0].numel() <= 512
    assert all("많아야" in note for note in card.watch.notes)


@pytest.mark.skipif(hasattr(torch.ops.torchvision, "nms"), reason="torchvision is there, with its own")
def test_torchvisions_nms_keeps_all_boxes_and_takes_what_its_kernel_takes(card):
    with torch.library._scoped_library("torchvision", "FRAGMENT") as library:
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # as torchvision does
        torch.library.register_fake(
            "torchvision::nms",
            lambda boxes, scores, _: boxes.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long),
            lib=library,
        )
        boxes, scores = torch.randn(8000, 4, device="cuda"), torch.randn(8000, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = torch.ops.torchvision.nms(boxes, scores, 0.5)
        assert kept.shape == (8000,) and kept.dtype == torch.int64
        overlap = 8000 * (8000 // 64) * 8
        assert torch.cuda.memory_allocated() - before == 64_000
        assert overlap < torch.cuda.max_memory_allocated() - before < overlap + 2**19
        assert "많아야" in card.watch.notes[0]


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
    own = PYTORCHS_CTC(scores, targets, *(one.tolist() for one in lengths), 0, 1, False)
    torch.testing.assert_close(F.ctc_loss(scores, targets, *lengths), own)


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


@pytest.mark.parametrize(
    "environment, calls",
    [
        ("max_split_size_mb:128", ["expandable_segments:True"]),
        ("", ["expandable_segments:True", "max_split_size_mb:128"]),
        ("", ["max_split_size_mb:128", "expandable_segments:True"]),
    ],
)
def test_what_one_call_said_of_the_allocator_stays(environment, calls, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", environment)
    with virtual_gpu.cuda("T4") as card:
        with pytest.raises(ValueError, match="nothing"):
            torch._C._accelerator_setAllocatorSettings("nothing:True")
        for one in calls:
            torch._C._accelerator_setAllocatorSettings(one)
        kept = torch.empty(21 * 2**20, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 40 * 2**20 and kept.is_cuda
        assert card.meter.allocator.settings.max_split_size == 128 * 2**20


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


def test_lazy_modules_are_made_on_the_card(card):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.LazyLinear(64))
    model.append(torch.nn.LazyBatchNorm1d()).cuda()
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW(model.parameters())  # before there are shapes
    for _ in range(2):
        model(torch.randn(4, 3, 32, 32).cuda()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [name for name, _ in model.named_parameters()] == names
    assert all(one.is_cuda for one in (*model.parameters(), *model.buffers()))
    assert model[2].weight.shape == (64, 8 * 30 * 30) and model[2].weight is optimizer.param_groups[0]["params"][2]
    assert optimizer.state[model[2].weight]["exp_avg"].is_cuda
    held = [block.category for block in card.watch.blocks.values() if block.nbytes == model[2].weight.nbytes]
    assert held.count("parameters") == 1


def test_lazy_modules_elsewhere_are_pytorchs(card):
    layer = torch.nn.LazyLinear(2)
    assert layer(torch.randn(3, 5)).shape == (3, 2) and layer.weight.shape == (2, 5) and not layer.weight.is_cuda


def test_places_that_a_program_writes_itself_are_known(card):
    """RT-DETR's denoising: the positives are where ones were written into zeros."""
    negative = torch.zeros(2, 10, 1, device="cuda")
    negative[:, 5:] = 1
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).cuda().tile(1, 20)
    positive = (1 - negative.tile(1, 10, 1)).squeeze(-1) * mask
    assert torch.nonzero(positive).shape == (80, 2)
    negative[:, 0] = torch.randn(2, 1, device="cuda")
    assert known.values_of(negative) is None


def test_equal_is_answered(card):
    zeros, ones, drawn = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda"), torch.randn(4, device="cuda")
    assert torch.equal(zeros, zeros.clone()) and not torch.equal(zeros, ones) and not torch.equal(ones, ones[:2])
    assert torch.equal(drawn, ones) and not torch.equal(drawn, zeros)  # by the picture: every element is 1
    assert torch.allclose(drawn, ones[:1]) and not torch.allclose(drawn, zeros)  # of other shapes too
    assert (
        torch.allclose(zeros, zeros + 1e-9) and torch.allclose(zeros, ones, atol=2) and not torch.allclose(zeros, ones)
    )
    window = torch.hann_window(400, device="cuda")
    spectrum = torch.stft(torch.randn(2, 4000, device="cuda"), 400, window=window, return_complex=True)
    assert torch.istft(spectrum, 400, window=window).shape == (2, 4000)  # it looks whether its windows overlap


@pytest.mark.parametrize(
    "write",
    [
        lambda x, new: torch.add(new, new, out=x),
        lambda x, new: torch.maximum(new, x, out=x),
        lambda x, new: x.unbind(0)[0].copy_(new[0]),
        lambda x, new: x.chunk(2)[1].copy_(new[2:]),
        lambda x, new: x.view(torch.int32).copy_(new.long()),
        lambda x, new: x.view(2, 2, 2).view(torch.float64).copy_(new.view(2, 2, 2)[..., :1]),
        lambda x, new: setattr(x, "data", new),
        lambda x, new: torch.empty(0, device="cuda").set_(x.untyped_storage(), 0, (8,)).copy_(new.view(-1)),
    ],
)
def test_a_write_through_any_alias_ends_what_was_known(card, write):
    x = torch.zeros(4, 2).cuda()
    whole = x.t()
    assert known.values_of(x) is not None and known.values_of(whole) is not None
    write(x, unknown(4, 2))
    assert known.values_of(x) is None


def test_tensors_of_one_storage_in_a_file_hear_of_each_other(tmp_path):
    both = torch.arange(6)
    torch.save([both, both[:5]], tmp_path / "both.pt")
    with virtual_gpu.cuda("T4"):
        first, second = torch.load(tmp_path / "both.pt", map_location="cuda")
        first.zero_()
        assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
        assert known.values_of(second) is None or second.tolist() == [0] * 5


def test_values_lie_as_their_tensor_does(card):
    pictures = torch.rand(2, 3, 8, 8).to("cuda", memory_format=torch.channels_last)
    assert pictures.permute(0, 2, 3, 1).reshape(-1, 3).shape == (128, 3)
    scores = unknown(8, 4).t()
    mask = scores >= 0
    assert scores[mask].shape == (32,) and mask.t().reshape(-1).shape == (32,)


def test_what_is_too_large_to_keep_is_not_made(card, monkeypatch):
    ids = torch.arange(2**20).cuda()
    asked = []
    monkeypatch.setattr(known, "run", lambda func, *_: asked.append(func))
    ids.repeat(64, 1), torch.zeros(2**30, dtype=torch.uint8, device="cuda")
    assert asked == []


def test_a_mask_agrees_with_itself(card):
    scores = unknown(8)
    for mask, n in ((scores > 2, 0), (scores >= 0.5, 8)):
        assert int(mask.sum()) == n
        assert (bool(mask.any()), bool(mask.all())) == (False, True)  # nothing is wrong with the data
        assert sum(bool(one) for one in mask) == n and scores[mask].numel() == n
        assert int((~mask).sum()) == 8 - n
    matches = unknown(5, 8).max(0).indices
    assert int((matches >= 1).sum()) == matches[matches >= 1].numel() == 8
    rows = (matches.view(2, 4) >= 1)[0]
    assert matches[:4][rows].numel() == matches[:4][~(matches.view(2, 4) >= 1)[0]].numel() == 4  # each the most it can
    assert scores[scores >= torch.tensor(5.0)].numel() == scores[scores >= 5.0].numel() == 0
    assert "적어도" in card.watch.notes[0]


@pytest.mark.parametrize("rows", [1, 4])
def test_sampling_by_hand_goes_on_to_its_limit(card, rows):
    """As on a card with random weights: GRPO-Zero's rollout, nano-aha-moment's, and the other ways to write it."""
    end, ends = 99, torch.tensor([98, 99]).cuda()
    model = torch.nn.Sequential(torch.nn.Embedding(100, 16), torch.nn.Linear(16, 100)).cuda()

    def steps_of(over, limit=5):
        tokens, done = torch.zeros(rows, 8, dtype=torch.int64, device="cuda"), None
        finished = torch.zeros(rows, dtype=torch.bool, device="cuda")
        for _ in range(limit):
            probabilities = model(tokens)[:, -1].softmax(-1)
            token = torch.multinomial(probabilities, 1).reshape(-1)
            tokens = torch.cat((tokens, token[:, None]), 1)
            finished, done = over(token, finished)
            if done:
                break
        return tokens.shape[1] - 8

    def in_place(token, finished):
        finished |= token == end
        return finished, finished.all()

    ways = [
        lambda token, finished: (new := finished | (token == end), new.all()),
        lambda token, finished: (new := finished.logical_or(torch.isin(token, ends)), torch.all(new)),
        lambda token, finished: (finished, (token == end).all()),
        lambda token, finished: (finished, (token == ends[1]).all()),
        lambda token, finished: (finished, not (token != end).any()),
        lambda token, finished: (finished, not (~(token == end)).any()),
        lambda token, finished: (finished, (token[:, None] == ends).any(-1).all()),
        in_place,
    ]
    assert [steps_of(way) for way in ways] == [5] * len(ways)
    if rows == 1:
        ways = [lambda token, finished: (finished, token == ends[1]), lambda token, finished: (finished, token == end)]
        assert [steps_of(way) for way in ways] == [5, 5]
    assert torch.isin(99, ends) and not torch.isin(1, ends)
    written = model(torch.zeros(4, 8, dtype=torch.int64, device="cuda"))[:, -1].argmax(-1) == end
    assert not written.all()
    written[0] = True
    assert "mostly" not in written.__dict__  # of a part that was written nothing is told of the whole
    padded = model(torch.zeros(rows, 8, dtype=torch.int64, device="cuda")).argmax(-1)
    assert (padded != 0).all() and not (padded == 0).any() and (padded >= 0).all()  # nothing is wrong with the data


def test_a_loop_that_only_such_an_end_breaks_off_is_stopped(card):
    model = torch.nn.Linear(8, 100).cuda()
    with pytest.raises(ValueStop, match=r"test_known_values.py:\d+: "):
        while True:
            token = model(torch.ones(2, 8, device="cuda")).argmax(-1)
            if (token == 99).all():
                break
    for _ in range(2000):  # this one ends by itself
        if (token == 99).all():
            break


@pytest.mark.parametrize("begin", [torch.zeros, torch.ones])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_what_is_written_in_place_is_written_once(card, begin, dtype):
    """The positions that nanochat's KV cache has filled: a tensor of one element on the card."""
    on_card, real = begin(1, dtype=dtype, device="cuda"), begin(1, dtype=dtype)
    for _ in range(2):
        for tensor in (on_card, real):
            tensor.add_(38)
            tensor *= 3
            tensor -= 1
        assert on_card.item() == real.item() and bool(on_card > 100) == bool(real > 100)
    card_copy = on_card.clone()
    card_copy += on_card
    assert card_copy.item() == 2 * real.item() and on_card.cpu().tolist() == real.tolist()


def test_what_is_computed_from_drawn_numbers_is_drawn(card):
    scores, drawn = unknown(8), torch.randn(8, device="cuda")
    for mask in (drawn < 0.15, ~(drawn < 0.15), drawn * 2 + 1 < 0.15, drawn.view(-1) > 1):
        with pytest.raises(ValueStop):
            scores[mask]
    drawn.fill_(1.0)
    assert scores[drawn > 0.5].numel() == 8


def test_inference_mode_brings_results_to_the_cpu(card):
    model = torch.nn.Linear(4, 2).cuda()
    with torch.inference_mode():
        out = model(torch.randn(3, 4, device="cuda"))
        assert out.cpu().numpy().shape == (3, 2) and len(out.argmax(-1).tolist()) == 3
        counts = torch.tensor([2, 3]).cuda()
        counts.square_()
        counts.subtract_(1)
        assert counts.tolist() == [3, 8]  # once each


def test_floats_are_known_one_by_one(card):
    """As diffusers' schedulers look for their place in a list of times."""
    times = torch.tensor([999.0, 666.0, 333.0, 0.0], device="cuda")
    assert [(times == one).nonzero().tolist() for one in times] == [[[0]], [[1]], [[2]], [[3]]]
    assert [part.tolist() for part in times.chunk(2)] == [[999.0, 666.0], [333.0, 0.0]]


def test_what_is_drawn_by_chances_is_drawn():
    """A mask of `torch.bernoulli` picks about its share, as `torch.rand(…) < share` does; of unknown ones it stops."""
    with virtual_gpu.cuda("T4") as card:
        for share in (torch.full((16, 512), 0.15, device="cuda"), torch.full((16, 512), 0.15).cuda()):
            mask = torch.bernoulli(share).bool()
            assert 0.1 < mask.sum().item() / mask.numel() < 0.2
            assert torch.zeros(16, 512, 4).cuda()[mask].shape == (mask.sum().item(), 4)
        chances = torch.sigmoid(torch.nn.Linear(8, 8).cuda()(torch.randn(4, 8).cuda()))
        with pytest.raises(RuntimeError, match="test_known_values"):
            chances[torch.bernoulli(chances).bool()]
        assert card.watch.notes == []
