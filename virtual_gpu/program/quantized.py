"""bitsandbytes' layers on a virtual GPU: what they hold (4 and 8 bits), and what they allocate while they compute.

Libraries know a quantized weight by the name of its class (`Params4bit`), and a fake tensor has no class of its own:
where they ask, `data` and `install` answer.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..rules.active import in_force
from ..rules.bitsandbytes import BLOCK, Int8Product, compute_bias, int8_rows, product, product_backward
from .imports import Imports
from .patches import Patches


def install(patches: Patches, imports: Imports) -> None:
    """Let peft dequantize 4-bit weights, as DoRA does in each forward, and accelerate's FSDP2 know them."""

    def in_peft(module: ModuleType) -> None:
        of_module, of_weight = module.dequantize_module_weight, module.dequantize_bnb_weight

        def dequantize_module_weight(layer: nn.Module) -> torch.Tensor:
            return dequantize_bnb_weight(layer.weight) if _is_4bit(layer.weight) else of_module(layer)

        def dequantize_bnb_weight(weight: torch.Tensor, state: Any = None) -> torch.Tensor:
            if not _is_4bit(weight):
                return of_weight(weight, state)
            return sys.modules["bitsandbytes"].functional.dequantize_4bit(weight.data, weight.quant_state)

        for ours in (dequantize_module_weight, dequantize_bnb_weight):
            _in_package(patches, module, ours)

    def in_accelerate(module: ModuleType) -> None:
        prepare = getattr(module, "fsdp2_prepare_model", None)
        if prepare is None:  # before accelerate 1.6
            return

        def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
            with _by_their_names(model):
                return prepare(accelerator, model)

        _in_package(patches, module, fsdp2_prepare_model)

    def in_bitsandbytes(module: ModuleType) -> None:
        as_dict = module.QuantState.as_dict

        def of_state(state: Any, packed: bool = False) -> dict[str, Any]:
            if type(state.absmax) is not FakeTensor:
                return as_dict(state, packed)
            return {str(number): tensor for number, tensor in enumerate(_tensors(state))}  # without its numbers' text

        patches.set(module.QuantState, "as_dict", of_state)
        patches.set(module, "lib", _Library(module.lib))

    def in_layers(module: ModuleType) -> None:
        for kind in (module.Linear4bit, module.Linear8bitLt):
            patches.set(kind, "_apply", _quantizing(kind._apply, (module.Params4bit, module.Int8Params)))

    imports.after("bitsandbytes.nn.modules", in_layers)
    imports.after("peft.utils.integrations", in_peft)
    imports.after("accelerate.utils.fsdp_utils", in_accelerate)
    imports.after("bitsandbytes.functional", in_bitsandbytes)


def _in_package(patches: Patches, module: ModuleType, ours: Callable[..., Any]) -> None:
    """Replace a function wherever its package has it; what is imported later binds ours, for as long as it stands."""
    theirs, package = getattr(module, ours.__name__), module.__name__.partition(".")[0]
    for holder in [one for name, one in sys.modules.items() if name.partition(".")[0] == package]:
        if vars(holder).get(ours.__name__) is theirs:
            patches.set(holder, ours.__name__, ours)


# What a 4-bit weight is, on a card or in the RAM, for as long as somebody looks at its class: accelerate leaves those
# in bytes whole on each rank, makes nothing fp32 that is trained beside them, and takes none to the meta device (1.15,
# utils/fsdp_utils.py).
_CALLED_SO = {kind: type("Params4bit", (kind,), {}) for kind in (FakeTensor, nn.Parameter)}


@contextmanager
def _by_their_names(model: nn.Module) -> Iterator[None]:
    """Inside, a walk over the model's parameters by name finds 4-bit ones of that class, each while it is looked at."""
    walk = model.named_parameters

    def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in walk(*args, **kwargs):
            kind = type(parameter)
            if _is_4bit(parameter):
                parameter.__class__ = _CALLED_SO.get(kind, kind)  # bitsandbytes' own is called so anyway
            try:
                yield name, parameter
            finally:
                if type(parameter) is not kind:
                    parameter.__class__ = kind

    model.named_parameters = named_parameters
    try:
        yield
    finally:
        del model.named_parameters


