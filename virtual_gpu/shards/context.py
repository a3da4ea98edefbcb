"""Context parallelism: one text on several GPUs, each with its part of the tokens in every layer; attention goes round.

PyTorch's `context_parallel` (a prototype since 2.7), by flash attention. What the GPUs hold of the model is split over
all of them by FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..language import tr


def why_no_context(config: Any, length: int, degree: int) -> str:
    """Why texts of so many tokens are not split between so many GPUs; empty where they can be."""
    # Each GPU has two of 2 × degree parts, an early and a late one: of a causal mask all have as much.
    if length % (2 * degree):
        return tr(
            ko=f"길이({length})가 {2 * degree}(글 하나를 나누는 GPU 수의 두 배)의 배수가 아니다",
            en=f"a length of {length} does not make {2 * degree} equal parts",
        )
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ("full_attention",))
    if kinds != {"full_attention"} or getattr(text, "sliding_window", None):
        return tr(
            ko="어텐션이 앞의 토큰을 일부만 보는 층(슬라이딩 윈도우 등)이 있다",
            en="not every layer's attention sees all tokens before",
        )
    return ""


def why_no_rotation(model: torch.nn.Module) -> str:
    """Why that model's texts are not split, whatever their length; empty where they can be."""
    rotates = any(name.endswith("rotary_emb") for name, _ in model.named_modules())
    if rotates and any(name.endswith("self_attn") for name, _ in model.named_modules()):
        return ""
    return tr(
        ko="어텐션이 Llama와 같은 구조(self_attn, RoPE)가 아니다",
        en="its attention is not of Llama's form (self_attn, rotary positions)",
    )


def forget_masks(model: torch.nn.Module) -> None:
    """No mask comes to attention, which is causal by itself: one would be of the whole text."""

    def without_mask(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, kwargs | {"attention_mask": None}

    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(without_mask, with_kwargs=True)


@contextmanager
def in_parts(mesh: Any, batch: dict[str, torch.Tensor]) -> Iterator[None]:
    """Of what is in the batch this rank has its part here, and attention goes round the mesh."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    buffers = [*batch.values()]
    with (
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    ):
        yield
