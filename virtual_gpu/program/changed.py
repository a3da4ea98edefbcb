"""Changes of `virtual_gpu.changes` made in a program from outside, where it calls a library: `run --change NAME`.

Each is made as its lines say, and at the place where they would stand. How often its place was found is counted: a
program that builds its batches by hand has no loader to give a smaller one.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.utils.data import DataLoader

from ..errors import WrongValue
from ..language import tr
from ..models.fused_head import can_fuse_head, require_fused_head
from ..optional import require
from .imports import Imports
from .modules import NOWHERE
from .patches import Patches
from .watch import Watch

CAUSAL = "ForCausalLM"  # how transformers' classes end whose adapters are of the task CAUSAL_LM
_SIXTEEN = (torch.bfloat16, torch.float16, "bfloat16", "float16")


Changes = dict[str, int]  # name → how often its place was found


def not_found(changes: Changes) -> list[str]:
    """Of the changes that found no place, where they looked for one."""
    return [
        tr(
            ko=f"{name}: 바꿀 곳을 찾지 못했다. 찾는 곳: {tr(*_PLACES[name])}",
            en=f"{name}: nothing to change was found; looked for in: {tr(*_PLACES[name])}",
        )
        for name, times in changes.items()
        if not times
    ]


def check_changes(names: str | Iterable[str]) -> Changes:
    """The changes of these names, none of them made yet; WrongValue for an unknown one, ImportError for a library."""
    names = list(names) if isinstance(names, Iterable) and not isinstance(names, (str, bytes)) else [names]
    for name in names:
        if not isinstance(name, str) or name not in MADE:
            raise WrongValue(
                tr(
                    ko=f"change={name!r:.80}: {', '.join(MADE)} 가운데 하나여야 한다.",
                    en=f"change={name!r:.80}: must be one of {', '.join(MADE)}.",
                )
            )
        _require_libraries(name)
    return dict.fromkeys((name for name in MADE if name in names), 0)


def _require_libraries(name: str) -> None:
    require(*_NEEDS.get(name, ()))
    if name == "fused_head":
        require_fused_head()


def can_change(name: str) -> bool:
    """Whether the libraries that a change takes are here."""
    try:
        _require_libraries(name)
    except ImportError:
        return False
    return True


def install(patches: Patches, imports: Imports, watch: Watch, changes: Changes) -> None:
    """Make the changes wherever their places are found."""
    if "block_checkpointing" in changes:
        _checkpoint_blocks(patches, watch, changes)
    if "smaller_batch" in changes:
        _smaller_batch(patches, changes)
    for name in _OPTIMIZERS:
        if name in changes:
            _optimizer(patches, imports, changes, name)
    if "fused_head" in changes or "checkpointing" in changes:
        calls = _Calls(changes)
        if "fused_head" in changes:
            imports.after("transformers.modeling_utils", lambda module: calls.heads(patches, module.PreTrainedModel))
        imports.after("transformers.modeling_utils", lambda module: calls.of(patches, module.PreTrainedModel))
        imports.after("peft.peft_model", lambda module: calls.of(patches, module.PeftModel))
        imports.after("diffusers.models.modeling_utils", lambda module: calls.of(patches, module.ModelMixin))
    if "repeat_kv" in changes:
        imports.after("transformers.integrations.sdpa_attention", lambda module: _repeat_kv(patches, changes, module))
    if "sixteen_bits" in changes or "qlora" in changes or "lora" in changes:
        imports.after("transformers.modeling_utils", lambda module: _loading(patches, imports, changes, module))


# -- the batch ---------------------------------------------------------------------------------------------------------


def _smaller_batch(patches: Patches, changes: Changes) -> None:
    begin = DataLoader.__init__

    def __init__(loader: DataLoader, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any) -> None:
        if isinstance(batch_size, int) and batch_size > 1:
            changes["smaller_batch"] += 1
            batch_size = 1
        begin(loader, dataset, batch_size, *args, **kwargs)

    patches.set(DataLoader, "__init__", __init__)


# -- the optimizer -----------------------------------------------------------------------------------------------------


def _eight_bit(adam: Any, params: Any, settings: dict[str, Any]) -> Any:
    """bitsandbytes' optimizer of the same name; None where it has not what is asked for."""
    if settings.get("amsgrad") or settings.get("maximize"):
        return None
    from bitsandbytes import optim

    settings = {key: value for key, value in settings.items() if key not in _OF_PYTORCH}
    return getattr(optim, f"{adam.__name__}8bit")(params, **settings)