class _Library:
    """bitsandbytes' native library, with the kernels for CUDA that a CPU's lacks, for who calls them by themselves.

    They write at the addresses that they get, and allocate nothing (csrc/ops.cu, 0.50): here they do nothing. A library
    that is there has C functions, by which others know it (`restype`).
    """

    def __init__(self, library: Any):
        self._library = library

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name, None)  # of a kernel that it lacks, a function that raises
        return _Kernel() if found is None or (callable(found) and not hasattr(found, "restype")) else found


class _Kernel:
    restype = None

    def __call__(self, *args: Any) -> None:
        pass


def _is_4bit(weight: torch.Tensor) -> bool:
    return "quant_storage" in vars(weight)


def kept_tensors(module: nn.Module) -> str:
    """ "4bit", "8bit", or "" where the module is not a quantized layer of bitsandbytes."""
    bnb = sys.modules.get("bitsandbytes")
    if bnb is None:
        return ""
    return (
        "4bit" if isinstance(module, bnb.nn.Linear4bit) else "8bit" if isinstance(module, bnb.nn.Linear8bitLt) else ""
    )


def know(weight: torch.Tensor, module: nn.Module, name: str) -> None:
    """Give the weight of a quantized layer what libraries read off it."""
    state = getattr(module, "virtual_state", None)
    if state is not None and name == "weight":
        vars(weight).update(vars(state))
        if _is_4bit(weight):
            weight.to = _mover(lambda: module._parameters[name])


def know_copy(weight: torch.Tensor, again: torch.Tensor, memo: dict) -> None:
    """Give the copy of a weight what its original has (`Params4bit.__deepcopy__`); DoRA asks a copy."""
    if _is_4bit(weight):
        vars(again).update(vars(weight.module.virtual_state))
        again.quant_state = copy.deepcopy(weight.quant_state, memo)
        again.to = _mover(lambda: again)


