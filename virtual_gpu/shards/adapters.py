"""LoRA and QLoRA over many ranks: what FSDP2 splits of a model with adapters, and what stays whole on each.

Frozen weights and adapters are split alike, tensor by tensor along dim 0. 4-bit weights have to be stored as 16-bit
numbers for that (`bnb_4bit_quant_storage`): those stored as bytes accelerate leaves out of the sharding
(accelerate 1.15, utils/fsdp_utils.py, fsdp2_prepare_model). The statistics that dequantize them are no parameters of a
module: FSDP2 does not see them, and every rank has them all. Gradients and optimizer state are the adapters' alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..cards import CATALOG, GPUSpec
from ..counting.gpu import VirtualGPU
from ..errors import NotSupported, WrongValue
from ..language import tr
from ..models.adapters import LORA_RANK, PEFT, add_adapters, copies_tied_end, module_names, names_of_targets
from ..models.build import build_model, cast_trained
from ..remembered import remembered
from ..units import choose, positive_int
from .layout import Layout


@dataclass(frozen=True)
class Adapters:
    """A method of peft, and in which 16 bits what is frozen lies and is computed.

    rank, targets, saved (`modules_to_save`): see `add_adapters`. The adapters are fp32, as peft makes them beside
    16-bit weights; FSDP2 gathers them in the 16 bits (MixedPrecisionPolicy, as accelerate sets it). trained: the type
    that they and what is saved are made first, see `Setting.trained_dtype`.
    """

    method: str
    rank: int = LORA_RANK
    targets: str | tuple[str, ...] = "attention"
    dtype: torch.dtype = torch.bfloat16
    saved: tuple[str, ...] = ()
    trained: str = ""

    def __post_init__(self) -> None:
        choose(self.method, PEFT, "peft")

    @property
    def module_names(self) -> tuple[str, ...]:
        """What they find modules by."""
        return module_names(self.targets, self.saved)

    @property
    def title(self) -> str:
        """The method, the rank and what it is put on, in one line."""
        name = {"lora": "LoRA", "qlora": "QLoRA"}[self.method]
        targets = self.targets if isinstance(self.targets, str) else ", ".join(self.targets)
        whole = f" + {', '.join(self.saved)}" if self.saved else ""
        return f"{name} (rank {self.rank}, {targets}{whole}) {str(self.dtype).removeprefix('torch.')}"

    def check(self, layout: Layout) -> None:
        """WrongValue for a layout in which a model with adapters is not split by FSDP2."""
        if layout.stage < 2 or layout.tensor_parallel > 1:
            raise WrongValue(
                tr(
                    ko=f"peft={self.method!r}: 어댑터를 단 모델은 텐서 병렬 없이 2단계나 3단계(FSDP2)로 나눈다. "
                    "나누지 않으려면 predict_memory로 센다.",
                    en=f"peft={self.method!r}: with adapters a model is split at stage 2 or 3 (FSDP2), without tensor "
                    "parallelism. Unsplit, predict_memory counts it.",
                )
            )

    def build(self, config: Any, gpu: VirtualGPU) -> torch.nn.Module:
        """The model on the meta device, frozen, with its adapters; 4-bit weights in 16-bit storage.

        Not upcast as peft's prepare_model_for_kbit_training does: what is gathered would be 16 bits again. What is
        trained whole accelerate makes fp32, but beside 4-bit weights (1.15, utils/fsdp_utils.py, fsdp2_prepare_model).
        NotSupported for a copy of an embedding that is the head too (`copies_tied_end`).
        """
        model = build_model(config, self.dtype)
        if copies_tied_end(model, self.saved):
            raise NotSupported(
                tr(
                    ko=f"modules_to_save={self.saved}: {config.model_type}의 출력층은 임베딩과 한 텐서라, 통째로 "
                    "학습하면서 FSDP2로 나눌 수 없다.",
                    en=f"modules_to_save={self.saved}: the head of this {config.model_type} is its embedding, which "
                    "FSDP2 cannot split while a copy of it is trained.",
                )
            )
        if self.method == "qlora":
            from ..models.quantized import quantize_linears

            quantize_linears(model, self.dtype, gpu, storage=self.dtype)
            model.is_loaded_in_4bit = True
        model = add_adapters(model, self.rank, self.targets, modules_to_save=self.saved)
        if self.method == "lora" or self.trained:
            cast_trained(model, torch.bfloat16 if self.trained == "bf16" and self.method != "lora" else torch.float32)
        return model


def adapters_of(
    peft: str | None,
    rank: int,
    targets: str | Sequence[str],
    precision: str,
    layout: Layout,
    spec: GPUSpec | None = None,
    saved: Sequence[str] = (),
    trained: str = "",
) -> Adapters | None:
    """The adapters that arguments name; None without any. WrongValue for a layout or precision they do not go with."""
    if peft is None:
        return None
    if precision != "mixed":
        raise WrongValue(
            tr(
                ko=f"precision={precision!r}: 어댑터는 얼린 16비트 가중치 위에서 'mixed'로 학습한다.",
                en=f"precision={precision!r}: adapters are trained over frozen 16-bit weights, in 'mixed'.",
            )
        )
    rank = positive_int(rank, "lora_rank")
    names = names_of_targets(targets)
    dtype = torch.bfloat16 if spec is None or spec.has_bf16 else torch.float16
    adapters = Adapters(peft, rank, names, dtype, tuple(sorted(saved)), trained)
    adapters.check(layout)
    return adapters


def unsplit_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """What dequantizes 4-bit weights: whole on every rank."""
    return [getattr(module, name) for module in model.modules() for name in getattr(module, "quantization_state", ())]


@dataclass(frozen=True)
class Shapes:
    """Of a model with adapters: ((rows, elements in a row), bytes of an element) → how many, and the unsplit bytes."""

    frozen: Counter
    trained: Counter
    unsplit: int

    def held(self, n: int) -> int:
        """What each of n ranks holds of the parameters, with FSDP2's padding, and the unsplit statistics."""
        return self.unsplit + sum(_padded(tensors, n) for tensors in (self.frozen, self.trained))

    def gradients(self, n: int) -> int:
        """Bytes of the adapters' gradients on each of n ranks, padded as the adapters are."""
        return _padded(self.trained, n)

    def state(self, n: int, rank: int) -> list[int]:
        """Bytes of AdamW's momentum, and of its variance, of each piece that a rank trains: in the piece's own type."""
        pieces = ((-(-rows // n), rows, rest * size) for ((rows, rest), size) in self.trained.elements())
        sizes = [min(max(rows - rank * piece, 0), piece) * row for piece, rows, row in pieces]
        return [size for size in sizes if size]

    def gathered(self, n: int, half: int) -> int:
        """Bytes of all parameters once they are gathered, in elements of at most `half` bytes."""
        return n * sum(
            -(-rows // n) * rest * count * min(size, half)
            for tensors in (self.frozen, self.trained)
            for ((rows, rest), size), count in tensors.items()
        )


def _padded(tensors: Counter, n: int) -> int:
    return sum(-(-rows // n) * rest * size * count for ((rows, rest), size), count in tensors.items())


def shapes_of(key: Any, adapters: Adapters) -> Shapes:
    """The shapes of a model, all layers built without values; key: a `ledger.ConfigKey`."""
    return _shapes(key, adapters)


@remembered
def _shapes(key: Any, adapters: Adapters) -> Shapes:
    model = adapters.build(key.config, VirtualGPU(CATALOG["H100"], limited=False))
    kinds: dict[bool, Counter] = {False: Counter(), True: Counter()}
    for p in model.parameters():
        kinds[p.requires_grad][(p.shape[0], math.prod(p.shape[1:])), p.itemsize] += 1
    unsplit = sum(t.numel() * t.itemsize for t in unsplit_tensors(model))
    return Shapes(kinds[False], kinds[True], unsplit)