def _fused(adam: Any, params: Any, settings: dict[str, Any]) -> Any:
    return None if settings.get("fused") else adam(params, **{**settings, "foreach": None, "fused": True})


_OF_PYTORCH = ("amsgrad", "maximize", "foreach", "fused", "capturable", "differentiable")  # bitsandbytes has none
# change → (what makes the optimizer in a loop of one's own, its name in TrainingArguments)
_OPTIMIZERS = {"fused": (_fused, "adamw_torch_fused"), "eight_bit": (_eight_bit, "adamw_bnb_8bit")}


def _optimizer(patches: Patches, imports: Imports, changes: Changes, change: str) -> None:
    """PyTorch's Adam and AdamW make another one, and the Trainer chooses another one."""
    make, wanted = _OPTIMIZERS[change]
    on = [True]
    patches.later(on.clear)  # a module that is imported meanwhile may keep the class

    def instead_of(adam: Any) -> Any:
        def __new__(cls: Any, *args: Any, **settings: Any) -> Any:
            if cls is not replaced:  # a class made of this one is itself
                return object.__new__(cls)
            settings |= dict(zip(("params", "lr", "betas", "eps", "weight_decay", "amsgrad"), args, strict=False))
            params = settings.pop("params")
            made = make(adam, params, settings) if on else None
            if made is None:
                return adam(params, **settings)
            changes[change] += 1
            return made

        replaced = type(adam.__name__, (adam,), {"__new__": __new__, "__module__": adam.__module__})
        return replaced

    for name in ("Adam", "AdamW"):
        patches.set(torch.optim, name, instead_of(getattr(torch.optim, name)))

    def trainer(module: ModuleType) -> None:
        choose = module.Trainer.get_optimizer_cls_and_kwargs

        def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
            if args.optim in ("adamw_torch", "adamw_torch_fused") and args.optim != wanted:
                args = copy.copy(args)
                args.optim = type(args.optim)(wanted)
                changes[change] += 1
            return choose(args, model)

        patches.set(module.Trainer, "get_optimizer_cls_and_kwargs", staticmethod(get_optimizer_cls_and_kwargs))

    imports.after("transformers.trainer", trainer)


# -- the model's call --------------------------------------------------------------------------------------------------


class _Calls:
    """What is to happen when a model, or peft's wrapper of it, is called with gradients and not by another one."""

    def __init__(self, changes: Changes):
        self._changes = changes
        self._within = _Outermost()
        self._seen: WeakSet[nn.Module] = WeakSet()
        self._fused: WeakSet[nn.Module] = WeakSet()

    def heads(self, patches: Patches, kind: Any) -> None:
        """Each causal model that TRL's head fits gets it where it is made, before adapters and wrappers."""
        post_init = kind.post_init

        def with_head(model: Any) -> None:
            post_init(model)
            if type(model).__name__.endswith(CAUSAL) and can_fuse_head(model):
                from trl.trainer import add_fused_lm_head

                add_fused_lm_head(model)
                self._fused.add(model)

        patches.set(kind, "post_init", with_head)

    def of(self, patches: Patches, kind: Any) -> None:
        """Follow the calls of this class of models."""

        def __call__(model: Any, *args: Any, **kwargs: Any) -> Any:
            with self._within as outermost:
                if outermost and torch.is_grad_enabled():
                    self._begins(model, kwargs)
                return nn.Module.__call__(model, *args, **kwargs)

        patches.set(kind, "__call__", __call__)

    def _begins(self, model: Any, kwargs: dict[str, Any]) -> None:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        if "checkpointing" in self._changes and inner not in self._seen and is_trained(inner):
            self._seen.add(inner)
            if _checkpoint(model, inner):
                self._changes["checkpointing"] += 1
        if inner in self._fused and kwargs.get("labels") is not None and "fused_lm_head" not in kwargs:
            self._changes["fused_head"] += 1
            kwargs["fused_lm_head"] = True


