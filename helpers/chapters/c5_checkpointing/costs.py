"""What checkpointing costs and saves: a real step on the CPU, training on a virtual GPU, both levers at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.drawing.labels import html_table
from virtual_gpu.language import tr
from virtual_gpu.models.build import build_on_gpu
from virtual_gpu.models.configs import checkpoint_dtype, load_config
from virtual_gpu.step.optimizers import make_optimizer
from virtual_gpu.step.setting import Setting
from virtual_gpu.step.splits import Combination
from virtual_gpu.trace.timeline import Timeline
from virtual_gpu.units import human_bytes

from ...experiment import splits
from ...training import train_model

# -- one step of a real model on the CPU ---------------------------------------------------------------------------


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of what operations make, from birth to death; what was there before does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in given or key in self._known:
                continue
            self._known[key] = weakref.ref(storage, partial(self._free, key, size))
            self.live += size
            self.peak = max(self.peak, self.live)
        return out

    def _free(self, key: int, size: int, _: Any) -> None:
        del self._known[key]
        self.live -= size


@dataclass
class Step:
    """One forward and backward: bytes held after forward, the most held, and the gradients of the parameters."""

    name: str
    held_bytes: int
    peak_bytes: int
    gradients: dict[str, torch.Tensor] = field(repr=False)
    difference: float = 0.0  # from the first step's gradients, the largest absolute one

    def __repr__(self) -> str:
        held, peak = human_bytes(self.held_bytes), human_bytes(self.peak_bytes)
        return f"{self.name}: " + tr(ko=f"순전파 뒤 {held}, 최대 {peak}", en=f"{held} after forward, peak {peak}")


class StepTable(dict):
    """name → `Step`; as a table it compares all with the first."""

    def _repr_html_(self) -> str:
        first = next(iter(self.values()))
        heads = [
            "",
            tr(ko="순전파 뒤에 남은 것", en="held after forward"),
            tr(ko="최대", en="peak"),
            tr(ko="줄어든 비율", en="saved"),
            tr(ko="그레이디언트의 차이", en="gradients differ by"),
        ]
        rows = [
            [
                step.name,
                human_bytes(step.held_bytes),
                human_bytes(step.peak_bytes),
                "-" if step is first else f"{1 - step.held_bytes / first.held_bytes:.0%}",
                "-" if step is first else f"{step.difference:.0e}" if step.difference else "0",
            ]
            for step in self.values()
        ]
        return html_table(heads, rows)

    def __repr__(self) -> str:
        return "\n".join(map(str, self.values()))


def compare_steps(model: nn.Module, **steps: Callable[[], torch.Tensor]) -> StepTable:
    """Run each step (a function that returns the loss) forward and backward on the same weights and the same seed.

    Bytes are those of the tensors that PyTorch's operations make, the parameters not among them. Gradients and buffers
    are put back afterwards. ValueError where a step's loss has no gradient, or the model no parameter.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            tr(
                ko=f"{type(model).__name__}: 학습할 파라미터가 없어 비교할 그레이디언트가 없다.",
                en=f"{type(model).__name__} has no trainable parameter: there are no gradients to compare.",
            )
        )
    table = StepTable()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, step in steps.items():
        try:
            table[name] = _run_step(name, step, model)
        finally:
            model.zero_grad(set_to_none=True)
            with torch.no_grad():
                for key, buffer in model.named_buffers():
                    buffer.copy_(buffers[key])
        first = next(iter(table.values())).gradients
        table[name].difference = max(
            float((gradient - first[key]).abs().max()) for key, gradient in table[name].gradients.items()
        )
    return table


def _run_step(name: str, step: Callable[[], torch.Tensor], model: nn.Module) -> Step:
    model.zero_grad(set_to_none=True)
    with torch.random.fork_rng(devices=[]), _LiveBytes() as meter:
        torch.manual_seed(0)
        loss = step()
        held = meter.live
        if not loss.requires_grad:
            raise ValueError(
                tr(
                    ko=f"{name}: 손실에 grad_fn이 없어 역전파할 수 없다. 감싼 함수의 입력에 requires_grad=True인 것이 "
                    "없다면 use_reentrant=False를 쓴다.",
                    en=f"{name}: the loss has no grad_fn. Where no input requires a gradient, use_reentrant must be "
                    "False.",
                )
            )
        loss.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    return Step(name, held, meter.peak, gradients)


def checkpoint_modules(model: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> nn.Module:
    """Checkpoint every module of that kind in place, while it trains; for models that do not support it themselves."""
    found = [module for module in model.modules() if isinstance(module, kind)]
    if not found:
        names = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        raise ValueError(
            tr(
                ko=f"체크포인트할 모듈이 없다. 이 모델의 모듈: {names}",
                en=f"No module of that kind. This model is made of: {names}",
            )
        )
    for module in found:
        module.forward = partial(_forward, module, module.forward)
    return model


def _forward(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


# -- memory --------------------------------------------------------------------------------------------------------


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


def step_timeline(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Timeline:
    """Two training steps of any model whose output has a loss, with AdamW, on a virtual T4 without a limit."""
    gpu = VirtualGPU(CATALOG["T4"], limited=False)
    model, inputs = gpu.place(model).train(), gpu.place(inputs)
    optimizer = make_optimizer("adamw", model)
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


class SavingTable(dict):
    """name → (timeline without, timeline with checkpointing): what is saved of the activations, and of the peak."""

    def _repr_html_(self) -> str:
        heads = [
            tr(ko="모델", en="model"),
            tr(ko="순전파 상태", en="activations"),
            tr(ko="체크포인팅", en="checkpointing"),
            tr(ko="줄어든 비율", en="saved"),
            tr(ko="전체 최대", en="peak of all"),
            tr(ko="체크포인팅", en="checkpointing"),
            tr(ko="줄어든 비율", en="saved"),
        ]
        rows = []
        for name, pair in self.items():
            row = [name]
            for plain, less in (
                [timeline.at_end(0)["activations"] for timeline in pair],
                [timeline.peak_bytes for timeline in pair],
            ):
                row += [human_bytes(plain), human_bytes(less), f"{1 - less / plain:.0%}"]
            rows.append(row)
        return html_table(heads, rows)

    def __repr__(self) -> str:
        return ", ".join(self)


# -- both levers ---------------------------------------------------------------------------------------------------


class Levers(list):
    """Every `Combination` that makes one batch, as a table with the one to choose."""

    @property
    def best(self) -> Combination | None:
        """What fits with the least work; among equals the largest micro-batch. None where nothing fits."""
        return min((c for c in self if c.fits), key=lambda c: (c.flops, -c.micro_batch), default=None)

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
        rows = [
            [
                str(c.micro_batch),
                str(c.steps),
                tr(ko="켬", en="on") if c.checkpointing else tr(ko="끔", en="off"),
                human_bytes(c.needed_bytes),
                tr(ko="들어간다", en="fits") if c.fits else tr(ko="메모리 부족", en="out of memory"),
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
