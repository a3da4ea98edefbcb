"""What a real card was asked for, request by request (tests/data/README.md), and what the virtual GPU is asked for."""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.request_by_request import attention_step, first_difference, predicted
from virtual_gpu.counting.gpu import virtual

DATA = Path(__file__).parent.parent / "data/cs336_medium_requests.json.gz"


def recorded(name):
    numbers = json.loads(gzip.decompress(DATA.read_bytes()))[name]
    return [("alloc" if number > 0 else "free", abs(number) * 512) for number in numbers]


@pytest.mark.parametrize("name", ["forward 128", "trainstep 128", "forward 512", "trainstep 512"])
def test_all_requests_of_a_card_in_their_order(name):
    kind, length = name.split()
    ours = predicted(virtual("A100-80GB"), int(length), kind == "trainstep", half=length == "512")
    theirs = recorded(name)
    assert first_difference(ours, theirs) is None
    assert len(ours) == len(theirs) > 2500


def test_the_first_requests_of_all():
    """Attention by hand from an empty allocator: workspaces, copied operands, the buffer of a sum."""
    theirs = recorded("attention")
    ours = attention_step(virtual("A100-80GB"))
    assert first_difference(ours, theirs[: len(ours)]) is None
    assert len(theirs) - len(ours) <= 4  # what is released when the program ends