def is_trained(model: nn.Module) -> bool:
    """Whether any of its parameters is."""
    return any(parameter.requires_grad for parameter in model.parameters())


def _checkpoint(model: Any, inner: Any) -> bool:
    """Turn checkpointing on, if the model has it and it is off."""
    if any(getattr(part, "gradient_checkpointing", False) for part in inner.modules()):
        return False
    if getattr(inner, "_supports_gradient_checkpointing", False):  # diffusers'
        inner.enable_gradient_checkpointing()
        return True
    if not getattr(inner, "supports_gradient_checkpointing", False):
        return False
    # the name of transformers 5.23, and the one before it
    enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
    enable()
    if model is not inner:
        inner.enable_input_require_grads()  # of reentrant checkpoints over frozen layers
    model.train()
    return True


def _checkpoint_blocks(patches: Patches, watch: Watch, changes: Changes) -> None:
    """Wrap the blocks of each model that is trained, when it is first called."""
    call, seen = nn.Module.__call__, WeakSet()

    def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and watch.modules.running is NOWHERE and module not in seen:
            seen.add(module)
            kind = kind_of_blocks(module)
            if kind is not None:
                apply_activation_checkpointing(module, _Recomputed, check_fn=lambda part: isinstance(part, kind))
                changes["block_checkpointing"] += 1
        return call(module, *args, **kwargs)

    patches.set(nn.Module, "__call__", __call__)


class _Recomputed(CheckpointWrapper):
    """A block within its checkpoint, under its own name: the program may have taken down those of its parameters."""

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        return self._checkpoint_wrapped_module.named_modules(memo, prefix, remove_duplicate)


def has_switch(module: nn.Module) -> bool:
    """Whether it can turn its own checkpoints on: a model of transformers or diffusers."""
    return any(hasattr(module, name) for name in ("gradient_checkpointing_enable", "enable_gradient_checkpointing"))


def kind_of_blocks(model: nn.Module) -> type | None:
    """The class of the largest row of like modules; None where there is none, or where blocks are recomputed already.

    Nor of a model that has checkpointing of its own to turn on.
    """
    best, most = None, 0
    for part in model.modules():
        if isinstance(part, CheckpointWrapper) or has_switch(part):
            return None
        if any(isinstance(block, _Recomputed) for block in part.children()):  # which `modules` does not show
            return None
        if not isinstance(part, (nn.ModuleList, nn.Sequential)) or len({type(block) for block in part}) != 1:
            continue
        size = sum(parameter.numel() for parameter in part.parameters() if parameter.requires_grad)
        if len(part) > 1 and any(part[0].children()) and size > most:
            best, most = type(part[0]), size
    return best


# -- attention ---------------------------------------------------------------------------------------------------------


def _repeat_kv(patches: Patches, changes: Changes, module: ModuleType) -> None:
    asked = module.use_gqa_in_sdpa

    def use_gqa_in_sdpa(*args: Any, **kwargs: Any) -> bool:
        if asked(*args, **kwargs):
            changes["repeat_kv"] = 1  # one place, however many layers come by
        return False

    patches.set(module, "use_gqa_in_sdpa", use_gqa_in_sdpa)


# -- the weights -------------------------------------------------------------------------------------------------------


