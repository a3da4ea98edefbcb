"""Models without weights, on the meta device or on a GPU."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..counting.mode import on_virtual_gpu
from ..errors import WrongValue
from ..interrupts import interrupts_later
from ..language import tr
from ..real import GPU
from ..turns import in_turn
from ..units import boolean, with_parameters
from .adapters import (
    LORA_DROPOUT,
    LORA_RANK,
    add_adapters,
    prepare_quantized,
)
from .attention import attention_argument
from .configs import (
    auto_class,
    bad_configuration,
)

MOST_LAYERS = 4096  # four times the deepest transformer that was published (DeepNet, arXiv 2203.00555: 1,000 layers)


@in_turn
def build_model(config: Any, dtype: torch.dtype, attention: str = "sdpa", device: Any = "meta") -> nn.Module:
    """A language model, causal or encoder-decoder, with random weights.

    On the meta device, the default, it has shapes alone: no values, no memory.
    """
    auto = auto_class(config)
    check_depth(config)
    _run_as_eager()
    config = copy.deepcopy(config)  # building writes into it
    # On the meta device it takes a moment, and cut off in the middle it would leave PyTorch's device and dtype changed.
    waits = interrupts_later() if str(device) == "meta" else contextlib.nullcontext()
    try:
        with waits, torch.device(device):
            model = auto.from_config(config, **dtype_argument(dtype), **attention_argument(attention))
            model.tie_weights()  # transformers 5.0 does not tie on the meta device
    except Exception as error:  # of any kind: whatever the model's own code does with sizes that do not go together
        if str(device) != "meta":
            raise  # a real GPU may have run out of memory
        raise bad_configuration(config.model_type, error) from error
    _keep_in_fp32(model, dtype)
    name_the_loss(model)
    return model


def name_the_loss(model: nn.Module) -> None:
    """Name what transformers takes for the loss of GPT-2, whose class does not say it: it would warn each time."""
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"


def check_depth(config: Any) -> None:
    """ValueError for more layers than any model has: building them would take minutes, and then the memory."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise WrongValue(
            tr(
                ko=f"num_hidden_layers={layers}: 층은 {MOST_LAYERS:,}개까지다.",
                en=f"num_hidden_layers={layers}: up to {MOST_LAYERS:,} layers.",
            )
        )


def _keep_in_fp32(model: nn.Module, dtype: torch.dtype) -> None:
    """The parts that transformers loads in fp32 even where the rest has 16 bits (routers, T5's `wo`), in place."""
    names = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    if dtype == torch.float16:
        names |= {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.dtype in (torch.float16, torch.bfloat16) and any(re.search(part, name) for part in names):
            tensor.data = tensor.data.float()


def _run_as_eager() -> None:
    from transformers.utils import import_utils

    # Asked anew each time: what was set inside a block of virtual_gpu.cuda() went with the block.
    is_fake_tensor = getattr(import_utils, "is_fake_tensor", None)
    if is_fake_tensor is not None and not getattr(is_fake_tensor, "eager", False):
        import_utils.is_fake_tensor = unless_virtual(is_fake_tensor)


def unless_virtual(is_fake_tensor: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """transformers' own question, answered no on a virtual GPU.

    It takes fake tensors for a trace (torch.export), in which it makes the attention masks that an eager run skips.
    Source: is_tracing in transformers/utils/import_utils.py, _ignore_causal_mask_sdpa in masking_utils.py, from 5.0 on.
    """

    def asked(x: Any) -> bool:
        return is_fake_tensor(x) and not on_virtual_gpu(x)

    asked.eager = True
    asked.transformers_own = getattr(is_fake_tensor, "transformers_own", is_fake_tensor)
    return asked


def build_on_gpu(
    config: Any,
    dtype: torch.dtype,
    attention: str,
    peft: str | None,
    gpu: GPU,
    lora_rank: int = LORA_RANK,
    lora_targets: str | Sequence[str] = "attention",
    lora_dropout: float = LORA_DROPOUT,
    double_quantization: bool = True,
    rest_in_fp32: bool = True,
    load_in_8bit: bool = False,
    modules_to_save: Sequence[str] = (),
    trained_dtype: str = "",
) -> nn.Module:
    """The architecture on the GPU: without values on a virtual one, with random weights on a real one.

    double_quantization and what follows: of adapters, see `Setting`.
    """
    quantized = peft == "qlora" or load_in_8bit
    # bitsandbytes quantizes while it moves a layer to the GPU: until then the weights lie on the CPU.
    device = "meta" if gpu.is_virtual else "cpu" if quantized else gpu.device
    model = build_model(config, dtype, attention, device)
    if quantized:
        _quantize(model, dtype, gpu, double_quantization, rest_in_fp32, load_in_8bit)
    if peft is not None:
        model = add_adapters(model, lora_rank, lora_targets, lora_dropout=lora_dropout, modules_to_save=modules_to_save)
    if trained_dtype:
        cast_trained(model, torch.float32 if trained_dtype == "fp32" else torch.bfloat16)
    return gpu.place(model)


def cast_trained(model: nn.Module, dtype: torch.dtype) -> None:
    """Make this type of every parameter that is trained, in place."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def count_parameters(model: nn.Module, trainable_only: bool = False) -> int:
    """The number of parameters, tied ones once; 4-bit weights count as the numbers they stand for."""
    trainable_only = boolean(trainable_only, "trainable_only")
    return sum(
        parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1)
        for parameter in with_parameters(model).parameters()
        if parameter.requires_grad or not trainable_only
    )


def _quantize(
    model: nn.Module, dtype: torch.dtype, gpu: GPU, nested: bool, rest_in_fp32: bool, eight_bits: bool
) -> None:
    """Make the model's linear layers 4-bit or 8-bit ones and prepare it for training, in place."""
    from .quantized import check_kernels, quantize_linears

    if not gpu.is_virtual and not eight_bits:
        check_kernels(gpu.device)
    quantize_linears(model, dtype, gpu, nested=nested, eight_bits=eight_bits)
    if not gpu.is_virtual:
        gpu.place(model)
    setattr(model, "is_loaded_in_8bit" if eight_bits else "is_loaded_in_4bit", True)
    if rest_in_fp32:
        prepare_quantized(model)


def dtype_argument(dtype: Any) -> dict:
    """`dtype=` since transformers 4.56, `torch_dtype=` before."""
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    return {"dtype" if version >= (4, 56) else "torch_dtype": dtype}
