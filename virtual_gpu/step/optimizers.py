"""Optimizers by name, and what their state weighs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import NotSupported, WrongValue
from ..language import tr
from ..models.pages import is_paged, put_into_pages
from ..optional import require
from ..real import GPU, gpu_of, storage_bytes
from ..units import choose, with_parameters
from . import own_code

# Our names, and the names that transformers' TrainingArguments has for the same optimizers.
OPTIMIZERS = {
    "adamw": ("adamw_torch", "adamw_hf"),
    "adamw_fused": ("adamw_torch_fused",),
    "adamw_8bit": ("adamw_bnb_8bit", "adamw_8bit"),
    "paged_adamw": ("paged_adamw_32bit",),
    "paged_adamw_8bit": ("paged_adamw_8bit",),
    "lion": ("lion_32bit",),
    "lion_8bit": ("lion_8bit",),
    "paged_lion": ("paged_lion_32bit",),
    "paged_lion_8bit": ("paged_lion_8bit",),
    "sgd": ("sgd",),
    "adafactor": ("adafactor",),
}
BITSANDBYTES = {  # its class of each
    "adamw_8bit": "AdamW8bit",
    "paged_adamw": "PagedAdamW32bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "lion": "Lion32bit",
    "lion_8bit": "Lion8bit",
    "paged_lion": "PagedLion32bit",
    "paged_lion_8bit": "PagedLion8bit",
}


def optimizer_named(name: object) -> str:
    """Our name of an optimizer that is given by ours or by TrainingArguments'.

    NotSupported for one of another accelerator than CUDA; UnknownName for what neither knows.
    """
    text = str(getattr(name, "value", name))
    names = {alias: ours for ours, aliases in OPTIMIZERS.items() for alias in (ours, *aliases)}
    names |= {one: one for one in own_code.OURS}
    if text.lower() not in names and text.lower() in own_code.of_the_trainer():
        return own_code.checked(text.lower())
    return names[choose(text, names, tr(ko="옵티마이저", en="optimizer"))]


def takes_args(optimizer: str) -> bool:
    """Whether the Trainer reads `optim_args` for it: of the others they say nothing."""
    return optimizer == "sgd" or optimizer not in (*OPTIMIZERS, *own_code.OURS)


def needs_cuda(optimizer: str, optim_args: str = "") -> bool:
    """Whether it is counted where a program finds CUDA (`own_code`): SGD too, where its arguments give it a state."""
    return optimizer not in OPTIMIZERS or (optimizer == "sgd" and bool(optim_args))


def in_8_bits_of_bitsandbytes(optimizer: str) -> bool:
    """Whether the Trainer has it keep the states of each nn.Embedding in 32 bits (`Trainer.create_optimizer`)."""
    return "8bit" in optimizer and (optimizer in BITSANDBYTES or own_code.is_of(optimizer, "bitsandbytes"))


def name_for_trainer(optimizer: str) -> str:
    """What TrainingArguments call an optimizer of ours; it has none for those of `own_code.OURS`."""
    return OPTIMIZERS.get(optimizer, (optimizer,))[0]


def estimate_memory_of_gradients(model: torch.nn.Module) -> int:
    """Bytes of the gradients that the model's parameters hold now."""
    return storage_bytes(p.grad for p in with_parameters(model).parameters() if p.grad is not None)


