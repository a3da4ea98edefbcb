"""The KV cache of a causal language model, by formula."""

from __future__ import annotations

from typing import Any

from ..units import positive_int


def shape_of(config: Any) -> tuple[int, int, list[int | None]]:
    """(heads of keys and values, size of a head, for each layer the window that it keeps or None for everything)."""
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return heads, size, [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def kv_bytes(config: Any, tokens: int, batch: int = 1, each: float = 2.0) -> int:
    """Bytes of keys and values of `tokens` tokens in each of `batch` sequences; each: bytes of one number.

    A layer with a sliding window keeps no more than the window, once generation goes on from the prompt.
    """
    tokens, batch = positive_int(tokens, "tokens"), positive_int(batch, "batch")
    heads, size, windows = shape_of(config)
    kept = sum(tokens if window is None else min(tokens, window) for window in windows)
    return round(2 * heads * size * kept * batch * each)
