"""From a picture's size to patches and tokens: Qwen3-VL's, by transformers' own image processor."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from virtual_gpu.errors import WrongValue
from virtual_gpu.language import tr
from virtual_gpu.units import positive_int

PATCH, MERGE, FRAMES = 16, 2, 2  # pixels of a patch's side; patches of a token's side; frames that a patch spans
# preprocessor_config.json of Qwen/Qwen3-VL-2B-Instruct: the fewest and the most pixels of a picture.
FEWEST, MOST = 65_536, 16_777_216
TEXT = 64  # tokens of the question and its answer
STEEPEST = 200  # the image processor's own limit of one side to the other


class Grid(NamedTuple):
    """A picture as the model sees it: patches down and across, and tokens in the text."""

    down: int
    across: int

    @property
    def patches(self) -> int:
        """What the vision tower sees."""
        return self.down * self.across

    @property
    def tokens(self) -> int:
        """What the language model sees."""
        return self.patches // MERGE**2


def grid_of(width: int, height: int, max_pixels: int = MOST) -> Grid:
    """The patches of a picture of so many pixels, after it was made smaller to at most `max_pixels`.

    WrongValue for a size that is none, for one side more than 200 times the other, and for too few `max_pixels`.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    width, height = (
        positive_int(side, name)
        for side, name in ((width, tr(ko="가로", en="width")), (height, tr(ko="세로", en="height")))
    )
    max_pixels = positive_int(max_pixels, "max_pixels")
    if max_pixels < FEWEST:
        raise WrongValue(
            tr(
                ko=f"max_pixels={max_pixels:,}: 이 모델의 가장 작은 이미지는 {FEWEST:,}픽셀이다. 그 이상으로 적는다.",
                en=f"max_pixels={max_pixels:,}: this model's smallest picture has {FEWEST:,} pixels; no less.",
            )
        )
    if max(width, height) > STEEPEST * min(width, height):
        raise WrongValue(
            tr(
                ko=f"{width} × {height}: 긴 변이 짧은 변의 {STEEPEST}배를 넘으면 이미지 프로세서가 받지 않는다.",
                en=f"{width} × {height}: the image processor takes no side more than {STEEPEST} times the other.",
            )
        )
    high, wide = smart_resize(height, width, PATCH * MERGE, min_pixels=FEWEST, max_pixels=max_pixels)
    return Grid(high // PATCH, wide // PATCH)


@cache
def config() -> Any:
    """Qwen/Qwen3-VL-2B-Instruct's configuration, as far as sizes depend on it."""
    from transformers import Qwen3VLConfig

    text = {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5_000_000, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
        },
    }  # fmt: skip
    vision = {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
        "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": FRAMES,
        "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
    }  # fmt: skip
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)


def conversation(grid: Grid, images: int = 1, text: int = TEXT) -> dict[str, torch.Tensor]:
    """What the processor makes of so many pictures and so many tokens of text: one sample, its labels with it."""
    images, text = positive_int(images, "images"), positive_int(text, "text")
    known = config()
    picture = [known.vision_start_token_id, *[known.image_token_id] * grid.tokens, known.vision_end_token_id]
    ids = torch.tensor([picture * images + [1] * text])
    pixels = 3 * FRAMES * PATCH**2  # a picture counts as that many frames of a film
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == known.image_token_id).long(),
        "pixel_values": torch.zeros(grid.patches * images, pixels),
        "image_grid_thw": torch.tensor([[1, *grid]] * images),
        "labels": ids.masked_fill(ids >= known.vision_start_token_id, -100),
    }
