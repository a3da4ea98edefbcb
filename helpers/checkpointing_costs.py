"""What checkpointing costs and saves: a real step on the CPU, a model's FLOPs, what fits a GPU, both levers at once."""

from __future__ import annotations

import copy
import tempfile
import weakref
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import lru_cache, partial
from io import StringIO
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from .experiment import Setting, predict_memory
from .gpu_catalog import CATALOG
from .language import tr
from .models import build_model, build_on_gpu, checkpoint_dtype, load_config
from .report import html_table
from .timeline import Timeline
from .training import disable_checkpointing, enable_checkpointing, make_optimizer, train_model
from .units import choose, human_bytes, positive_int
from .virtual_gpu import VirtualGPU

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


def set_checkpointing(model: Any, on: bool) -> Any:
    """Switch a transformers model's checkpointing on or off, and return the model."""
    (enable_checkpointing if on else disable_checkpointing)(model)
    return model


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


# -- FLOPs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of the matrix products (attention among them) of one forward and one backward."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward

    def __repr__(self) -> str:
        return f"Flops(forward={self.forward / 1e12:.3f} T, backward={self.backward / 1e12:.3f} T)"


def count_flops(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Flops:
    """The FLOPs of `model(**inputs).loss` and its backward, counted by PyTorch's FlopCounterMode on a virtual GPU."""
    gpu = VirtualGPU(CATALOG["A100-80GB"], limited=False)
    model, inputs = gpu.place(model), gpu.place(inputs)
    with FlopCounterMode(display=False) as counter, gpu:
        loss = model(**inputs).loss
        forward = counter.get_total_flops()
        loss.backward()
    return Flops(forward, counter.get_total_flops() - forward)


def training_flops(setting: Setting | None = None, **settings: Any) -> Flops:
    """The FLOPs of one micro-batch of the experiment's setting. They are linear in depth: run at 2 and 3 layers.

    Where a model's layers are of several kinds, all of them are run.
    """
    setting = setting or Setting(**settings)
    return _training_flops(
        setting.model_id, setting.batch_size, setting.sequence_length, setting.gradient_checkpointing
    )


@lru_cache(maxsize=512)
def _training_flops(model_id: str, batch_size: int, sequence_length: int, checkpointing: bool) -> Flops:
    config = load_config(model_id)
    depth = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["layer"]
    if len(set(kinds)) > 1 or depth <= 3:
        return flops_of_config(config, batch_size, sequence_length, checkpointing)
    runs = []
    for layers in (2, 3):
        shallow = copy.deepcopy(config)
        shallow.num_hidden_layers = layers
        if getattr(shallow, "layer_types", None):
            shallow.layer_types = shallow.layer_types[:layers]
        runs.append(flops_of_config(shallow, batch_size, sequence_length, checkpointing))
    two, three = runs
    more = depth - 2
    return Flops(
        two.forward + more * (three.forward - two.forward), two.backward + more * (three.backward - two.backward)
    )


def flops_of_config(config: Any, batch_size: int, sequence_length: int, checkpointing: bool) -> Flops:
    """The FLOPs of one micro-batch with every layer run, under whatever `set_checkpoint_early_stop` says."""
    model = set_checkpointing(build_model(config, torch.float16).train(), checkpointing)
    model.config.use_cache = False
    ids = torch.zeros(batch_size, sequence_length, dtype=torch.int64)
    return count_flops(model, {"input_ids": ids, "labels": ids})


# -- memory --------------------------------------------------------------------------------------------------------


def largest_fitting(name: str, *, multiple: int = 1, gpu: str | None = None, **settings: Any) -> int:
    """The largest `batch_size` or `sequence_length` (a multiple of `multiple`) that fits; 0 where not even the first.

    Memory grows with either. The next guess lies where a straight line between the nearest known ones meets the
    capacity. A length stops at the model's positions.
    """
    name = choose(name, ("batch_size", "sequence_length"), tr(ko="설정", en="setting"))
    multiple = positive_int(multiple, "multiple")
    settings = {"batch_size": 1} | settings
    most = 2**17 // multiple
    if name == "sequence_length":
        config = load_config(settings.get("model_id", Setting.model_id))
        most = min(most, getattr(config, "max_position_embeddings", 2**17) // multiple)

    def over(count: int) -> int:
        """Bytes beyond the capacity; negative where it fits."""
        report = predict_memory(Setting(**{**settings, name: count * multiple}), gpu=gpu)
        return report.needed_bytes - report.capacity_bytes

    low, high, below, above = 0, 1, 0, 0
    while (above := over(high)) <= 0:
        low, below = high, above
        if low == most:
            return low * multiple
        high = min(low * 4, most)
    while high - low > 1:
        guess = low + int((high - low) * -below / (above - below))
        guess = min(max(guess, low + 1), high - 1)
        need = over(guess)
        if need <= 0:
            low, below = guess, need
            if high - low > 1 and (need := over(low + 1)) > 0:  # a good guess is right at once
                high, above = low + 1, need
            elif high - low > 1:
                low, below = low + 1, need
        else:
            high, above = guess, need
    return low * multiple


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


@dataclass(frozen=True)
class Combination:
    """One way to make a batch: its micro-batch, how many of them, checkpointing or not; memory and FLOPs."""

    micro_batch: int
    steps: int
    checkpointing: bool
    needed_bytes: int
    fits: bool
    flops: int


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
    """Every split of `batch` into equal micro-batches, with and without checkpointing: memory predicted, FLOPs counted.

    Memory is predicted with at most two micro-batches a step: from the second on each finds the same gradients there.
    """
    batch = positive_int(batch, "batch")
    levers = Levers()
    for steps in (s for s in range(1, batch + 1) if batch % s == 0):
        for checkpointing in (False, True):
            micro = {**settings, "batch_size": batch // steps, "gradient_checkpointing": checkpointing}
            report = predict_memory(Setting(**micro, gradient_accumulation_steps=min(steps, 2)), gpu=gpu)
            flops = steps * training_flops(**micro).total
            levers.append(Combination(batch // steps, steps, checkpointing, report.needed_bytes, report.fits, flops))
    return levers


# -- transformers' Trainer -----------------------------------------------------------------------------------------


def trainer_arguments(folder: str, gradient_checkpointing: bool = False, **settings: Any) -> Any:
    """TrainingArguments for a short silent run on the CPU; checkpointing under whichever name transformers has for it.

    `gradient_checkpointing` is called `activation_checkpointing` since transformers 5.23.
    """
    from transformers import TrainingArguments

    known = TrainingArguments.__dataclass_fields__
    prefix = "activation" if "activation_checkpointing" in known else "gradient"
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    return TrainingArguments(
        folder,
        **quiet,
        use_cpu=True,
        dataloader_pin_memory=False,
        **{f"{prefix}_checkpointing": gradient_checkpointing},
        **{f"{prefix}_checkpointing_kwargs": {"use_reentrant": False}},
        **settings,
    )


def train_with_trainer(model: nn.Module, dataset: Any, **settings: Any) -> nn.Module:
    """Train with transformers' Trainer in a folder that is gone afterwards, printing nothing."""
    from transformers import PrinterCallback, Trainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, trainer_arguments(folder, **settings), train_dataset=dataset)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return model


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    """The largest absolute difference between the parameters of two models of one architecture."""
    with torch.no_grad():
        return max(float((p - q).abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))
