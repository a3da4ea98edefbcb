"""What a tensor on the virtual GPU says of itself, and how tensors and modules get there."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import _foreach_supported_types as foreach_in_optimizers
from torch.utils._device import DeviceContext
from torch.utils._foreach_utils import _foreach_supported_types as foreach_elsewhere
from torch.utils._pytree import tree_map_only

from ..language import tr
from . import quantized
from .device import NESTED, ProgramGPU, is_gpu
from .patches import Patches
from .saving import Saving

_SWAPPED_BY_TORCH = torch.utils.swap_tensors
# What PyTorch and we keep on a fake tensor. Whatever else is there, the program has put there.
_OF_FAKES = {*vars(FakeTensor(FakeTensorMode(), torch.empty(0, device="meta"), torch.device("cpu")))}
_OF_FAKES |= {"_is_param", "answer", "drawn", "known", "may_pick", "mostly", "plain_of"}
_DEVICE_KINDS = (str, torch.device, int)


def install(patches: Patches, gpu: ProgramGPU) -> None:
    """Give fake tensors a GPU's face, and `Tensor.to`, `Tensor.cuda` and `Module.to` a GPU to go to."""
    mode = gpu.mode
    tensor_to, device_of = torch.Tensor.to, FakeTensor.device
    numpy, deepcopy = torch.Tensor.numpy, torch.Tensor.__deepcopy__
    array, pin_memory, text = torch.Tensor.__array__, torch.Tensor.pin_memory, torch.Tensor.__format__
    as_subclass = torch.Tensor.as_subclass

    def ours(tensor: Any) -> bool:
        return type(tensor) is FakeTensor and tensor.fake_mode is mode

    def device(tensor: FakeTensor) -> torch.device:
        if tensor.fake_mode is not mode or mode.is_inside():
            return device_of.fget(tensor)
        return gpu.shown(tensor)

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # "cuda" becomes the name inside before PyTorch compares: where the tensor is there already, it is returned.
        if args and isinstance(args[0], _DEVICE_KINDS) and not isinstance(args[0], bool):
            args = (_inside(gpu, args[0]), *args[1:])
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _inside(gpu, kwargs["device"])}
        if tensor.is_nested and any(map(_is_card, (*args[:1], kwargs.get("device")))):
            raise NotImplementedError(NESTED)
        if torch._C._len_torch_dispatch_stack():
            return tensor_to(tensor, *args, **kwargs)
        with mode:  # another thread
            return tensor_to(tensor, *args, **kwargs)

    def cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
        return to(tensor, "cuda" if device is None else device, non_blocking=non_blocking)

    def of_class(tensor: torch.Tensor, cls: type) -> torch.Tensor:
        if not ours(tensor) or issubclass(FakeTensor, cls):
            return as_subclass(tensor, cls)
        name = f"{cls.__module__}.{cls.__qualname__}"
        gpu.watch.note(
            tr(
                ko=f"{name}: 가상 GPU의 텐서는 이 클래스가 되지 못하고 보통 텐서로 남는다. 바이트는 같지만, 클래스에 "
                "딸린 정보는 없고, 클래스를 보고 고르는 코드는 다른 길로 간다",
                en=f"{name}: a tensor on the virtual GPU stays a plain one. The bytes are the same; what the class "
                "carries is not there, and what asks for the class goes another way",
            )
        )
        return tensor

    def to_numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if ours(tensor):
            raise TypeError(
                f"can't convert {gpu.shown(tensor)} device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
                "to host memory first."
            )
        return numpy(tensor, *args, **kwargs)

    def to_array(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return to_numpy(tensor) if ours(tensor) else array(tensor, *args, **kwargs)

    def deep_copy(tensor: torch.Tensor, memo: dict) -> torch.Tensor:
        if not ours(tensor):
            return deepcopy(tensor, memo)
        if id(tensor) not in memo:
            if not tensor.is_leaf:
                return deepcopy(tensor, memo)  # PyTorch's own error
            with torch.no_grad():
                again = tensor.detach().clone()
            if isinstance(tensor, torch.nn.Parameter):
                again = torch.nn.Parameter(again, tensor.requires_grad)
                quantized.know_copy(tensor, again, memo)
            again.requires_grad_(tensor.requires_grad)
            if tensor.grad is not None:
                again.grad = copy.deepcopy(tensor.grad, memo)
            memo[id(tensor)] = again
        return memo[id(tensor)]

    def pinned(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        if ours(tensor) or tensor.device.type != "cpu":
            return pin_memory(tensor)
        return gpu.host.pinned(tensor)

    def formatted(tensor: torch.Tensor, spec: str) -> str:
        if ours(tensor) and tensor.dim() == 0:
            return format(tensor.item(), spec)
        return text(tensor, spec)

    saving = gpu.saving = Saving(patches, gpu)

    def reduced(tensor: torch.Tensor, protocol: int) -> Any:
        return saving.reduced(tensor, protocol) if ours(tensor) else torch.Tensor.__reduce_ex__(tensor, protocol)

    pointer = torch.UntypedStorage.data_ptr

    def pointer_of(storage: torch.UntypedStorage) -> int:
        return storage._cdata if storage._cdata in mode.storages else pointer(storage)

    ctc_loss = torch.ctc_loss

    def ctc_of_lists(
        log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
        reduction: int = 1, zero_infinity: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """PyTorch makes lists of a tensor of lengths, not of a subclass (ATen/native/LossCTC.cpp); then it reduces."""
        if not ours(log_probs):
            return ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
        lists = [
            one.tolist() if isinstance(one, torch.Tensor) else list(one) for one in (input_lengths, target_lengths)
        ]
        losses = ctc_loss(log_probs, targets, *lists, blank, 0, zero_infinity)
        if reduction == 1:
            return (losses / torch.tensor(lists[1], device=log_probs.device).clamp_min(1)).mean()
        return losses.sum() if reduction == 2 else losses

    patches.set(torch, "ctc_loss", ctc_of_lists)
    patches.set(torch.UntypedStorage, "data_ptr", pointer_of)  # whether tensors are tied, libraries ask it
    patches.set(torch.Tensor, "to", to)
    patches.set(torch.Tensor, "cuda", cuda)
    patches.set(torch.Tensor, "pin_memory", pinned)
    patches.set(torch.Tensor, "as_subclass", of_class)
    patches.set(torch.Tensor, "numpy", to_numpy)
    patches.set(torch.Tensor, "__array__", to_array)
    patches.set(torch.Tensor, "__deepcopy__", deep_copy)
    patches.set(torch.Tensor, "__format__", formatted)
    patches.set_all(
        FakeTensor,
        {
            "device": property(device, device_of.fset),
            "is_cuda": property(
                lambda t: (t.fake_mode is mode and not mode.is_inside()) or t.fake_device.type == "cuda"
            ),
            "is_cpu": property(lambda t: t.device.type == "cpu"),
            "get_device": lambda t: gpu.shown(t).index if ours(t) else torch.Tensor.get_device(t),
            "__reduce_ex__": reduced,
            "record_stream": lambda t, stream: None,
            "tolist": lambda t: t.cpu().tolist() if t.dim() else t.item(),
            "data_ptr": lambda t: t.untyped_storage()._cdata + t.storage_offset() * t.element_size(),
            "__repr__": lambda t, **_: gpu.answers.printed(t) if ours(t) else torch.Tensor.__repr__(t),
        },
    )
    for supported in (foreach_in_optimizers, foreach_elsewhere):
        patches.append(supported, FakeTensor)  # what CUDA's optimizers and clip_grad_norm_ do by default
    factories = torch.utils._device._device_constructors()  # PyTorch remembers them: before any is replaced
    _factories_of_values(patches, gpu)
    _numbers_as_devices(patches, factories)
    _sparse_tensors(patches, gpu)
    _nested_tensors(patches, gpu)
    data = torch._C.TensorBase.data

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if ours(value) and isinstance(tensor, torch.nn.Parameter):
            gpu.watch.claim([value], "parameters")  # so ZeRO gathers one
        arrives = type(value) is FakeTensor and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        leaves = ours(tensor) and type(value) in (
            torch.Tensor,
            torch.nn.Parameter,
        )  # for the CPU
        if arrives or leaves:
            if isinstance(tensor, torch.nn.Parameter):
                value = torch.nn.Parameter(value, tensor.requires_grad)
            swap_tensors(tensor, value)
        else:
            data.__set__(tensor, value)
            tensor.__dict__.pop("known", None)  # of what it was
            if gpu.several is not None and ours(tensor) and ours(value):
                tensor.fake_device = value.fake_device

    def data_of(tensor: torch.Tensor) -> torch.Tensor:
        return quantized.data(tensor, data.__get__(tensor))

    patches.set(torch.Tensor, "data", property(data_of, set_data))
    patches.set(torch.utils, "swap_tensors", swap_tensors)
    before = torch.__future__.get_swap_module_params_on_conversion()
    patches.set(torch.__future__, "_swap_module_params_on_conversion", before)
    torch.__future__.set_swap_module_params_on_conversion(True)
    load = torch.nn.Module._load_from_state_dict

    @functools.wraps(load)
    def loaded(*args: Any, **kwargs: Any) -> None:
        # Modules swap on their way to the card; state is loaded as the program has it: into the parameter, whose class
        # may be one of its own (`Int8Params`), or by assigning another.
        torch.__future__.set_swap_module_params_on_conversion(before)
        try:
            load(*args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(True)

    patches.set(torch.nn.Module, "_load_from_state_dict", loaded)


def _factories_of_values(patches: Patches, gpu: ProgramGPU) -> None:
    """`torch.tensor` and its like copy their values to the device where no mode sees it: here in two steps."""

    def in_two_steps(make: Any) -> Any:
        @functools.wraps(make)
        def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
            pinned = make is tensor and kwargs.pop("pin_memory", False)
            tensor_first = bool(args) and isinstance(args[0], torch.Tensor)
            if args and isinstance(_first_of(args[0]), FakeTensor) and not tensor_first:  # each number is asked for
                numbers = tree_map_only(FakeTensor, lambda one: tensor(one.item(), dtype=one.dtype), args[0])
                args = (numbers, *args[1:])
            device = _default_device() if device is None and not tensor_first else device
            device = None if device is None else _inside(gpu, device)
            if device is None or not _is_card(device):
                real = make(*args, device=device, **kwargs)
                return gpu.host.pinned(real).requires_grad_(real.requires_grad) if pinned else real
            if pinned:
                raise RuntimeError("Only dense CPU tensors can be pinned")
            if tensor_first and make is not tensor:
                return args[0].to(device, **{k: v for k, v in kwargs.items() if k == "dtype"})
            requires_grad = kwargs.pop("requires_grad", False)
            on_cpu = make(*args, device="cpu", **kwargs)
            fake = (on_cpu.clone() if on_cpu is args[0] else on_cpu).to(device).requires_grad_(requires_grad)
            if on_cpu.numel() == 1 and on_cpu.is_floating_point():
                gpu.answers.written(fake, on_cpu.item())
            return fake

        return made

    tensor = torch.tensor
    replaced = {torch.tensor: None, torch.as_tensor: None, torch.asarray: None}
    for make in replaced:
        replaced[make] = in_two_steps(make)
        patches.set(torch, make.__name__, replaced[make])
    with_device = DeviceContext.__torch_function__

    def __torch_function__(self: Any, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # what was replaced has chosen the device itself
        return func(*args, **kwargs or {}) if func in replaced else with_device(self, func, types, args, kwargs)

    new_tensor = torch.Tensor.new_tensor

    def new(like: torch.Tensor, data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if type(like) is not FakeTensor and device is None and not kwargs.get("pin_memory"):
            return new_tensor(like, data, **kwargs)
        kwargs.setdefault("dtype", like.dtype)
        return torch.tensor(data, device=like.device if device is None else device, **kwargs)

    patches.set(DeviceContext, "__torch_function__", __torch_function__)
    patches.set(torch.Tensor, "new_tensor", new)
    make_fake = FakeTensor.__new__

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # `type(parameter)(tensor, requires_grad=…)`, as accelerate's hooks write it: on a card that type is Parameter
        if len(args) == 1 and isinstance(args[0], torch.Tensor) and kwargs.keys() <= {"requires_grad"}:
            return torch.nn.Parameter(args[0], **kwargs)
        return make_fake(cls, *args, **kwargs)

    patches.set(FakeTensor, "__new__", staticmethod(__new__))
    # No card's context is there to make; PyTorch 2.11 asks for one where `torch.cuda.is_available()`.
    patches.set(torch._subclasses.fake_tensor, "init_gpu_context", lambda device: None)


def _sparse_tensors(patches: Patches, gpu: ProgramGPU) -> None:
    """`torch.sparse_coo_tensor`: PyTorch's own asks a CUDA build for the device; its parts go there first."""
    make = torch.sparse_coo_tensor

    @functools.wraps(make)
    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        device = _default_device() if device is None else device
        args += tuple(kwargs.pop(name) for name in ("indices", "values", "size")[len(args) :] if name in kwargs)
        if device is None or len(args) < 2 or not _is_card(_inside(gpu, device)):
            return make(*args, device=device, **kwargs)
        parts = [torch.as_tensor(part).to(device) for part in args[:2]]
        with torch._C.DisableTorchFunction():  # a default device would be asked for again
            return make(*parts, *args[2:], **kwargs)

    patches.set(torch, "sparse_coo_tensor", made)


def _nested_tensors(patches: Patches, gpu: ProgramGPU) -> None:
    """Refuse by name what PyTorch would ask a CUDA build for, or a rule of shapes that it has not."""

    def refusing(make: Any) -> Any:
        @functools.wraps(make)
        def made(parts: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
            device = _default_device() if device is None else device
            there = isinstance(parts, (list, tuple)) and any(type(part) is FakeTensor for part in parts)
            if there or (device is not None and _is_card(_inside(gpu, device))):
                raise NotImplementedError(NESTED)
            return make(parts, *args, device=device, **kwargs)

        return made

    for name in ("nested_tensor", "as_nested_tensor"):
        patches.set(torch.nested, name, refusing(getattr(torch.nested, name)))


def _first_of(data: Any) -> Any:
    """What the first list of lists begins with."""
    while isinstance(data, (list, tuple)) and data:
        data = data[0]
    return data


def _numbers_as_devices(patches: Patches, factories: Iterable[Any]) -> None:
    """Let a whole number be a CUDA device, as in `.to(rank)`; a CPU build of PyTorch has no such devices."""

    def device_of(number: Any) -> Any:
        return torch.device("cuda", number) if type(number) is int else number

    def named(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if type(kwargs.get("device")) is int:
                kwargs["device"] = device_of(kwargs["device"])
            return function(*args, **kwargs)

        return call

    for make in factories:
        if getattr(torch, make.__name__, None) is make:
            patches.set(torch, make.__name__, named(make))
    patches.set(torch.nn.Module, "to_empty", named(torch.nn.Module.to_empty))
    parse = torch._C._nn._parse_to

    def parsed(*args: Any, **kwargs: Any) -> Any:
        return parse(*map(device_of, args[:1]), *args[1:], **kwargs)

    patches.set(torch._C._nn, "_parse_to", parsed)  # for classes of tensors with a `to` of their own, as `Params4bit`
    move = named(torch.nn.Module.to)

    def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        return move(module, *map(device_of, args[:1]), *args[1:], **kwargs)

    patches.set(torch.nn.Module, "to", to)


def _default_device() -> torch.device | None:
    """What `with torch.device(…)` or `torch.set_default_device` says."""
    modes = torch.overrides._get_current_function_mode_stack()
    return next((mode.device for mode in reversed(modes) if isinstance(mode, DeviceContext)), None)


def _inside(gpu: ProgramGPU, device: Any) -> torch.device:
    """A device that the program names, by the name that it has inside."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda":
        gpu.check_index(device)
        return gpu.inside(device)
    return device


def _is_card(value: Any) -> bool:
    return isinstance(value, torch.device) and is_gpu(value)


def swap_tensors(first: torch.Tensor, second: torch.Tensor) -> None:
    """`torch.utils.swap_tensors`, for tensors of a virtual GPU too.

    `Module.to` lets a parameter become a tensor of the GPU and stay the same object, so that an optimizer made before
    keeps it, and ties stay ties. PyTorch's own refuses fake tensors, since their mode has weak references to them.
    What a program has put on the first stays with it, as where `Module.to` sets its data: DeepSpeed's `ds_id`.
    """
    if FakeTensor not in (type(first), type(second)):
        return _SWAPPED_BY_TORCH(first, second)
    given = {name: value for name, value in vars(first).items() if name not in _OF_FAKES}
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = {**given, **second.__dict__}, first.__dict__
    torch._C._swap_tensor_impl(first, second)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(first, name)) is not None:
            setattr(first, name, hooks)  # the object has them still, and what it is now has to hear of them
