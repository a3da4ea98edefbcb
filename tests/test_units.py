"""Bytes as text, names with their nearest neighbours, and what counts as a positive integer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virtual_gpu.language import set_language
from virtual_gpu.units import GB, GiB, MiB, book_gb, choose, human_bytes, positive_int


@pytest.fixture
def english():
    set_language("en")
    yield
    set_language("ko")


def test_units():
    assert (GB, GiB, MiB) == (10**9, 2**30, 2**20)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0.000 GB"), (2_663_620_608, "2.481 GB"), (5_327_241_216, "4.961 GB"), (2**30, "1.000 GB")],
)
def test_the_book_divides_by_1024_cubed_and_says_gb(nbytes, text):
    assert book_gb(nbytes) == text


@pytest.mark.parametrize(("nbytes", "unit"), [(0, "B"), (1023, "B"), (1024, "KiB"), (2**20, "MiB"), (2**40, "GiB")])
def test_human_bytes_takes_the_unit_that_fits(nbytes, unit):
    assert human_bytes(nbytes).split()[1] == unit


@settings(deadline=None)
@given(st.integers(0, 2**45))
def test_human_bytes_says_the_size(nbytes):
    number, unit = human_bytes(nbytes).split()
    size = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert float(number.replace(",", "")) * size == pytest.approx(nbytes, rel=0.006, abs=0)


@pytest.mark.parametrize("value", ["T4", "t4"])
def test_choose_ignores_case(value):
    assert choose(value, ["L4", "T4"], "GPU") == "T4"


@pytest.mark.parametrize(
    ("value", "near"), [("A10", "혹시 A100"), ("a1000", "혹시 A100"), ("zzzzz", None), (None, None), (7, None)]
)
def test_choose_names_the_nearest_and_all(value, near):
    with pytest.raises(ValueError, match="모르는 GPU 이름") as caught:
        choose(value, ["T4", "A100"], "GPU")
    message = str(caught.value)
    assert repr(value) in message
    assert "쓸 수 있는 값: T4, A100" in message
    assert (near in message) if near else ("혹시" not in message)


def test_choose_in_english(english):
    with pytest.raises(ValueError, match=r"unknown GPU\. Did you mean A100"):
        choose("A10", ["T4", "A100"], "GPU")


@pytest.mark.parametrize("value", [1, 4, 10**9, np.int64(4)])
def test_positive_int(value):
    number = positive_int(value, "batch_size")
    assert number == value
    assert type(number) is int


@pytest.mark.parametrize(
    "value",
    [0, -1, 2.5, 4.0, True, False, "4", None, [4], np.float64(4), np.True_, np.array([4, 5]), int, float("nan")],
    ids=repr,
)
def test_positive_int_refuses(value):
    with pytest.raises(ValueError, match=r"^batch_size=.*1 이상의 정수여야 한다"):
        positive_int(value, "batch_size")
