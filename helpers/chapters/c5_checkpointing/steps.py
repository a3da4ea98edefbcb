"""One real step on the CPU, as `checkpoint` wraps it or not: bytes held, the peak, extra FLOPs, the gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from virtual_gpu.drawing.labels import html_table
from virtual_gpu.interrupts import Releases
from virtual_gpu.language import tr
from virtual_gpu.units import human_bytes, with_parameters

from ...charts import Chart
from .charts import tradeoff_chart


def _attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(*shapes: Any, **_: Any) -> int:
    return sdpa_backward_flop_count(*shapes[:4])  # of the gradient, query, key, value


# FlopCounterMode knows the attention kernels of CUDA, not the CPU's, which multiplies the same matrices.
_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of what operations make, from birth to death; what was there before does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, tuple[int, Any]] = {}  # storage address → (its bytes, what watches it)
        self._releases = Releases(self._free)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self._releases.settle()
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in given or key in self._known:
                continue
            self._known[key] = size, self._releases.watch(storage, key)
            self.live += size
            self.peak = max(self.peak, self.live)
        return out

    def _free(self, key: int) -> None:
        self.live -= self._known.pop(key)[0]


@dataclass
class Step:
    """One forward and backward: bytes held after forward, the most held, FLOPs, and the parameters' gradients."""

    name: str
    held_bytes: int
    peak_bytes: int
    flops: int
    gradients: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    difference: float = 0.0  # from the first step's gradients, the largest absolute one

    def __repr__(self) -> str:
        held, peak = human_bytes(self.held_bytes), human_bytes(self.peak_bytes)
        return f"{self.name}: " + tr(ko=f"순전파 뒤 {held}, 최대 {peak}", en=f"{held} after forward, peak {peak}")


class StepTable(dict):
    """name → `Step`; as a table it compares all with the first, `chart()` draws bytes over extra FLOPs."""

    def extra(self, name: str) -> float:
        """The FLOPs that a step has more than the first, as a share of the first's."""
        return self[name].flops / next(iter(self.values())).flops - 1

    def chart(self) -> Chart:
        """What each step holds after forward over its extra FLOPs, and the line of those that none beats in both."""
        return tradeoff_chart([(name, self.extra(name), step.held_bytes) for name, step in self.items()])

    def _repr_html_(self) -> str:
        first = next(iter(self.values()))
        heads = [
            "",
            tr(ko="순전파 뒤에 남은 것", en="held after forward"),
            tr(ko="최대", en="peak"),
            tr(ko="추가 연산", en="extra work"),
        ]
        rows = [
            [
                step.name,
                human_bytes(step.held_bytes),
                human_bytes(step.peak_bytes),
                "-" if step is first else f"{self.extra(step.name):+.1%}",
            ]
            for step in self.values()
        ]
        if first.gradients:
            heads.append(tr(ko="그레이디언트의 차이", en="gradients differ by"))
            for row, step in zip(rows, self.values(), strict=True):
                row.append("-" if step is first else _differs(step.difference))
        return html_table(heads, rows)

    def __repr__(self) -> str:
        return "\n".join(map(str, self.values()))


NOISE = 1e-6  # below it CPUs round otherwise


def _differs(difference: float) -> str:
    if not difference:
        return "0"
    return tr(ko=f"{NOISE:.0e} 미만", en=f"below {NOISE:.0e}") if difference < NOISE else f"{difference:.0e}"


def compare_steps(model: nn.Module, **steps: Callable[[], torch.Tensor]) -> StepTable:
    """Run each step (a function that returns the loss) forward and backward on the same weights and the same seed.

    Bytes are those of the tensors that PyTorch's operations make, the parameters not among them. Gradients and buffers
    are put back afterwards. ValueError where a step's loss has no gradient, or the model no parameter.
    """
    if not any(p.requires_grad for p in with_parameters(model).parameters()):
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
    with torch.random.fork_rng(devices=[]), FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter:
        step().backward()  # once more: the counter's own hooks would hold tensors
    return Step(name, held, meter.peak, counter.get_total_flops(), gradients)


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
