"""Levers on the data: the same texts in another shape."""

from __future__ import annotations

import torch

from .program import Program

LENGTHS = (2048, 512, 384, 256, 256, 256, 256, 128)  # one long text and seven short ones: 4,096 tokens
Batch = dict[str, torch.Tensor]


def padded(program: Program) -> Batch:
    """As most collators do: every text as long as the longest."""
    mask = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1
    return {"input_ids": torch.ones_like(mask), "attention_mask": mask}


def longest_alone(program: Program) -> Batch:
    """A budget of tokens: the long text is a batch of its own. This is that one, the largest."""
    return {"input_ids": torch.ones(1, max(LENGTHS), dtype=torch.int64)}


def packed(program: Program) -> Batch:
    """One after the other in rows of the greatest length, attention across texts (`packing` without a mask)."""
    return {"input_ids": torch.ones(sum(LENGTHS) // max(LENGTHS), max(LENGTHS), dtype=torch.int64)}


def padding_free(program: Program) -> Batch:
    """transformers' DataCollatorWithFlattening: one row, in which positions begin anew with every text."""
    from transformers import DataCollatorWithFlattening

    made = DataCollatorWithFlattening()([{"input_ids": [1] * length} for length in LENGTHS])
    return {name: made[name] for name in ("input_ids", "position_ids")}
