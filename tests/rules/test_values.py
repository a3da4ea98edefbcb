"""Questions about values: what is answered, that it is recorded, and what stops."""

import pytest
import torch

from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.counting.mode import ValueNeeded


@pytest.fixture
def gpu():
    return VirtualGPU(CATALOG["T4"])


def test_what_is_answered_and_recorded(gpu):
    """As in the experiments' data, where every position is a token: all of it is, and none of it is something else."""
    mask = gpu.place(torch.ones(2, 3, dtype=torch.bool))
    for _ in range(2):
        assert mask.all()
    assert torch.all(mask == 1)
    assert not (~mask).any() and not torch.any(mask != 1)
    assert gpu.answers.total() == 5
    (first, count), *_ = gpu.answers.items()
    assert (first.asked, first.answer, count) == ("all", True, 2)
    assert first.where.startswith(__file__ + ":")
    assert {(answer.asked, answer.answer) for answer in gpu.answers} == {("all", True), ("any", False)}
    assert str(gpu.answers).startswith("2 × all() = True (")


@pytest.mark.parametrize("look", [lambda x: bool(x[0] > 5), lambda x: bool((x[:1] == x[:1]).reshape(()))])
def test_another_bool_stops(gpu, look):
    with pytest.raises(ValueNeeded):
        look(gpu.place(torch.ones(3)))
    assert not gpu.answers


def test_a_number_in_the_optimizers_step_is_one(gpu):
    """Not zero: a norm that is divided by."""
    norm = gpu.place(torch.ones(3)).norm()
    with pytest.raises(ValueNeeded):
        norm.item()
    gpu.in_step = True
    assert norm.item() == 1.0
    assert [(a.asked, a.answer) for a in gpu.answers] == [("number", 1.0)]
