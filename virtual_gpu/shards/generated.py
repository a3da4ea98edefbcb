"""GRPO over many ranks, as TRL's GRPOTrainer has it under accelerate's FSDP2, with completions from a vLLM engine.

TRL 1.16, trainer/grpo_trainer.py and generation/vllm_generation.py: the same loss as on one card (`step.completions`),
under autocast beside FSDP2's policy. Before each generation every rank gives the engine on its own card all weights
(`_iter_fsdp2_params`): one parameter after another is gathered, in the type of the shards. What the model that is
trained scores before the micro-batches takes less than these: the same forward pass with nothing kept, and no
gradients. A reference (`beta` > 0) is a second model as DPO's is (`second_model`), gathered whole for its scores.
Adapters are switched off for it, and merged into the shards for the engine (`merge_adapter`, by DTensor's operations).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import WrongValue
from ..language import tr
from ..step.completions import Completions
from ..step.setting import check_beta, grpo_label
from ..units import positive_int


@dataclass(frozen=True)
class Generated:
    """The completions of one generation on one rank.

    moment: a micro-batch ("step"); the handing over before a generation ("sync"); or what follows that, the "scoring",
    at stage 2 the first one, in which a reference that stays gathered is gathered.
    """

    completions: Completions
    adapters: bool = False
    moment: str = "step"

    @property
    def has_second(self) -> bool:
        """Whether the reference is a model of its own."""
        return self.completions.beta > 0 and not self.adapters

    @property
    def after_the_first(self) -> bool:
        """Whether a scoring went before."""
        return self.moment != "scoring"

    @property
    def has_backward(self) -> bool:
        """Whether this moment has one."""
        return self.moment == "step"

    def at(self, moment: str) -> Generated:
        """The same at another moment."""
        return replace(self, moment=moment)

    @property
    def title(self) -> str:
        """What is trained for, in one line."""
        of = self.completions
        return grpo_label(of.completion, of.beta, of.iterations, of.vllm)


def generated_of(
    objective: str, batch_size: int, sequence_length: int, completion_length: int, rollout: int, beta: float,
    iterations: int, peft: str | None,
) -> Generated | None:  # fmt: skip
    """What arguments name (as `step.setting` has them); None for what is no GRPO. WrongValue for what was not run."""
    if objective != "grpo":
        return None
    length = positive_int(completion_length or max(sequence_length // 2, 1), "completion_length")
    rows, beta = positive_int(rollout or batch_size, "rollout"), check_beta(beta)
    iterations = positive_int(iterations, "iterations")
    if length >= sequence_length:
        raise WrongValue(
            tr(
                ko=f"completion_length={length}: 프롬프트와 답을 합친 길이 {sequence_length}보다 작아야 한다.",
                en=f"completion_length={length}: less than {sequence_length}, a prompt with its completion.",
            )
        )
    if rows % batch_size:
        raise WrongValue(
            tr(
                ko=f"rollout={rows}: 마이크로 배치({batch_size})의 배수여야 한다.",
                en=f"rollout={rows}: has to be a multiple of the micro-batch of {batch_size}.",
            )
        )
    if peft not in (None, "lora"):
        raise WrongValue(
            tr(
                ko=f"objective='grpo', peft={peft!r}: 나눈 전체 미세 조정과 LoRA만 센다.",
                en=f"objective='grpo', peft={peft!r}: only full fine-tuning and LoRA are counted split.",
            )
        )
    of = Completions(rows, batch_size, sequence_length - length, length, beta, iterations, vllm=True)
    return Generated(of, peft is not None)
