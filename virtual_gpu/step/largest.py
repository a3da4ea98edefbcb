"""The largest batch, the longest sequence, the largest model that trains on a GPU: searched with predictions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..cards import card
from ..drawing.labels import html_table
from ..language import tr
from ..models.adapters import linear_layers
from ..models.build import build_model, count_parameters
from ..models.configs import architectures, cached_by_model, checkpoint_dtype, load_config
from ..models.depth import text_config
from ..real import GPU
from ..report import MemoryReport
from ..units import choose, human_bytes, positive_int
from .predict import predict_memory, predict_need
from .setting import Setting


def largest_fitting(
    name: str, *, multiple: int = 1, gpu: GPU | str, progress: Callable[[str], None] | None = None, **settings: Any
) -> int:
    """The largest `batch_size` or `sequence_length` (a multiple of `multiple`) that fits; 0 where not even the first.

    Tensors grow with either: the next guess at what fills the GPU lies where a straight line between the nearest known
    ones meets the capacity. From there downwards to the first for which the caching allocator finds room (it may fail
    at one and get through at a larger one), in steps of one, of 1/128 where there are more than 255. A length stops at
    the model's positions. progress: called with a line of text for each prediction.
    """
    name = choose(name, ("batch_size", "sequence_length"), tr(ko="설정", en="setting"))
    multiple = positive_int(multiple, "multiple")
    settings = {"batch_size": 1} | settings
    most = 2**17 // multiple
    if name == "sequence_length":
        config = load_config(settings.get("model_id", Setting.model_id))
        most = min(most, getattr(text_config(config), "max_position_embeddings", 2**17) // multiple)

    if not most:  # not even one multiple
        return 0

    def over(count: int) -> int:
        """Bytes of tensors beyond the capacity; negative where there is room."""
        report = predict(count)
        return report.needed_bytes - report.capacity_bytes

    @functools.cache
    def predict(count: int) -> MemoryReport:
        report = predict_memory(Setting(**{**settings, name: count * multiple}), gpu=gpu)
        if progress is not None:
            progress(f"{name} {count * multiple:,}: {human_bytes(report.needed_bytes)}")
        return report

    low, high, below, above = 0, 1, 0, 0
    while (above := over(high)) <= 0:
        low, below = high, above
        if low == most:
            break
        high = min(low * 4, most)
    while high - low > 1:
        guess = low + int((high - low) * -below / (above - below))
        guess = min(max(guess, low + 1), high - 1)
        need = over(guess)
        if need <= 0:  # after a guess that was right the next one is low + 1
            low, below = guess, need
        else:
            high, above = guess, need
    step = max(low // 128, 1)
    while low > 0 and not predict(low).fits:
        low -= step
    return max(low, 0) * multiple


@cached_by_model
def _parameters(model_id: str) -> tuple[int, int]:
    """(all parameters, those that QLoRA keeps in 4 bits)."""
    model = build_model(load_config(model_id), torch.float16)
    return count_parameters(model), sum(layer.weight.numel() for layer in linear_layers(model).values())


def largest_model(
    gpu: str, peft: str | None = None, *, progress: Callable[[str], None] | None = None, **settings: Any
) -> tuple[str, int, int] | None:
    """(hub id, parameters, bytes of the tensors) of the largest bundled model that trains on a GPU, or None.

    From the largest down. A model whose weights alone (with gradients and AdamW's state, if all of them are trained)
    exceed the GPU is passed over without a run. progress: called with a line of text for each model.
    """
    spec, told = card(gpu).needs_cuda(), progress or (lambda text: None)
    Setting(**{"batch_size": 1, **settings, "model_id": Setting.model_id, "peft": peft})  # before any model is built
    for name in sorted(architectures(), key=_parameters, reverse=True):
        setting = Setting(**{"batch_size": 1, **settings, "model_id": name, "peft": peft})
        if (held := _held_bytes(setting)) > spec.capacity_bytes:
            told(f"{name}: > {human_bytes(int(held))}")
            continue
        need = predict_need(setting, spec.compute_capability)
        told(f"{name}: {human_bytes(need.card)}")
        if need.card <= spec.capacity_bytes:
            return name, _parameters(name)[0], need.tensors
    return None


def of_pure_fp16(model_id: str, precision: str) -> bool:
    """Whether all that is trained and computed is fp16; "auto" is the checkpoint's type."""
    weights, computed = Setting(model_id=model_id, batch_size=1, precision=precision).dtypes
    if weights == "auto":
        weights = checkpoint_dtype(model_id, load_config(model_id))
    return weights == torch.float16 and computed is None


def _held_bytes(setting: Setting) -> float:
    """Bytes that are held whatever else is: weights and, where all are trained, gradients and AdamW's state."""
    total, in_four_bits = _parameters(setting.model_id)
    if setting.peft == "qlora":
        return in_four_bits / 2 + 4 * (total - in_four_bits)  # everything else is cast to fp32
    weight = 4 if setting.dtypes[0] == torch.float32 else 2
    if setting.load_in_8bit:
        return in_four_bits + (4 if setting.rest_in_fp32 else weight) * (total - in_four_bits)
    if setting.peft:
        return weight * total
    state = {"adamw": 2 * weight, "adamw_fused": 2 * weight, "adamw_8bit": 2}.get(setting.optimizer, 0)
    return (2 * weight + state) * total


class LargestModels:
    """The largest model that trains, for each GPU (rows) under full fine-tuning, LoRA and QLoRA (columns).

    progress: called with a line of text for each model that is looked at.
    """

    METHODS = (None, "lora", "qlora")

    def __init__(self, gpus: tuple[str, ...], *, progress: Callable[[str], None] | None = None, **settings: Any):
        def largest(gpu: str, peft: str | None) -> tuple[str, int, int] | None:
            told = progress and (lambda text: progress(f"{gpu}, {peft or 'full'}: {text}"))
            return largest_model(gpu, peft, progress=told, **settings)

        self.found = {gpu: [largest(gpu, peft) for peft in self.METHODS] for gpu in gpus}

    def _repr_html_(self) -> str:
        heads = ["GPU", tr(ko="전체 미세 조정", en="full fine-tuning"), "LoRA", "QLoRA"]
        return html_table(heads, [[gpu, *map(self._cell, row)] for gpu, row in self.found.items()])

    def __repr__(self) -> str:
        return "\n".join(f"{gpu}: {', '.join(map(self._cell, row))}" for gpu, row in self.found.items())

    @staticmethod
    def _cell(found: tuple[str, int, int] | None) -> str:
        if found is None:
            return "-"
        name, parameters, needed = found
        return f"{name.split('/')[-1]} ({parameters / 1e9:.2f}B, {human_bytes(needed)})"
