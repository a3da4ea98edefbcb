"""What a real card was asked for, request by request (tests/data/README.md), and what the virtual GPU is asked for."""

from pathlib import Path

import pytest

from benchmarks.request_by_request import attention_step, explained, predicted, recorded
from virtual_gpu.cards import card
from virtual_gpu.counting.gpu import VirtualGPU, virtual
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
