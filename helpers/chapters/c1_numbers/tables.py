"""Chapter 1's tables: the formats beside each other, and what models weigh in them."""

from __future__ import annotations

from typing import ClassVar

import torch

from virtual_gpu.cards import CATALOG
from virtual_gpu.drawing.labels import html_table
from virtual_gpu.language import tr
from virtual_gpu.models.adapters import linear_layers
from virtual_gpu.models.build import build_model, count_parameters
from virtual_gpu.models.configs import load_config

from .formats import FORMATS, NumberFormat


class FormatTable:
    """The formats beside each other: bits, range, smallest numbers, machine epsilon."""

    def __init__(self, formats: list[NumberFormat] | None = None):
        self.formats = formats or list(FORMATS.values())

    def _repr_html_(self) -> str:
        heads = [
            tr(ko="형식", en="format"),
            tr(ko="비트", en="bits"),
            tr(ko="지수", en="exponent"),
            tr(ko="가수", en="mantissa"),
            tr(ko="가장 큰 수", en="largest"),
            tr(ko="가장 작은 정규 수", en="smallest normal"),
            tr(ko="가장 작은 양수", en="smallest positive"),
            tr(ko="1 다음 수와의 간격", en="epsilon"),
        ]
        rows = [
            [f.name, str(f.bits), str(f.exponent_bits), str(f.mantissa_bits)]
            + [short(v) for v in (f.largest, f.smallest_normal, f.smallest, f.epsilon)]
            for f in self.formats
        ]
        info = torch.iinfo(torch.int8)
        rows.append(["int8", str(info.bits), "-", "-", str(info.max), "-", "1", "1"])
        return html_table(heads, rows)

    def __repr__(self) -> str:
        return "\n".join(f"{f.name}: {f.exponent_bits}+{f.mantissa_bits}, {short(f.largest)}" for f in self.formats)


def short(value: float) -> str:
    """A number with at most five significant digits."""
    return f"{value:.5g}"


class ModelSizes:
    """Bundled architectures and what their weights weigh in each format; ✓ where a T4 holds them.

    8 and 4 bits are those of the linear layers: embeddings, norms and the output head stay in 16 (bitsandbytes).
    """

    BITS: ClassVar = {"fp32": 32, "fp16": 16, "int8": 8, "NF4": 4.127}  # NF4 with double quantization, QLoRA section 3

    def __init__(self, model_ids: tuple[str, ...]):
        self.counts: dict[str, tuple[int, int]] = {}  # name → (all parameters, those of the linear layers' weights)
        for name in model_ids:
            model = build_model(load_config(name), torch.float16)
            linear = sum(layer.weight.numel() for layer in linear_layers(model).values())
            self.counts[name] = count_parameters(model), linear

    def nbytes(self, name: str, form: str) -> float:
        """Bytes of a model's weights in a format of `BITS`."""
        count, linear = self.counts[name]
        bits = self.BITS[form]
        return (linear * bits + (count - linear) * max(bits, 16)) / 8

    def _repr_html_(self) -> str:
        heads = [tr(ko="모델", en="model"), tr(ko="파라미터 수", en="parameters")]
        rest = tr(ko="임베딩과 출력층은 16비트", en="embeddings and head in 16 bits")
        heads += [name if bits >= 16 else f"{name} ({rest})" for name, bits in self.BITS.items()]
        capacity, rows = CATALOG["T4"].capacity_bytes, []
        for name, (count, _) in self.counts.items():
            sizes = [self.nbytes(name, form) for form in self.BITS]
            cells = (f"{size / 1e9:,.1f} GB {'✓' if size <= capacity else '✗'}" for size in sizes)
            rows.append([name.split("/")[-1], f"{count:,}", *cells])
        return html_table(heads, rows)

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {count:,}" for name, (count, _) in self.counts.items())