def _loading(patches: Patches, imports: Imports, changes: Changes, module: ModuleType) -> None:
    load = module.PreTrainedModel.from_pretrained.__func__
    within, ours = _Outermost(), WeakSet()

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        with within as outermost:
            if not outermost:
                return load(cls, *args, **kwargs)
            causal, quantized = cls.__name__.endswith(CAUSAL), kwargs.get("quantization_config") is not None
            if "sixteen_bits" in changes and not quantized and _dtype_of(kwargs) not in _SIXTEEN:
                changes["sixteen_bits"] += 1
                kwargs.pop("torch_dtype", None)
                kwargs["dtype"] = torch.bfloat16
            if "qlora" in changes and causal and not quantized:
                changes["qlora"] += 1
                model = _in_four_bits(load, cls, args, kwargs)
            else:
                model = load(cls, *args, **kwargs)
            if "lora" in changes and causal:
                from peft import LoraConfig, get_peft_model

                changes["lora"] += 1
                model = get_peft_model(model, LoraConfig(r=8, task_type="CAUSAL_LM"))
                model.enable_input_require_grads()
                ours.add(model)
            return model

    def peft(module: ModuleType) -> None:
        wrap = module.get_peft_model

        def get_peft_model(model: Any, *args: Any, **kwargs: Any) -> Any:
            if model in ours:  # the program has adapters of its own, and keeps them
                ours.discard(model)
                changes["lora"] -= 1
                model = model.unload()
                model.disable_input_require_grads()
            return wrap(model, *args, **kwargs)

        patches.set(module, "get_peft_model", get_peft_model)

    patches.set(module.PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
    if "lora" in changes:
        imports.after("peft.mapping_func", peft)  # before `peft` takes it from there
        if hasattr(sys.modules.get("peft"), "get_peft_model"):  # not while it is being imported
            peft(sys.modules["peft"])


def _dtype_of(kwargs: dict[str, Any]) -> Any:
    return kwargs.get("dtype", kwargs.get("torch_dtype"))


def _in_four_bits(load: Callable[..., Any], cls: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    from peft import prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    four_bit = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
    )  # fmt: skip
    return prepare_model_for_kbit_training(load(cls, *args, **kwargs, quantization_config=four_bit))


class _Outermost(threading.local):
    """`with within as outermost:` — whether no other such block is open in this thread."""

    def __init__(self) -> None:
        self._depth = 0

    def __enter__(self) -> bool:
        self._depth += 1
        return self._depth == 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1


_CALLED = (
    "학습하는 transformers나 diffusers의 모델을 부르는 곳",
    "where a model of transformers or diffusers is called that is trained",
)
_MODELS = "transformers의 모델을 만드는 곳과 부르는 곳", "where transformers' models are made and called"
_LOADED = (
    "transformers의 from_pretrained(QLoRA와 LoRA는 …ForCausalLM의 것)",
    "transformers' from_pretrained (QLoRA and LoRA: that of …ForCausalLM)",
)
_ADAMS = "torch.optim.AdamW와 Adam, Trainer의 optim", "torch.optim.AdamW and Adam, and the Trainer's optim"
# Where each looks for its place, in the order in which they are told.
_PLACES = {
    "checkpointing": _CALLED,
    "block_checkpointing": (
        "같은 클래스의 블록이 늘어선 ModuleList나 Sequential(transformers와 diffusers의 모델은 checkpointing)",
        "a ModuleList or Sequential of blocks of one class (models of transformers and diffusers: checkpointing)",
    ),
    "repeat_kv": (
        "transformers의 sdpa 어텐션에서 키와 값의 헤드가 쿼리보다 적은 곳(4.54부터)",
        "transformers' sdpa attention with fewer heads of keys and values than of queries (4.54 and later)",
    ),
    "fused_head": _MODELS,
    "smaller_batch": ("1보다 큰 DataLoader의 batch_size", "a DataLoader's batch_size above 1"),
    "fused": _ADAMS,
    "eight_bit": _ADAMS,
    "sixteen_bits": _LOADED,
    "qlora": _LOADED,
    "lora": _LOADED,
}
MADE = tuple(_PLACES)
_NEEDS = {"eight_bit": ("bitsandbytes",), "qlora": ("peft", "bitsandbytes"), "lora": ("peft",), "fused_head": ("trl",)}
