"""huggingface/transformers#37363: the vision tower of Qwen2.5-VL-7B looks at one picture, on an A100.

What is measured is the most allocated while `model.visual` runs, the whole model being loaded. Three things are not
stated. The picture: 1000 × 2530 there, 1000 × 2350 in QwenLM/Qwen3-VL#1049, where the same author printed the same
peaks and 20.96 MB more; the latter is taken (with the former all is 8 % to 9 % more). The library: releases before
4.51 hand sdpa tensors of three dimensions, later ones of four; which it was shows in the figure for sdpa alone. How the
model came to the card: taken as `.cuda()`; loaded with a device map it is 49.4 MiB less (0.13 %).
"""

from __future__ import annotations

from typing import Any

import torch

from virtual_gpu.program.context import cuda

from .recipe import SIZE, Recipe, Refused, Row, from_source, gpu_of

PATCH, MERGE, FRAMES = 14, 2, 2
NOT_RUN = {
    "flash_attention_2": "transformers 4 turns queries with flash_attn's own kernel, which is not followed here",
    "without masks": "the change as it was measured is in no release",
}


def predict(row: Row) -> int:
    """Bytes allocated at the peak."""
    attention, change = row["settings"].attention, row["settings"].change
    for name in (attention, change):
        if name in NOT_RUN:
            raise Refused(NOT_RUN[name])
    down, across = (round(row["settings"][side] / (PATCH * MERGE)) * MERGE for side in ("height", "width"))
    with cuda(gpu_of(row).spec):
        model = _model(attention)
        pixels = torch.zeros(down * across, 3 * FRAMES * PATCH**2).cuda()
        grid = torch.tensor([[1, down, across]]).cuda()
        with torch.no_grad():
            for _ in range(2):
                seen = model.visual(pixels.to(torch.bfloat16), grid_thw=grid)
                del seen
        return torch.cuda.max_memory_allocated()


def _model(attention: str) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    # The hub's config.json of Qwen/Qwen2.5-VL-7B-Instruct beside the defaults of its kind, as far as sizes go.
    vision = {
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    text = {
        "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128_000,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }  # fmt: skip
    config = Qwen2_5_VLConfig(vision_config=vision, tie_word_embeddings=False, **text)
    config._attn_implementation = config.vision_config._attn_implementation = attention
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Qwen2_5_VLForConditionalGeneration(config).cuda().eval()
    finally:
        torch.set_default_dtype(before)


RECIPES = (
    Recipe(
        name="Qwen2.5-VL",
        what="the vision tower of Qwen2.5-VL-7B on one picture, bf16, without gradients (transformers 4.50.3)",
        what_ko="Qwen2.5-VL-7B의 비전 인코더, 사진 한 장, bf16, 그레이디언트 없음",
        handles=from_source("huggingface/transformers"),
        predict=predict,
        packages=lambda row: ("transformers==4.50.3",),
        settings={
            "width": SIZE,
            "height": SIZE,
            "attention": ("eager", "sdpa", "flash_attention_2"),
            "change": ("none", "without masks"),
        },
    ),
)
