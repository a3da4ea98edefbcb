"""How N GPUs share a model, and how many bytes a parameter has."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import WrongValue
from ..language import tr
from ..units import positive_int

STAGES = (0, 1, 2, 3)
MOST_RANKS = 2**17  # more than the largest cluster that one training was reported on


@dataclass(frozen=True)
class Layout:
    """`ranks` GPUs in groups of `tensor_parallel`; ZeRO's `stage` over the ranks / tensor_parallel data-parallel ranks.

    0: DDP. 1: ZeroRedundancyOptimizer. 2, 3: FSDP2 with reshard_after_forward False, True. as_accelerate: in the groups
    that accelerate makes (`accelerate_groups`), of which the last stays gathered from forward to backward at stage 3.
    replicas: copies of the model (HSDP, stages 2 and 3): each is split over data_parallel of the ranks, whose gradients
    are added up with those of the other copies. sequence_parallel: the GPUs of a layer have a part each of the tokens
    between its matrices, and of the logits (`sequence`). context_parallel: so many data-parallel ranks share each text
    (`context`). ValueError in the reader's language, also from `check_model`, for what cannot be split.
    """

    ranks: int
    stage: int = 3
    tensor_parallel: int = 1
    as_accelerate: bool = field(default=False, repr=False)
    replicas: int = field(default=1, repr=False)
    sequence_parallel: bool = field(default=False, repr=False)
    context_parallel: int = field(default=1, repr=False)

    def __post_init__(self) -> None:
        # Plain ints, also where NumPy's were given: PyTorch takes no others.
        keep = functools.partial(object.__setattr__, self)
        keep("ranks", positive_int(self.ranks, tr(ko="GPU 수", en="number of GPUs")))
        keep(
            "tensor_parallel", positive_int(self.tensor_parallel, tr(ko="텐서 병렬 크기", en="tensor-parallel degree"))
        )
        keep("stage", _stage(self.stage))
        keep("replicas", positive_int(self.replicas, tr(ko="모델의 벌 수", en="number of copies")))
        if self.ranks > MOST_RANKS:
            raise WrongValue(
                tr(ko=f"GPU {self.ranks}개: {MOST_RANKS:,}개까지다.", en=f"{self.ranks} GPUs: up to {MOST_RANKS:,}.")
            )
        if self.ranks % self.tensor_parallel:
            raise WrongValue(
                tr(
                    ko=f"GPU {self.ranks}개를 텐서 병렬 {self.tensor_parallel}개씩 묶을 수 없다. "
                    "GPU 수가 텐서 병렬 크기의 배수여야 한다.",
                    en=f"{self.ranks} GPUs do not make groups of {self.tensor_parallel}: "
                    "the number of GPUs must be a multiple of the tensor-parallel degree.",
                )
            )
        if self.replicas > 1 and (self.stage < 2 or self.ranks // self.tensor_parallel % self.replicas):
            degree = self.tensor_parallel
            number = f"GPU {self.ranks}개를 {degree}개씩 묶은 수(텐서 병렬)" if degree > 1 else f"GPU 수({self.ranks})"
            raise WrongValue(
                tr(
                    ko=f"replicas={self.replicas}: {number}의 약수여야 하고, ZeRO 2단계나 3단계여야 한다.",
                    en=f"replicas={self.replicas}: has to divide the {self.ranks} GPUs in groups of "
                    f"{self.tensor_parallel}, at stage 2 or 3.",
                )
            )
        keep(
            "context_parallel",
            positive_int(self.context_parallel, tr(ko="컨텍스트 병렬 크기", en="context-parallel degree")),
        )
        if self.context_parallel > 1 and (
            self.ranks % self.context_parallel or self.stage < 2 or self.tensor_parallel * self.replicas > 1
        ):
            raise WrongValue(
                tr(
                    ko=f"context_parallel={self.context_parallel}: GPU 수({self.ranks})의 약수여야 하고, ZeRO 2단계나 "
                    "3단계여야 한다. 텐서 병렬이나 HSDP와 함께는 쓸 수 없다.",
                    en=f"context_parallel={self.context_parallel}: has to divide the {self.ranks} GPUs, at stage 2 or "
                    "3, without tensor parallelism or copies.",
                )
            )
        if self.stage == 1 and self.tensor_parallel > 1:
            raise WrongValue(
                tr(
                    ko="1단계와 텐서 병렬은 함께 쓸 수 없다. PyTorch의 ZeroRedundancyOptimizer는 텐서 병렬의 "
                    "파라미터(DTensor)를 받지 못한다. 2단계나 3단계를 고른다.",
                    en="Stage 1 and tensor parallelism do not go together: PyTorch's ZeroRedundancyOptimizer does not "
                    "take tensor-parallel parameters (DTensor). Choose stage 2 or 3.",
                )
            )

        if self.as_accelerate and self.tensor_parallel > 1:
            raise WrongValue(
                tr(
                    ko="as_accelerate는 텐서 병렬 없이 센다. tensor_parallel을 1로 한다.",
                    en="as_accelerate is counted without tensor parallelism: tensor_parallel has to be 1.",
                )
            )

    @property
    def data_parallel(self) -> int:
        """N of ZeRO's formulas: the ranks that share one slice of the model."""
        return self.ranks // (self.tensor_parallel * self.replicas)

    @property
    def has_ddp(self) -> bool:
        """Whether DistributedDataParallel adds the gradients of several ranks up."""
        return self.stage <= 1 and self.data_parallel > 1

    def check_model(self, config: Any) -> None:
        """ValueError where the model's heads or layers cannot be split by the tensor-parallel degree."""
        degree = self.tensor_parallel
        if degree == 1:
            return
        if not getattr(config, "base_model_tp_plan", None):
            raise WrongValue(
                tr(
                    ko=f"{config.model_type}: transformers에 텐서 병렬 계획이 없는 모델이다. 텐서 병렬을 1로 한다.",
                    en=f"{config.model_type}: transformers has no tensor-parallel plan for it; use degree 1.",
                )
            )
        names = {
            "num_attention_heads": tr(ko="어텐션 헤드", en="attention heads"),
            "num_key_value_heads": tr(ko="키·값 헤드", en="key-value heads"),
            "intermediate_size": tr(ko="MLP의 폭", en="MLP width"),  # experts may have their own alone
        }
        for name, what in names.items():
            try:
                found = getattr(config, name, None)
            except RuntimeError as error:  # transformers: the layers differ in it (Gemma 4)
                raise WrongValue(
                    tr(
                        ko=f"{what}: 이 값이 층마다 다른 모델은 텐서 병렬로 나누지 않는다.",
                        en=f"{what}: layers that differ are not split.",
                    )
                ) from error
            for number in found if isinstance(found, (list, tuple)) else (found,):
                if number and number % degree:
                    raise WrongValue(
                        tr(
                            ko=f"{what} {number}개를 텐서 병렬 크기 {degree}에 똑같이 나눌 수 없다.",
                            en=f"{number} {what} do not divide by a tensor-parallel degree of {degree}.",
                        )
                    )


