"""DPO and GRPO as TRL 1.16 trains them: what a second model, completions and an engine take of one card.

Counted by virtual_gpu's own step, not by a loop of these pages' kind: it is held against TRL's trainers, which a card
or a virtual card ran, by tests/test_pairs.py, test_two_models.py and test_vllm.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from virtual_gpu.cards import card
from virtual_gpu.plan.engine import AWAKE, beside
from virtual_gpu.plan.measure import setting_of
from virtual_gpu.plan.recipes import Recipe
from virtual_gpu.plan.request import make_request
from virtual_gpu.room import FITS
from virtual_gpu.step.flops import training_flops
from virtual_gpu.step.predict import predict_memory, predict_need
from virtual_gpu.step.rollout import GENERATION

from .program import LORA_RANK, Measured

TRAINER = Recipe("full", "mixed_bf16", "adamw_fused", checkpointing=True, fused_lm_head=True)


@dataclass(frozen=True)
class Preferences:
    """What is trained. batch: pairs or completions of an optimizer step, micro_batch of them at once; length: tokens.

    objective: "dpo" or "grpo". asked: more of a request, as beta; changed: fields of a setting.
    """

    card: str
    model_id: str
    batch: int
    micro_batch: int
    length: int
    objective: str
    recipe: Recipe = TRAINER
    asked: Mapping[str, Any] = field(default_factory=dict)
    changed: Mapping[str, Any] = field(default_factory=dict)

    def measure(self) -> Measured:
        """Of two optimizer steps. flops: of one, but for the completions' generation."""
        made = make_request(
            self.model_id,
            self.card,
            length=self.length,
            batch=self.batch,
            objective=self.objective,
            **{"lora_rank": LORA_RANK, "lora_targets": "all-linear", **self.asked},
        )
        request, spec = made.of(self.recipe), card(self.card)
        setting = setting_of(request, self.recipe, self.micro_batch, self.batch // self.micro_batch)
        report = predict_memory(replace(setting, **self.changed), gpu=self.card)
        one = replace(setting_of(request, self.recipe, 1, 1), **self.changed)
        found = Measured(
            report.peak_bytes, report.peak_phase, report.reserved_bytes or 0, report.fits,
            self.batch * training_flops(one).total, 0, 0,
        )  # fmt: skip
        if not self.recipe.vllm:
            return found
        need = predict_need(replace(setting, **self.changed), spec.compute_capability)
        needed, _, engine = beside(request, self.recipe, need)
        # Both ways with what an engine has for certain, its weights and a text's cache; the verdict is the planner's.
        handed = sum(need.at_generation.values()) + engine.nbytes  # while it gets the weights
        awake = need.tensors + engine.nbytes
        peak = awake if self.recipe.vllm == AWAKE else max(need.tensors, handed)
        phase = found.phase if peak in (awake, need.tensors) else GENERATION
        return replace(found, peak=peak, phase=phase, reserved=needed, fits=request.room.verdict(needed) == FITS)


def by(asked: Mapping[str, Any] | None = None, changed: Mapping[str, Any] | None = None, **recipe: Any) -> Callable:
    """A change of these fields."""
    return lambda base: {
        "recipe": replace(base.recipe, **recipe), "asked": {**base.asked, **(asked or {})},
        "changed": {**base.changed, **(changed or {})},
    }  # fmt: skip
