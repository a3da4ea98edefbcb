"""What a step of GRPO holds at least in each phase, by formula: the large blocks, and no temporary tensors.

As TRL trains by default: fp32 weights under autocast to 16 bits, whose copies live through a forward pass, AdamW,
checkpointing, a loss that makes the logits in tiles (trl/kernels/chunked_logprob.py: 4,096 tokens × 32,768 words); LoRA
on frozen 16-bit weights. The layers' inputs have the type of the weights. A batch smaller than the completions of a
rollout is accumulated, and the gradients of the batches before it stay. The optimizer's step is not among the phases.
Held against TRL's own trainer in tests/test_two_models.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from virtual_gpu.errors import WrongValue
from virtual_gpu.language import tr
from virtual_gpu.models.build import build_model, count_parameters
from virtual_gpu.models.configs import cached_by_model, load_config, model_name
from virtual_gpu.models.kv_cache import kv_bytes
from virtual_gpu.units import boolean, choose, positive_int

from .phases import BACKWARD, LOSS, ROLLOUT

BLOCKS = ("weights", "reference", "optimizer", "gradients", "copies", "cache", "activations", "engine")
REFERENCES = ("none", "copy", "adapter off")
ENGINES = ("shared", "copy", "asleep")
TILE = 4096, 32_768  # tokens, words of the vocabulary
_RANK = 16


def block_words(block: str) -> str:
    """A block's name for the reader."""
    return {
        "weights": tr(ko="가중치", en="weights"),
        "reference": tr(ko="기준 모델", en="reference"),
        "optimizer": tr(ko="옵티마이저", en="optimizer"),
        "gradients": tr(ko="그레이디언트", en="gradients"),
        "copies": tr(ko="16비트 사본", en="16-bit copies"),
        "cache": tr(ko="KV 캐시", en="KV cache"),
        "activations": tr(ko="순전파 상태", en="activations"),
        "engine": tr(ko="엔진", en="engine"),
    }[block]


def share(value: Any) -> float:
    """A part of a card, more than 0 and at most 1; WrongValue for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise WrongValue(
            tr(
                ko=f"fraction={value!r:.80}: 0보다 크고 1 이하인 수다.",
                en=f"fraction={value!r:.80}: more than 0, at most 1.",
            )
        )
    return float(value)


@dataclass(frozen=True)
class Grpo:
    """A step of GRPO. prompt, completion: tokens; generations: completions of a rollout; batch: of a training step.

    lora: rank 16 on all linear layers. reference: one of REFERENCES. engine: "shared" (the model itself generates),
    "copy" (an engine keeps its share of the card) or "asleep" (it gives it back). WrongValue says what cannot be.
    """

    model: str
    lora: bool = False
    generations: int = 8
    batch: int = 8
    prompt: int = 256
    completion: int = 512
    reference: str = "none"
    engine: str = "shared"
    fraction: float = 0.3

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", model_name(self.model))
        for name in ("generations", "batch", "prompt", "completion"):
            positive_int(getattr(self, name), name)
        choose(self.reference, REFERENCES, "reference")
        choose(self.engine, ENGINES, "engine")
        if self.reference == "adapter off" and not self.lora:
            raise WrongValue(
                tr(
                    ko="끌 어댑터가 없다: 전체 미세 조정의 기준 모델은 '없음'이나 '따로 한 벌'이다.",
                    en="There is no adapter to switch off: full fine-tuning has no reference, or a copy.",
                )
            )
        share(self.fraction)
        boolean(self.lora, "lora")

    def floor(self, card_bytes: int) -> dict[str, dict[str, int]]:
        """phase → block → bytes that it holds at least, from the second step on; card_bytes: all of the card's."""
        positive_int(card_bytes, "card_bytes")
        config, each, has = load_config(self.model), 2 if self.lora else 4, sizes(self.model)
        trained = has.lora if self.lora else has.parameters
        tokens = self.prompt + self.completion
        held = {"weights": has.parameters * each + (trained * 4 if self.lora else 0)}
        if self.reference == "copy":
            held["reference"] = has.parameters * each
        held["optimizer"] = trained * 8
        taken = round(card_bytes * self.fraction)
        copies = 0 if self.lora else has.multiplied * 2
        if self.engine == "shared":
            head = 0 if self.lora else has.head * 2
            rollout = {"copies": copies + head, "cache": kv_bytes(config, tokens, self.generations)}
        else:
            rollout = {"engine": taken}
        gradients = {"gradients": trained * 4}
        stays = {"engine": taken} if self.engine == "copy" else {}
        if self.batch < self.generations:  # accumulated: what the batches before the last one left
            stays |= gradients
        text = config.get_text_config()
        inputs = text.num_hidden_layers * self.batch * tokens * text.hidden_size * each
        kept = {"activations": inputs + min(self.batch * self.completion, TILE[0]) * TILE[1] * 2}
        # At the end of the backward pass all gradients are there and the activations are gone.
        return {
            ROLLOUT: held | rollout,
            LOSS: held | {"copies": copies} | kept | stays,
            BACKWARD: held | max(kept | stays, gradients | stays, key=lambda blocks: sum(blocks.values())),
        }


@dataclass(frozen=True)
class Sizes:
    """Parameters of a model: all, of its output layer, of the other matrices, and of LoRA on those at rank 16."""

    parameters: int
    head: int
    multiplied: int
    lora: int


@cached_by_model
def sizes(model_id: str) -> Sizes:
    """A model's, counted on tensors without memory."""
    model = build_model(load_config(model_id), torch.float16)
    head = model.get_output_embeddings()
    linear = [one for one in model.modules() if isinstance(one, torch.nn.Linear) and one is not head]
    return Sizes(
        count_parameters(model),
        head.weight.numel(),
        sum(one.weight.numel() for one in linear),
        sum(_RANK * (one.in_features + one.out_features) for one in linear),
    )