def estimate_memory_of_optimizer(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer state on the GPU. Scalars (AdamW's step counters, which live on the CPU) do not count.

    Nor do pages of a paged optimizer, see `paged_bytes`.
    """
    if not isinstance(getattr(optimizer, "state", None), Mapping):
        raise WrongValue(
            tr(
                ko=f"optimizer={optimizer!r:.80}: torch.optim의 옵티마이저여야 한다.",
                en=f"optimizer={optimizer!r:.80}: must be an optimizer of torch.optim.",
            )
        )
    return storage_bytes(
        tensor for tensor in states_of_optimizer(optimizer) if tensor.dim() > 0 and not is_paged(tensor)
    )


def paged_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer state in CUDA's managed memory, which a paged optimizer of bitsandbytes takes."""
    return storage_bytes(filter(is_paged, states_of_optimizer(optimizer)))


def states_of_optimizer(optimizer: Any) -> Iterator[torch.Tensor]:
    """All tensors that it keeps: of each parameter, in objects beside it (GaLore's projections), of each one's own."""
    for own in (*getattr(optimizer, "optimizers", ()), *(getattr(optimizer, "optimizer_dict", None) or {}).values()):
        yield from states_of_optimizer(own)  # ours, and transformers' LayerWiseDummyOptimizer
    # AdaLomo keeps its averages beside `state`.
    beside = [value for name, value in vars(optimizer).items() if name.startswith("exp_avg")]
    yield from tensors_in([*optimizer.state.values(), *beside])


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The plain tensors in these values, in what they hold, and in what torchao's tensors are made of."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if is_traceable_wrapper_subclass(value):
                yield from tensors_in(getattr(value, name) for name in value.__tensor_flatten__()[0])
            else:
                yield value
        elif isinstance(value, Mapping):
            yield from tensors_in(value.values())
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif type(value).__module__.split(".")[0] in own_code.PROJECTORS:
            yield from tensors_in(vars(value).values())


def make_optimizer(
    name: str,
    model: torch.nn.Module,
    learning_rate: float = 5e-5,
    gpu: GPU | None = None,
    fp32_embedding_state: bool = False,
    optim_args: str = "",
    optim_target_modules: str | tuple[str, ...] = "",
) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters, with the Trainer's arguments on CUDA, on either GPU.

    name: one of OPTIMIZERS ("sgd" has no momentum; BITSANDBYTES says which class that is), or TrainingArguments' name
    for it; on a real GPU, or on a program's card, one of `own_code` too, with these optim_args and
    optim_target_modules. gpu: where the model lies; None finds it out. fp32_embedding_state: what the Trainer does
    with 8 bits and a loop of one's own does not: the states of each nn.Embedding stay in 32
    (`Trainer.create_optimizer`).
    """
    name = optimizer_named(name)
    if needs_cuda(name, optim_args):
        if (gpu or gpu_of(model)).is_virtual:
            raise NotSupported(
                tr(
                    ko=f"optimizer={name!r}: 이 옵티마이저는 CUDA 장치가 보이는 프로그램에서만 셀 수 있다: "
                    f"virtual-gpu fit --optimizer {name}, 또는 virtual-gpu run.",
                    en=f"optimizer={name!r}: its own code is counted in a program that finds CUDA alone: "
                    f"virtual-gpu fit --optimizer {name}, or virtual-gpu run.",
                )
            )
        return own_code.make(name_for_trainer(name), model, learning_rate, optim_args, optim_target_modules)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise WrongValue(tr(ko="학습할 파라미터가 하나도 없다.", en="The model has no trainable parameter."))
    if name in BITSANDBYTES:
        require("bitsandbytes")
        from ..models.quantized import bnb

        optimizer, gpu = getattr(bnb.optim, BITSANDBYTES[name])(parameters, lr=learning_rate), gpu or gpu_of(model)
        optimizer.name2qmap = gpu.place(optimizer.name2qmap)  # its code tables live beside the state
        if gpu.is_virtual and optimizer.is_paged:
            put_into_pages(optimizer, gpu)
        # What a Trainer of this process asked for its embeddings, bitsandbytes applies to every optimizer that follows.
        optimizer.mng = object.__new__(bnb.optim.GlobalOptimManager)
        optimizer.mng.initialize()
        if fp32_embedding_state:
            for module in model.modules():
                if isinstance(module, torch.nn.Embedding):
                    optimizer.mng.register_module_override(module, "weight", {"optim_bits": 32})
        return optimizer
    if name == "adamw_fused":
        return torch.optim.AdamW(parameters, lr=learning_rate, fused=True)
    if name == "adafactor":  # with what Trainer passes it (transformers/trainer_optimizer.py): one tensor at a time
        from transformers.optimization import Adafactor

        return Adafactor(parameters, lr=learning_rate, scale_parameter=False, relative_step=False)
    # foreach is the default on CUDA and not on a CPU: its temporaries are part of the peak.
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    return kind[name](parameters, lr=learning_rate, foreach=True)
