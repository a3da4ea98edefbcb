"""Random tokens to train on."""

from __future__ import annotations

from typing import Any

import numpy as np

from virtual_gpu.step.setting import check_size
from virtual_gpu.units import positive_int, seed_of_random


def make_dummy_dataset(size: int = 64, sequence_length: int = 256, vocab_size: int = 30000, seed: int = 0) -> Any:
    """Random token ids and labels below `vocab_size`, `size` × `sequence_length`: a `datasets.Dataset` in torch format.

    The first ids are left out where the vocabulary is large enough (they are special tokens). Where `datasets` is not
    installed, a list of dicts of tensors takes its place. ValueError for sizes below 1 or absurdly large.
    """
    size = positive_int(size, "size")
    sequence_length = positive_int(sequence_length, "sequence_length")
    vocab_size = positive_int(vocab_size, "vocab_size")
    check_size(size, sequence_length)
    random = np.random.default_rng(seed_of_random(seed))
    lowest = 100 if vocab_size > 200 else 0
    columns = {name: random.integers(lowest, vocab_size, (size, sequence_length)) for name in ("input_ids", "labels")}
    try:
        from datasets import Dataset
    except ImportError:
        import torch

        return [{name: torch.from_numpy(ids[i]) for name, ids in columns.items()} for i in range(size)]
    dataset = Dataset.from_dict(columns)
    dataset.set_format("pt")
    return dataset