def _mover(weight_of: Callable[[], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`Params4bit.to`: what dequantizes the weight goes with it (FSDP2 moves weights alone).

    weight_of: finds the weight by its layer. Held by the weight itself, it would wait for the garbage collector where
    FSDP2 puts a piece in its place; and a tensor with a weak reference `swap_tensors` refuses.
    """

    def to(*args: Any, **kwargs: Any) -> torch.Tensor:
        weight = weight_of()
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None:
            weight.quant_state.to(device)
        return torch.Tensor.to(weight, *args, **kwargs)

    return to


def data(weight: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """A weight's `data`: of a 4-bit one no cast makes numbers of another type.

    peft's `prepare_model_for_kbit_training` makes fp32 of every weight in 16 bits but those whose class is called
    Params4bit (peft/utils/other.py), and 4-bit ones may be stored as such numbers.
    """
    if _is_4bit(weight):
        found.to = functools.partial(_to_a_device, found.detach())  # of itself it would wait for the collector
    return found


def _to_a_device(weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    return weight if device is None else torch.Tensor.to(weight, device)


def quantize(layer: nn.Module, weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The quantized weight of a layer; the layer computes from it from now on.

    The whole weight is on the card for a moment, as when it is loaded, and what bitsandbytes takes to quantize it.
    """
    on_card = torch.empty(weight.shape, dtype=weight.dtype, device=device)
    if kept_tensors(layer) == "8bit":
        again = torch.empty(weight.shape, dtype=torch.float16, device=device)  # it comes back from the CPU as fp16
        scales, values = int8_rows(again, threshold=0.0)
        del on_card
        layer.virtual_state = SimpleNamespace(SCB=scales, CB=None)
        layer.__class__ = _virtual(layer, _forward_8bit)
        return values
    old = layer.weight
    packed, state = sys.modules["bitsandbytes"].functional.quantize_4bit(
        on_card, blocksize=BLOCK, compress_statistics=old.compress_statistics, quant_type=old.quant_type,
        quant_storage=old.quant_storage,
    )  # fmt: skip
    layer.virtual_state = SimpleNamespace(
        quant_type=old.quant_type, compress_statistics=old.compress_statistics, blocksize=BLOCK,
        quant_storage=old.quant_storage, bnb_quantized=True, quant_state=state,
        module=layer,  # as Params4bit knows it: a model in 4 bits goes with the garbage collection, not before
    )  # fmt: skip
    layer.quant_state = state
    layer.__class__ = _virtual(layer, _forward_4bit)
    return packed


def _quantizing(move: Any, kinds: tuple[type, ...]) -> Any:
    """A quantized layer's `_apply`, by which a layer that the program has made itself quantizes on its way to the card.

    The weight goes by itself: `Module._apply` swaps tensors here, and one of a class of its own it cannot swap.
    """

    @functools.wraps(move)
    def _apply(layer: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        weight = layer._parameters["weight"]
        if not isinstance(weight, kinds) or getattr(weight, "has_fp16_weights", False):
            return move(layer, fn, recurse)
        like = fn(torch.empty(0, dtype=weight.dtype))
        if type(like) is FakeTensor:
            placed = nn.Parameter(quantize(layer, weight.to(like.dtype), like.device), requires_grad=False)
        else:
            placed = weight
            placed.data = fn(weight)
        names = list(layer._parameters)
        del layer._parameters["weight"]
        move(layer, fn, recurse)
        for name in names:  # in the order that they had
            layer._parameters[name] = layer._parameters.pop(name, placed)
        know(layer.weight, layer, "weight")
        return layer

    return _apply


def state_tensors(module: nn.Module) -> list[torch.Tensor]:
    """What a quantized layer holds beside its weight."""
    state = getattr(module, "virtual_state", None)
    if state is None:
        return []
    return _tensors(state.quant_state) if hasattr(state, "quant_state") else [state.SCB]


def _tensors(state: Any) -> list[torch.Tensor]:
    """Those of bitsandbytes' `QuantState`."""
    nested = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [state.absmax, *nested, state.code]


_kinds: dict[tuple[type, Any], type] = {}


def _virtual(layer: nn.Module, forward: Any) -> type:
    """The layer's class with another forward, by its own name, whose weight stays known where the module is moved."""
    kind = type(layer)
    if (kind, forward) not in _kinds:

        def _apply(layer: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
            kind._apply(layer, fn, recurse)
            know(layer.weight, layer, "weight")
            return layer

        own = {"forward": forward, "_apply": _apply, "__module__": kind.__module__}
        _kinds[kind, forward] = type(kind.__name__, (kind,), own)
    return _kinds[kind, forward]


def _forward_4bit(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """x (…, in_features) → (…, out_features), in the layer's compute type."""
    compute = layer.compute_dtype or x.dtype
    cast = x.to(compute)
    bias = compute_bias(layer, compute)
    shape = (layer.out_features, layer.in_features)
    nested = layer.virtual_state.compress_statistics and in_force("nested_scales")
    return _Dequantized.apply(cast, layer.weight, bias, shape, nested).to(x.dtype)


class _Dequantized(torch.autograd.Function):
    """x · dequantize(W)ᵀ + b that saves only the quantized weight (bitsandbytes' MatMul4Bit)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: Any, shape: tuple, nested: bool):
        ctx.shape, ctx.nested = shape, nested
        return product(x, shape, bias, 2 * nested)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return product_backward(grad, ctx.shape, ctx.nested), None, None, None, None


def _forward_8bit(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """x (…, in_features) → (…, out_features) of its type (Linear8bitLt.forward in bitsandbytes/nn/modules.py)."""
    scales, threshold = layer.virtual_state.SCB, layer.state.threshold
    return Int8Product.apply(x, layer.weight, scales, compute_bias(layer, x.dtype), threshold)
