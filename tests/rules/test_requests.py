"""What a real card was asked for, request by request (tests/data/README.md), and what the virtual GPU is asked for."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.recipes.cs336_compiled import recorded_step
from benchmarks.request_by_request import attention_step, explained, predicted, recorded
from virtual_gpu.allocator import round_size
from virtual_gpu.cards import card
from virtual_gpu.counting.gpu import VirtualGPU, virtual
from virtual_gpu.program.compiled import SINCE
from virtual_gpu.rules.registry import version
from virtual_gpu.trace.compare import first_difference

TRACES = Path(__file__).parent.parent / "data/traces"


@pytest.mark.parametrize("length", [128, 512])
@pytest.mark.parametrize("kind", ["forward", "trainstep"])
def test_all_requests_of_a_card_in_their_order(kind, length):
    ours = predicted(virtual("A100-80GB"), length, kind == "trainstep", half=length == 512)
    theirs, _ = recorded(TRACES / f"cs336_wed_medium_ctx{length}_{kind}.json.gz")
    assert first_difference(ours, theirs) is None
    assert len(ours) == len(theirs) > 2500


def test_the_first_requests_of_all():
    """Attention by hand from an empty allocator: workspaces, copied operands, the buffer of a sum."""
    theirs, _ = recorded(TRACES / "attention_from_empty_silmont.json.gz")
    ours = attention_step(virtual("A100-80GB"))
    assert first_difference(ours, theirs[: len(ours)]) is None
    assert len(theirs) - len(ours) <= 4  # what is released when the program ends


def test_the_rule_that_explains_a_difference_is_named():
    """The one without which the first difference is gone."""
    theirs = attention_step(VirtualGPU(card("A100-80GB"), without=["reduction_buffers"]))
    assert explained(attention_step, "A100-80GB", theirs) == {"reduction_buffers": None}


@pytest.mark.skipif(version(torch.__version__) < SINCE, reason="torch.compile runs eagerly on the virtual card")
def test_a_compiled_steps_requests():
    """The card had PyTorch 2.6's Inductor. Its forward is the same; of backward the order in a graph, and one buffer
    for the two halves of a rotated head's gradient, 12 layers' queries and keys."""
    _, events = recorded_step(warm_up=2)
    kinds = {"alloc": "alloc", "free_requested": "free"}
    ours = [(kinds[e["action"]], round_size(e["size"])) for e in events if e["action"] in kinds]
    theirs, _ = recorded(TRACES / "cs336_bcrafton_compiled_step.json.gz")
    first_of_backward = theirs.index(("alloc", round_size(4 * 50257 * 768)))  # of the head: compiled
    assert first_difference(ours, theirs) == 368 > first_of_backward > 300
    assert ours[-3119:] == theirs[-3119:]  # the optimizer's step, eager
    here, there = Counter(ours) - Counter(theirs), Counter(theirs) - Counter(ours)
    assert here == {("alloc", 196_608): 12, ("free", 196_608): 12}
    assert there == {("alloc", 98_304): 24, ("free", 98_304): 24}
    assert len(ours) == len(theirs) - 24 == 4300
