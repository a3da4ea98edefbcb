"""Attention's implementation: which there are, and grouped heads repeated for the cards whose kernels do not take them.

transformers from 4.54 on hands sdpa the heads of keys and values as they are where a batch has no padding
(`use_gqa_in_sdpa` in integrations/sdpa_attention.py). PyTorch's memory-efficient kernel, the one of cards before
Ampere, takes no groups (sdp_utils.cpp), so sdpa falls back on the math kernel, which makes matrices of length × length.
With the heads repeated first (`repeat_kv`, as before 4.54) it computes the same with the efficient kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

REPEATED = "sdpa_repeat_kv"
ATTENTION = ("sdpa", REPEATED, "eager")
# What a script says, before the model runs.
REPEAT_KV = "sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False"


def attention_argument(attention: str) -> dict[str, str]:
    """Nothing for sdpa: transformers takes it by itself, and eager attention in models that do not have it."""
    return {"attn_implementation": attention} if attention == "eager" else {}


@contextmanager
def kv_repeated() -> Iterator[None]:
    """Inside, transformers repeats the heads of keys and values before sdpa."""
    from transformers.integrations import sdpa_attention

    with mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", lambda *args, **kwargs: False):
        yield
