"""What is trained, and how: the one place where precision, optimizer and method are said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from ..language import tr
from ..models.adapters import LORA_RANK, PEFT
from ..models.build import ATTENTION
from ..models.configs import DEFAULT_MODEL, resolve_model_id
from ..models.depth import text_config
from ..units import choose, positive_int
from .optimizers import OPTIMIZERS

MAX_TOKENS = 2**26  # 512 MiB of int64 ids: more is a typing mistake, not an experiment


def check_size(size: int, sequence_length: int) -> None:
    """ValueError where that many samples of that length are absurdly many."""
    if size * sequence_length > MAX_TOKENS:
        raise ValueError(
            tr(
                ko=f"샘플 {size:,}개 × 토큰 {sequence_length:,}개는 너무 크다. 곱이 {MAX_TOKENS:,} 이하여야 한다.",
                en=f"{size:,} samples × {sequence_length:,} tokens are too many; at most {MAX_TOKENS:,} in all.",
            )
        )


# name -> (dtype of the weights, dtype that autocast computes in). "auto" is the checkpoint's dtype.
PRECISIONS = {
    "auto": ("auto", None),
    "fp16": (torch.float16, None),
    "bf16": (torch.bfloat16, None),
    "fp32": (torch.float32, None),
    "mixed_fp16": (torch.float32, torch.float16),
    "mixed_bf16": (torch.float32, torch.bfloat16),
}
# Frozen 16-bit weights under autocast: as Trainer trains adapters (which peft keeps in fp32).
ADAPTER_PRECISIONS = {
    "autocast_fp16": (torch.float16, torch.float16),
    "autocast_bf16": (torch.bfloat16, torch.bfloat16),
}
# The second optimizer step is the first with the whole optimizer state from its beginning; nothing new comes after it.
OPTIMIZER_STEPS = 2


@dataclass(frozen=True)
class Setting:
    """What an experiment runs; checked when it is made, ValueError in the reader's language."""

    batch_size: int
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    model_id: str = DEFAULT_MODEL
    peft: str | None = None
    sequence_length: int = 256
    precision: str = "auto"
    optimizer: str = "adamw"
    attention: str = "sdpa"
    lora_rank: int = LORA_RANK
    lora_targets: str | tuple[str, ...] = "attention"
    holds_outputs: bool = False  # logits stay until the next forward, as in a loop that keeps the model's outputs

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "batch_size", positive_int(self.batch_size, "batch_size"))
        steps = positive_int(self.gradient_accumulation_steps, "gradient_accumulation_steps")
        put(self, "gradient_accumulation_steps", steps)
        put(self, "sequence_length", positive_int(self.sequence_length, "sequence_length"))
        put(self, "gradient_checkpointing", bool(self.gradient_checkpointing))
        precisions = {**PRECISIONS, **(ADAPTER_PRECISIONS if self.peft else {})}
        put(self, "precision", choose(self.precision, precisions, tr(ko="정밀도", en="precision")))
        put(self, "optimizer", choose(self.optimizer, OPTIMIZERS, tr(ko="옵티마이저", en="optimizer")))
        put(self, "attention", choose(self.attention, ATTENTION, tr(ko="어텐션", en="attention")))
        put(self, "model_id", resolve_model_id(self.model_id))
        if self.peft is not None:
            put(self, "peft", choose(self.peft, PEFT, "peft"))
        rank = positive_int(self.lora_rank, "lora_rank")
        targets = self.lora_targets
        if not isinstance(targets, str):
            if not isinstance(targets, Sequence) or not all(isinstance(target, str) for target in targets):
                raise ValueError(
                    tr(
                        ko=f"lora_targets={targets!r}: 'attention', 'all-linear'나 층 이름의 목록이어야 한다.",
                        en=f"lora_targets={targets!r}: must be 'attention', 'all-linear' or a list of layers' names.",
                    )
                )
            targets = tuple(targets)
        put(self, "lora_rank", rank if self.peft else LORA_RANK)  # without adapters neither says anything
        put(self, "lora_targets", targets if self.peft else "attention")
        check_size(self.samples, self.sequence_length)

    @property
    def samples(self) -> int:
        """The samples that the optimizer steps of the experiment take."""
        return self.batch_size * self.gradient_accumulation_steps * OPTIMIZER_STEPS

    @property
    def title(self) -> str:
        """One line that names what is run."""
        parts = [
            self.model_id.split("/")[-1],
            tr(ko=f"배치 {self.batch_size}", en=f"batch {self.batch_size}"),
            tr(ko=f"길이 {self.sequence_length}", en=f"length {self.sequence_length}"),
        ]
        if self.gradient_accumulation_steps > 1:
            parts[1] += f" × {self.gradient_accumulation_steps}"
        if self.gradient_checkpointing:
            parts.append(tr(ko="체크포인팅", en="checkpointing"))
        defaults = {f.name: f.default for f in fields(self)}
        names = ("peft", "precision", "optimizer", "attention")
        parts += [str(getattr(self, name)) for name in names if getattr(self, name) != defaults[name]]
        if self.lora_rank != LORA_RANK:
            parts.append(f"rank {self.lora_rank}")
        if self.lora_targets != "attention":
            parts.append(self.lora_targets if isinstance(self.lora_targets, str) else ", ".join(self.lora_targets))
        return " · ".join(parts)

    @property
    def dtypes(self) -> tuple[torch.dtype | str, torch.dtype | None]:
        """(dtype of the weights, dtype that autocast computes in); "auto" is the checkpoint's dtype."""
        return {**PRECISIONS, **ADAPTER_PRECISIONS}[self.precision]

    @property
    def adapters(self) -> dict[str, Any]:
        """The settings that only LoRA and QLoRA have; none without adapters."""
        return {"lora_rank": self.lora_rank, "lora_targets": self.lora_targets} if self.peft else {}

    def to_dict(self) -> dict[str, Any]:
        """The settings by name; without adapters, without theirs."""
        return {name: value for name, value in asdict(self).items() if self.peft or not name.startswith("lora_")}

    def check_length(self, config: Any) -> None:
        """ValueError where the sequence is longer than the model's positions."""
        limit = getattr(text_config(config), "max_position_embeddings", None)
        if limit is not None and self.sequence_length > limit:
            raise ValueError(
                tr(
                    ko=f"sequence_length={self.sequence_length}: {self.model_id}의 최대 길이는 {limit}이다.",
                    en=f"sequence_length={self.sequence_length}: {self.model_id} goes up to {limit}.",
                )
            )
