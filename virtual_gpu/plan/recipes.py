"""A recipe, which is a way to train, and the names of its parts in the reader's language."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..language import tr
from ..shards.mesh import experts_label, mesh_labels, stages_label
from ..step.own_code import steps_in_backward
from ..step.setting import (
    checkpointing_label,
    fused_head_label,
    reference_label,
    rest_label,
)
from .engine import engine_label

METHODS = ("full", "lora", "qlora")  # from what changes training least
# What a model's own code, peft or bitsandbytes raise where they do not go together. Other recipes may well do.
CANNOT_RUN = (ValueError, RuntimeError, TypeError, AttributeError, NotImplementedError)


@dataclass(frozen=True)
class Recipe:
    """A way to train: everything but the micro-batch. stage: ZeRO's; 0 is one GPU, or DDP.

    fused_lm_head: the loss from tiles of the logits (see `models.fused_head`). kept: what checkpointed blocks keep all
    the same (see `models.kept`). offload: their inputs wait in the CPU's RAM (see `models.offloaded`). rest_in_fp32:
    QLoRA's weights that are not 4-bit, as peft's `prepare_model_for_kbit_training` makes them; else they stay in 16
    bits, as TRL, axolotl, LLaMA-Factory and torchtune leave them. cpu_offload: parameters, gradients and optimizer
    state wait in the CPU's RAM, where the optimizer steps (see `plan.on_cpu`); stage is 3, also of one GPU. reference:
    where DPO's log probabilities of the reference come from, see `Setting`; adapters are switched off for them.
    tensor_parallel: the GPUs that compute each layer together, on the same samples (see `tensors`); what they hold is
    split over the others by FSDP2, in torchtitan's groups (`fsdp_groups`). stage is 3 where they are all.
    sequence_parallel: they share the tokens between its matrices too, and the logits (`shards.sequence`).
    context_parallel: so many GPUs share each text (`shards.context`), and all of them the model. replicas: copies of
    the model, each split over so many GPUs fewer (HSDP). spread: the layers lie on all GPUs of one process, which work
    one after another (`spread`). pipeline_parallel: stages of equal parts of the layers, through which micro-batches go
    one behind the other (`in_stages`); FSDP2 splits each over its GPUs. expert_parallel: so many GPUs have the experts
    of a layer between them, to which tokens travel (`in_experts`). vllm: who makes GRPO's completions (see
    `engine`), "" the model itself.
    """

    method: str
    precision: str
    optimizer: str
    stage: int = 0
    checkpointing: bool = False
    fused_lm_head: bool = False
    kept: tuple[str, ...] = ()
    rest_in_fp32: bool = True
    offload: bool = False
    cpu_offload: bool = False
    reference: str = "same"
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    context_parallel: int = 1
    replicas: int = 1
    spread: bool = False
    vllm: str = ""
    pipeline_parallel: int = 1
    expert_parallel: int = 1

    @property
    def accumulates(self) -> bool:
        """Whether a step may have several micro-batches: not where each parameter steps in the backward."""
        return not steps_in_backward(self.optimizer)

    @property
    def at_once(self) -> Recipe:
        """The same without computing anything twice."""
        return replace(self, checkpointing=False, fused_lm_head=False, kept=(), offload=False)

    @property
    def change(self) -> tuple[int, bool, bool, bool]:
        """How much it changes training, the first criterion of the ranking: the smaller the less."""
        half = self.precision in ("bf16", "fp16")
        return METHODS.index(self.method), half, self.optimizer != "adamw_fused", not self.rest_in_fp32

    @property
    def caution(self) -> str:
        """What to know before training so; empty where there is nothing."""
        if self.precision != "bf16":
            return ""
        return tr(
            ko="가중치까지 bf16이면 작은 갱신이 반올림되어 사라진다. 손실이 줄어드는지 보고, 확률적 반올림을 쓰는 "
            "옵티마이저나 LoRA도 견주어 본다",
            en="weights in bf16 round small updates away: see that the loss falls, and compare LoRA or an optimizer "
            "with stochastic rounding",
        )

    @property
    def whole_layers(self) -> Recipe:
        """The same with each layer and each text computed by one GPU, and all layers and experts on each."""
        one = dict.fromkeys(("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel"), 1)
        return replace(self, sequence_parallel=False, **one)

    @property
    def mesh(self) -> list[str]:
        """How the GPUs share the work beside ZeRO, in the reader's language."""
        stages = [stages_label(self.pipeline_parallel)] if self.pipeline_parallel > 1 else []
        experts = [experts_label(self.expert_parallel)] if self.expert_parallel > 1 else []
        return mesh_labels(self) + stages + experts + ["device_map"] * self.spread

    @property
    def title(self) -> str:
        """One line that names it."""
        parts = [method_label(self.method), self.precision, self.optimizer]
        if self.stage:
            parts.append(f"ZeRO-{self.stage}")
        parts += self.mesh
        if self.cpu_offload:
            parts.append(cpu_offload_label())
        if self.checkpointing:
            parts.append(checkpointing_label(self.kept, self.offload))
        if self.fused_lm_head:
            parts.append(fused_head_label())
        if self.reference != "same":
            parts.append(reference_label(self.reference))
        parts += [engine_label(self.vllm)] if self.vllm else []
        return " · ".join([*parts, *([] if self.rest_in_fp32 else [rest_label()])])


def method_label(method: str) -> str:
    """The method in the reader's language."""
    return {"full": tr(ko="전체 미세 조정", en="full fine-tuning"), "lora": "LoRA", "qlora": "QLoRA"}[method]


def not_together() -> str:
    """Of what was not run beside each other, in the reader's language."""
    return tr(ko="함께 실행해 보지 않았다", en="not run together")


def cpu_offload_label() -> str:
    """FSDP2's `CPUOffloadPolicy` in the reader's language."""
    return tr(ko="CPU 오프로드", en="CPU offload")