def _stage(stage: Any) -> int:
    try:
        number = None if isinstance(stage, bool) else operator.index(stage)
    except TypeError:
        number = None
    if number not in STAGES:
        raise WrongValue(tr(ko=f"stage={stage!r}: 0, 1, 2, 3 가운데 하나다.", en=f"stage={stage!r}: 0, 1, 2 or 3."))
    return number


@dataclass(frozen=True)
class Convention:
    """The bytes of one parameter by kind, and the dtype that parameters and gradients have.

    half: in which FSDP2 gathers and reduces them, where it is another (MixedPrecisionPolicy).
    """

    dtype: torch.dtype
    parameters: int
    gradients: int
    master: int
    momentum: int
    variance: int
    half: torch.dtype | None = None

    @property
    def computes(self) -> torch.dtype:
        """The dtype of what is gathered."""
        return self.half or self.dtype

    @property
    def fp32_shards(self) -> Convention:
        """The same bytes as FSDP2 has them in mixed precision: the fp32 copy is the shard, and gathered in half.

        accelerate and the files of plans do it so (MixedPrecisionPolicy), and reduce in half too; torchtitan reduces in
        fp32. So a gradient is fp32, and where there is none a parameter takes 12 bytes, not 14.
        """
        if not self.master:
            return self
        return Convention(torch.float32, 4, 4, 0, self.momentum, self.variance, self.dtype)

    @property
    def total(self) -> int:
        """Bytes a parameter, all kinds together."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def optimizer(self) -> int:
        """Bytes a parameter that belong to the optimizer (K of the ZeRO paper, for "mixed": 12)."""
        return self.master + self.momentum + self.variance


# "mixed": ZeRO (arXiv 1910.02054), section 3.1: 16-bit weights and gradients, fp32 weights, momentum and variance.
CONVENTIONS = {
    "mixed": Convention(torch.bfloat16, 2, 2, 4, 4, 4),
    "bf16": Convention(torch.bfloat16, 2, 2, 0, 2, 2),
    "fp32": Convention(torch.float32, 4, 4, 0, 4, 4),
}
