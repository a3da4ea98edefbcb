"""What of a program's peak belongs to which tower of a vision-language model, and that as bars."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from virtual_gpu.cards import GPUSpec, card
from virtual_gpu.drawing.svg import BLUE, GREY, INK, PURPLE, RED, SKY, YELLOW, Drawing
from virtual_gpu.language import tr
from virtual_gpu.program.device import ProgramGPU
from virtual_gpu.program.report import category_of
from virtual_gpu.program.watch import Block, Watch

from ...watched import telling
from ..c11_outside.tried import attempt
from ..c12_two_models.moments import Parts
from ..c12_two_models.pictures import stacked

COLOURS = {
    "language weights": BLUE, "vision weights": SKY, "language activations": PURPLE, "vision activations": YELLOW,
    "logits": RED, "rest": GREY, "request": INK,
}  # fmt: skip
_WEIGHTS = ("parameters", "buffers", "gradients", "optimizer")
# Qwen3-VL's names in transformers: the model's own forward makes the logits, autograd's nodes their gradients.
_VISION, _LANGUAGE, _HEAD = ".visual", ".language_model", ("base_model.model", "base_model.model.lm_head")


def part_words(part: str) -> str:
    """A part, for the reader."""
    return {
        "language weights": tr(ko="언어 모델의 가중치", en="weights, language"),
        "vision weights": tr(ko="비전 인코더의 가중치", en="weights, vision"),
        "language activations": tr(ko="언어 모델의 순전파", en="activations, language"),
        "vision activations": tr(ko="비전 인코더의 순전파", en="activations, vision"),
        "logits": tr(ko="로짓과 역전파", en="logits and backward"),
        "rest": tr(ko="입력과 나머지", en="inputs and the rest"),
        "request": tr(ko="들어주지 못한 요청", en="the request that failed"),
    }[part]


def towers_of_each(programs: Mapping[str, Callable[[], Any]], gpu: str | GPUSpec = "L4") -> dict[str, Parts]:
    """Run programs on a virtual card, one after the other: whose bytes each one's highest peak is made of.

    Of one that runs out of memory: what lay there then, and the request.
    """
    found = {}
    with telling() as told:
        for number, (name, program) in enumerate(programs.items(), 1):
            told(f"{number}/{len(programs)}: {name}")
            parts: Counter[str] = Counter()
            outcome = attempt(program, gpu, look=lambda one, parts=parts: parts.update(_parts(one)))
            parts["request"] = outcome.asked
            held = {part: parts[part] for part in COLOURS if parts[part]}
            found[name] = Parts(held, outcome, card(gpu).capacity_bytes)
    return found


def draw_towers(found: Mapping[str, Parts]) -> Drawing:
    """A bar a program, of whose bytes are there at its highest peak."""
    return stacked(found, COLOURS, part_words, columns=3)


def _parts(gpu: ProgramGPU) -> Counter[str]:
    watch = gpu.watch
    watch.name_everything()
    if gpu.last_oom is None:
        held = [*accumulate(watch.blocks[abs(event)].held * (1 if event > 0 else -1) for event in watch.events)]
        moment = max(range(len(held)), key=held.__getitem__, default=-1)
    else:  # what follows the last allocation is the error on its way out
        moment = max((place for place, event in enumerate(watch.events) if event > 0), default=-1)
    parts: Counter[str] = Counter()
    for block in watch.blocks.values():
        if block.born <= moment and (block.freed is None or block.freed > moment):
            parts[_part(block, watch)] += block.held
    return parts


def _part(block: Block, watch: Watch) -> str:
    name, category = block.module.text, category_of(block, watch)
    tower = "vision" if _VISION in name else "language" if _LANGUAGE in name else ""
    if tower:
        return f"{tower} weights" if category in _WEIGHTS else f"{tower} activations"
    made_backward = not name and watch.spans[block.span][0] == "backward"
    return "logits" if name in _HEAD or made_backward else "rest"
