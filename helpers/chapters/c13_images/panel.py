"""Chapter 13's panel: pictures of a size, so many of them, and what a training step on them takes of a card."""

from __future__ import annotations

from functools import partial
from typing import Any

import ipywidgets as widgets
import torch

from virtual_gpu.cards import card
from virtual_gpu.language import tr
from virtual_gpu.units import human_bytes

from ...panel import ANSWERS, Answer, Kept, Panel, status_line
from .tokens import MOST, TEXT, grid_of
from .towers import draw_towers, towers_of_each
from .trained import TARGETS, train

MAX_PIXELS = (262_144, 524_288, 1_048_576, 2_097_152, 4_194_304, MOST)


class ImagesPanel(Panel):
    """Chapter 13: pictures, their number, adapters, levers → tokens, and whose bytes the peak is made of."""

    prefix = "images"

    def __init__(self) -> None:
        super().__init__()
        screen, scan, photo = tr(ko="화면", en="screen"), tr(ko="스캔 A4", en="a scan, A4"), tr(ko="사진", en="photo")
        sizes = [
            *((f"{side} × {side}", (side, side)) for side in (512, 1024)),
            *(
                (f"{w} × {h} {name}", (w, h))
                for w, h, name in ((1920, 1080, screen), (2480, 3508, scan), (4032, 3024, photo))
            ),
        ]
        towers = {"language": tr(ko="언어 모델만", en="language model"), "all": tr(ko="양쪽 모두", en="both towers")}
        said = {
            "picture": tr(ko="이미지", en="picture"), "images": tr(ko="한 샘플의 장수", en="pictures a sample"),
            "adapters": tr(ko="LoRA", en="LoRA"), "answer": tr(ko="글의 로짓만", en="logits of the text alone"),
            "repeat": tr(ko="repeat_kv (3.12절)", en="repeat_kv (3.12)"),
        }  # fmt: skip
        pixels = [(f"{count:,}", count) for count in MAX_PIXELS]
        box = widgets.Checkbox
        self.controls = {
            "picture": self.control(widgets.Dropdown, "picture", said["picture"], options=sizes, value=(1024, 1024)),
            "images": self.control(widgets.IntSlider, "images", said["images"], value=1, min=1, max=8),
            "max_pixels": self.control(widgets.Dropdown, "max-pixels", "max_pixels", options=pixels, value=MOST),
            "gpu": self.gpu("T4"),
            "adapters": self.control(
                widgets.Dropdown, "adapters", said["adapters"], options=[(towers[name], name) for name in TARGETS]
            ),
            "checkpointing": self.checkpointing(),
            "answer_only": self.control(box, "answer-only", said["answer"], value=False),
            "repeat_kv": self.control(box, "repeat-kv", said["repeat"], value=False),
        }
        run = tr(ko="실행", en="run")
        self.run = self.button("run", run, self._run, button_style="primary", icon="play")
        self._shown_for: dict[str, Any] | None = None
        self._counted = Kept(ANSWERS)
        boxes = [*self.controls.values()]
        self.lay_out(boxes[:4], boxes[4:], [self.run])
        self.move(self._run)

    def _count(self, **chosen: Any) -> Answer:
        """Seconds, so it waits for the button: nothing of it is computed ahead."""
        (width, height), images, gpu = chosen.pop("picture"), chosen.pop("images"), card(chosen.pop("gpu"))
        grid = grid_of(width, height, chosen["max_pixels"])
        dtype = torch.bfloat16 if gpu.has_bf16 else torch.float16
        name = tr(ko="최대", en="peak")
        found = towers_of_each({name: partial(train, width, height, images, dtype=dtype, **chosen)}, gpu)
        one = found[name]
        tokens, outcome = images * (grid.tokens + 2) + TEXT, one.outcome
        ended = human_bytes(outcome.gpu) if outcome.died is None else outcome.result
        told = tr(
            ko=f"한 장에 {grid.tokens:,}토큰, 모두 {tokens:,}토큰. {gpu.name}: {ended}",
            en=f"{grid.tokens:,} tokens a picture, {tokens:,} in all. {gpu.name}: {ended}",
        )
        return Answer((told,), draw_towers(found))

    def clear(self) -> None:
        super().clear()
        self._shown_for = None

    def _changed(self) -> None:
        if self.values() == self._shown_for:
            self.remove_class("course-old")
            self._run()
            return
        self.add_class("course-old")
        self.status.value = status_line(tr(ko="바뀌었다. '실행'을 누르면 다시 센다.", en="Changed: press 'run'."))

    def _run(self) -> None:
        chosen = self.values()
        key = tuple(chosen.items())
        if key not in self._counted:
            self._counted[key] = self._count(**chosen)
        self.remove_class("course-old")
        self.show(*self._counted[key].lines, picture=self._counted[key].picture)
        self._shown_for = chosen


def images_panel() -> ImagesPanel:
    """Chapter 13: pictures of a size → tokens, and what a training step of Qwen3-VL-2B takes of a card for them."""
    return ImagesPanel()
