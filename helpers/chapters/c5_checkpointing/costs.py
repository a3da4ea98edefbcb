"""What checkpointing costs and saves in training on a virtual GPU, alone and beside accumulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.drawing.labels import html_table
from virtual_gpu.language import tr
from virtual_gpu.models.build import build_model, build_on_gpu
from virtual_gpu.models.configs import checkpoint_dtype, load_config
from virtual_gpu.room import FITS, TIGHT, TOO_MUCH
from virtual_gpu.step.flops import count_flops, training_flops
from virtual_gpu.step.optimizers import make_optimizer
from virtual_gpu.step.run import set_checkpointing
from virtual_gpu.step.setting import Setting
from virtual_gpu.step.splits import Combination
from virtual_gpu.trace.timeline import Timeline
from virtual_gpu.units import human_bytes

from ...experiment import predict_memory, splits
from ...training import train_model
from ...watched import telling
from .steps import Step, StepTable, checkpoint_modules

# -- any model -----------------------------------------------------------------------------------------------------


def step_timeline(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], card: str = "T4", optimizer: str = "adamw"
) -> Timeline:
    """Two training steps of any model whose output has a loss, on a virtual card without a limit."""
    gpu = VirtualGPU(CATALOG[card], limited=False)
    model, inputs = gpu.place(model).train(), gpu.place(inputs)
    optimizer = make_optimizer(optimizer, model)
    with gpu.record(model, optimizer) as record:
        for _ in range(2):
            with record.phase("forward"):
                loss = model(**inputs).loss
            with record.phase("backward"):
                loss.backward()
            with record.phase("step"):
                optimizer.step()
            optimizer.zero_grad()
            del loss
    return record.timeline()


def compare_models(inputs: Mapping[str, torch.Tensor], models: Mapping[str, Callable[[], nn.Module]]) -> StepTable:
    """As `compare_steps`, of models that each function makes, with fused AdamW on a virtual T4 without a limit.

    Held are the activations at the end of the first forward; the peak is that of all memory; there are no gradients.
    """
    table = StepTable()
    with telling() as told:
        for number, (name, make) in enumerate(models.items(), 1):
            told(f"{number}/{len(models)}: {name}")
            timeline = step_timeline(make(), inputs, optimizer="adamw_fused")
            held = timeline.at_end(0)["activations"]
            table[name] = Step(name, held, timeline.peak_bytes, count_flops(make().train(), inputs).total)
    return table


def compare_checkpointing(
    model_id: str, batch_size: int, ways: Mapping[str, Mapping[str, Any] | None], sequence_length: int = 256
) -> StepTable:
    """`compare_models` of one fp16 model: a way names arguments of `checkpoint_layers`, None is no checkpointing."""

    def make(way: Mapping[str, Any] | None) -> nn.Module:
        model = build_model(load_config(model_id), torch.float16)
        model.config.use_cache = False
        return model if way is None else checkpoint_layers(model, **way)

    ids = torch.zeros(batch_size, sequence_length, dtype=torch.int64)
    return compare_models({"input_ids": ids, "labels": ids}, {name: partial(make, way) for name, way in ways.items()})


def checkpoint_layers(model: nn.Module, every_n_layers: int = 1, **kwargs: Any) -> nn.Module:
    """transformers' `activation_checkpointing_enable`, with its `every_n_layers` before 5.23 as well.

    kwargs: of torch.utils.checkpoint.checkpoint, such as context_fn.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, **kwargs})
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number % every_n_layers == 0
    return model


# -- what is saved -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saving:
    """One model without (first) and with checkpointing (second): activations after forward, peak of all, FLOPs."""

    activations: tuple[int, int]
    peak: tuple[int, int]
    flops: tuple[int, int]

    @property
    def extra(self) -> float:
        """The FLOPs that checkpointing adds, as a share of those without."""
        return self.flops[1] / self.flops[0] - 1


class SavingTable(dict):
    """name → `Saving`, as a table."""

    def _repr_html_(self) -> str:
        more, saved = tr(ko="체크포인팅", en="checkpointing"), tr(ko="줄어든 비율", en="saved")
        heads = [tr(ko="모델", en="model"), tr(ko="순전파 상태", en="activations"), more, saved]
        heads += [tr(ko="전체 최대", en="peak of all"), more, saved, tr(ko="추가 연산", en="extra work")]
        rows = []
        for name, one in self.items():
            row = [name]
            for plain, less in (one.activations, one.peak):
                row += [human_bytes(plain), human_bytes(less), f"{1 - less / plain:.0%}"]
            rows.append([*row, f"{one.extra:+.1%}"])
        return html_table(heads, rows)

    def __repr__(self) -> str:
        return "\n".join(
            f"{name}: {1 - one.activations[1] / one.activations[0]:.0%}, {1 - one.peak[1] / one.peak[0]:.0%}, "
            f"{one.extra:+.1%}"
            for name, one in self.items()
        )


