"""Optimizers by name, and what their state weighs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ..errors import NotSupported, WrongValue
from ..language import tr
from ..models.pages import is_paged, put_into_pages
from ..optional import require
from ..real import GPU, gpu_of, storage_bytes
from ..units import choose, with_parameters

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

    NotSupported for another one that TrainingArguments has; UnknownName for what neither knows.
    """
    text = str(getattr(name, "value", name))
    names = {alias: ours for ours, aliases in OPTIMIZERS.items() for alias in (ours, *aliases)}
    if text.lower() not in names:
        from transformers.training_args import OptimizerNames

        if text in {known.value for known in OptimizerNames}:
            raise NotSupported(
                tr(
                    ko=f"optim={text!r}: 흉내 내지 않는 옵티마이저다. 쓸 수 있는 값: {', '.join(names)}",
                    en=f"optim={text!r} is not simulated. Choose one of: {', '.join(names)}",
                )
            )
    return names[choose(text, names, tr(ko="옵티마이저", en="optimizer"))]


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
    return storage_bytes(tensor for tensor in _states(optimizer) if tensor.dim() > 0 and not is_paged(tensor))


def paged_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer state in CUDA's managed memory, which a paged optimizer of bitsandbytes takes."""
    return storage_bytes(filter(is_paged, _states(optimizer)))


def _states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    values = (value for state in optimizer.state.values() for value in state.values())
    return (value for value in values if isinstance(value, torch.Tensor))


def make_optimizer(
    name: str,
    model: torch.nn.Module,
    learning_rate: float = 5e-5,
    gpu: GPU | None = None,
    fp32_embedding_state: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters, with the Trainer's arguments on CUDA, on either GPU.

    name: one of OPTIMIZERS ("sgd" has no momentum; BITSANDBYTES says which class that is), or TrainingArguments' name
    for it. gpu: where the model lies; None finds it out. fp32_embedding_state: what the Trainer does with 8 bits and a
    loop of one's own does not: the states of each nn.Embedding stay in 32 (`Trainer.create_optimizer`).
    """
    name = optimizer_named(name)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise WrongValue(tr(ko="학습할 파라미터가 하나도 없다.", en="The model has no trainable parameter."))
    if name in BITSANDBYTES:
        require("bitsandbytes")
        from ..models.four_bit import bnb

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
