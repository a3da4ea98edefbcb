"""DPO over many ranks, as TRL's DPOTrainer has it under accelerate's FSDP2: the model that stays as it was.

TRL 1.16, trainer/dpo_trainer.py and models/utils.py (`prepare_fsdp`). Of all weights it is a second model, in the type
in which the first was loaded, and one single group of FSDP2: its forward gathers the whole of it, first in one piece
and then as its parameters, in the type that is computed in. At stage 3 that goes when its forward ends. At stage 2 it
stays, since no backward gives it back. Where its log probabilities are made first it is on the card alone, before the
model that is trained comes there. Of adapters there is no second model: they are switched off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import WrongValue
from ..language import tr
from ..models.build import build_model
from ..step.setting import reference_label
from ..units import choose
from .layout import Convention, Layout

OBJECTIVES = ("sft", "dpo", "grpo")  # that are counted split
REFERENCES = ("same", "precomputed")


@dataclass(frozen=True)
class Pairs:
    """A micro-batch of pairs, and where the reference's log probabilities come from (see `step.setting`).

    second: whether a second model gives them. moment: a later micro-batch ("step"); the "first" one, in which a
    reference that stays gathered is gathered; or the reference "alone", before the training.
    """

    reference: str = "same"
    second: bool = True
    moment: str = "step"

    @property
    def on_the_card(self) -> bool:
        """Whether the second model lies there while the first is trained."""
        return self.second and self.reference == "same"

    @property
    def has_second(self) -> bool:
        """Whether the second model lies there at this moment."""
        return self.on_the_card or (self.second and self.moment == "alone")

    @property
    def after_the_first(self) -> bool:
        """Whether a micro-batch went before."""
        return self.moment == "step"

    @property
    def has_backward(self) -> bool:
        """Whether this moment has one."""
        return self.moment != "alone"

    @property
    def title(self) -> str:
        """What is trained for, in one line."""
        return "DPO" if self.reference == "same" else f"DPO ({reference_label(self.reference)})"

    def first(self, layout: Layout) -> str:
        """The moment before all optimizer state that may take more than those after it; empty where none does."""
        if not self.second:
            return ""
        return {"precomputed": "alone", "same": "first" if layout.stage == 2 else ""}[self.reference]


def check_objective(objective: str, stage: int, tensor_parallel: int) -> None:
    """WrongValue for an unknown objective, and for one of TRL's that nothing splits, or that groups of GPUs compute."""
    if choose(objective, OBJECTIVES, tr(ko="학습 목표", en="objective")) != "sft" and (
        stage < 2 or tensor_parallel > 1
    ):
        raise WrongValue(
            tr(
                ko=f"objective={objective!r}: 텐서 병렬 없이 2단계나 3단계(FSDP2)로 나눈 것을 센다. "
                "나누지 않은 것은 predict_memory로 센다.",
                en=f"objective={objective!r}: counted at stage 2 or 3 (FSDP2), without tensor parallelism. Unsplit, "
                "predict_memory counts it.",
            )
        )


def pairs_of(objective: str, reference: str, peft: str | None) -> Pairs | None:
    """The pairs that arguments name; None for what is no DPO. WrongValue for an unknown reference."""
    if objective != "dpo":
        return None
    return Pairs(choose(reference, REFERENCES, tr(ko="기준 모델", en="reference")), peft is None)


def split_second(config: Any, layout: Layout, convention: Convention, mesh: Any) -> torch.nn.Module:
    """The second model on the meta device, as `prepare_fsdp` splits it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build_model(config, convention.dtype)
    policy = MixedPrecisionPolicy(*[convention.computes] * 3)  # accelerate's set_mixed_precision
    fully_shard(model, mesh=mesh, reshard_after_forward=layout.stage == 3, mp_policy=policy)
    return model.eval()
