"""The dummy data: shapes, range, the same every time, and what is refused."""

import sys

import pytest
import torch
from torch.utils.data import DataLoader

from helpers.data import make_dummy_dataset
from virtual_gpu.step.setting import MAX_TOKENS


def test_the_books_data_set():
    datasets = pytest.importorskip("datasets")
    data = make_dummy_dataset()
    assert isinstance(data, datasets.Dataset)
    assert len(data) == 64
    assert sorted(data.column_names) == ["input_ids", "labels"]
    for name in data.column_names:
        ids = data[0][name]
        assert (ids.dtype, tuple(ids.shape)) == (torch.int64, (256,))


def whole(data):
    [batch] = DataLoader(data, batch_size=len(data))
    return batch


@pytest.mark.parametrize(
    ("vocab_size", "lowest"), [(30_000, 100), (201, 100), (200, 0), (2, 0), (1, 0)], ids=lambda value: str(value)
)
def test_ids_stay_below_the_vocabulary(vocab_size, lowest):
    batch = whole(make_dummy_dataset(size=20, sequence_length=200, vocab_size=vocab_size))
    for ids in batch.values():
        assert tuple(ids.shape) == (20, 200)
        assert lowest <= ids.min() <= ids.max() < vocab_size
    if vocab_size == 201:
        assert set(batch["input_ids"].unique().tolist()) == set(range(100, 201))  # the last id too


def test_the_seed_makes_the_data():
    first, again, other = (whole(make_dummy_dataset(size=4, seed=seed))["input_ids"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_without_datasets_a_list_takes_its_place(monkeypatch):
    expected = whole(make_dummy_dataset(size=3, sequence_length=5))
    monkeypatch.setitem(sys.modules, "datasets", None)
    data = make_dummy_dataset(size=3, sequence_length=5)
    assert isinstance(data, list)
    assert {name: ids.tolist() for name, ids in whole(data).items()} == {n: i.tolist() for n, i in expected.items()}


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "4", None])
@pytest.mark.parametrize("name", ["size", "sequence_length", "vocab_size"])
def test_what_is_no_size(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}: 1 이상의 정수여야 한다"):
        make_dummy_dataset(**{name: value})


@pytest.mark.parametrize(("size", "sequence_length"), [(10**9, 256), (64, 10**9), (2, MAX_TOKENS // 2 + 1)])
def test_absurd_sizes_are_refused_before_memory_is_taken(size, sequence_length):
    with pytest.raises(ValueError, match=r"너무 크다. 곱이 67,108,864 이하여야 한다"):
        make_dummy_dataset(size=size, sequence_length=sequence_length)