def _resnet(checkpointing: bool) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification
    from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer

    with torch.device("meta"):
        model = ResNetForImageClassification(ResNetConfig()).train()
    return checkpoint_modules(model, ResNetBottleNeckLayer) if checkpointing else model


def _vit(checkpointing: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    with torch.device("meta"):
        model = ViTForImageClassification(ViTConfig(image_size=IMAGES["ViT-Base"][1])).train()
    return set_checkpointing(model, checkpointing)


IMAGES = {"ResNet-50": (_resnet, 512), "ViT-Base": (_vit, 768)}  # name → a function that makes it, pixels a side
BATCH, LENGTH, CARD = 8, 1024, "A100-80GB"


def savings(*names: str) -> SavingTable:
    """Models by name, each without and with checkpointing: 8 images in fp32, or 8 × 1,024 tokens as the weights are.

    With AdamW, on an A100: there fused kernels of attention serve grouped heads as well.
    """
    table = SavingTable()
    with telling() as told:
        for number, name in enumerate(names, 1):
            told(f"{number}/{len(names)}: {name}")
            timelines, flops = zip(*(_run(name, on) for on in (False, True)), strict=True)
            activations = tuple(timeline.at_end(0)["activations"] for timeline in timelines)
            table[name] = Saving(activations, tuple(timeline.peak_bytes for timeline in timelines), flops)
    return table


def _run(name: str, checkpointing: bool) -> tuple[Timeline, int]:
    if name in IMAGES:
        make, side = IMAGES[name]
        pixels = torch.empty(BATCH, 3, side, side, device="meta")
        inputs = {"pixel_values": pixels, "labels": torch.zeros(BATCH, dtype=torch.long)}
        return step_timeline(make(checkpointing), inputs, CARD), count_flops(make(checkpointing), inputs).total
    setting = Setting(BATCH, gradient_checkpointing=checkpointing, model_id=name, sequence_length=LENGTH)
    return predict_memory(setting, gpu=CARD).timeline, training_flops(setting).total


def printed_after_step(use_cache: bool, gradient_checkpointing: bool, batch_size: int = 16) -> tuple[int, int]:
    """(bytes allocated right after the first step, peak) of the book's experiment on a virtual GPU without a limit."""
    gpu = VirtualGPU(CATALOG["T4"], limited=False)
    setting = Setting(batch_size)
    config = load_config(setting.model_id)
    model = build_on_gpu(config, checkpoint_dtype(setting.model_id, config), setting.attention, None, gpu)
    ids = torch.zeros(setting.sequence_length, dtype=torch.int64)
    arguments = SimpleNamespace(
        per_device_train_batch_size=batch_size,
        gradient_checkpointing=gradient_checkpointing,
        max_steps=2,
        optim="adamw",
        use_cache=use_cache,
        holds_outputs=True,
    )
    with redirect_stdout(StringIO()):
        log = train_model(model, [{"input_ids": ids, "labels": ids}] * (2 * batch_size), arguments)
    return log.allocated_bytes, log.timeline.peak_bytes


# -- beside accumulation -------------------------------------------------------------------------------------------


class Levers(list):
    """Every `Combination` that makes one batch, as a table with the one to choose."""

    @property
    def best(self) -> Combination | None:
        """What has room with the least work; among equals the largest micro-batch. None where nothing has room."""
        roomy = (c for c in self if c.report.judgement == FITS)
        return min(roomy, key=lambda c: (c.flops, -c.micro_batch), default=None)

    def _repr_html_(self) -> str:
        heads = [
            tr(ko="마이크로 배치", en="micro-batch"),
            tr(ko="누적", en="accumulation"),
            tr(ko="체크포인팅", en="checkpointing"),
            tr(ko="필요한 메모리", en="memory"),
            tr(ko="결과", en="verdict"),
            tr(ko="추가 연산", en="extra work"),
            "",
        ]
        least, best = min(c.flops for c in self), self.best
        said = {FITS: tr(ko="들어간다", en="fits"), TIGHT: tr(ko="빠듯하다", en="tight")}
        said[TOO_MUCH] = tr(ko="메모리 부족", en="out of memory")
        rows = [
            [
                str(c.micro_batch),
                str(c.steps),
                tr(ko="켬", en="on") if c.checkpointing else tr(ko="끔", en="off"),
                human_bytes(c.needed_bytes),
                said[c.report.judgement],
                f"{c.flops / least - 1:+.1%}" if c.flops > 1.0005 * least else "0",
                tr(ko="← 고른다", en="← choose") if c is best else "",
            ]
            for c in self
        ]
        return html_table(heads, rows)

    def __repr__(self) -> str:
        return "\n".join(map(str, list(self)))


def both_levers(batch: int, *, gpu: str | None = None, **settings: Any) -> Levers:
    """`splits` of a batch, each without and with checkpointing."""
    off, on = (splits(batch, gpu=gpu, gradient_checkpointing=on, **settings) for on in (False, True))
    return Levers(way for pair in zip(off, on, strict=True) for way in pair)
