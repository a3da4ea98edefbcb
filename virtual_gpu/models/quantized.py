"""Linear layers in 4 and 8 bits: bitsandbytes' own on a real GPU, such as hold the same bytes on a virtual one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..language import tr
from ..real import GPU
from ..rules.active import in_force
from ..rules.bitsandbytes import (
    BLOCK,
    NESTED_BLOCK,
    OUTLIER,
    PACKED_ROWS,
    Int8Product,
    compute_bias,
    product,
    product_backward,
)


def quantize_linears(
    model: nn.Module,
    compute_dtype: torch.dtype,
    gpu: GPU,
    storage: torch.dtype = torch.uint8,
    nested: bool = True,
    eight_bits: bool = False,
) -> None:
    """Replace every linear layer but the output head by a 4-bit one (NF4), or an int8 one (LLM.int8), in place.

    storage: of a virtual GPU's layers, the type of the numbers that eight or more bits of weights lie in.
    nested: double quantization, the scales of the blocks in 8 bits; both of 4 bits.
    As transformers does, it leaves alone what a model keeps in fp32 (T5's `wo`).
    """
    head = model.get_output_embeddings()
    kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    make: Callable[[nn.Linear], nn.Module]
    if eight_bits:
        make = VirtualLinear8bit if gpu.is_virtual else _real_8bit_layer
    elif gpu.is_virtual:
        make = functools.partial(VirtualLinear4bit, compute_dtype=compute_dtype, storage=storage, nested=nested)
    else:
        make = functools.partial(_real_layer, compute_dtype=compute_dtype, nested=nested)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                child = _as_linear(child)
            if type(child) is nn.Linear and child is not head and not name.endswith(kept):
                setattr(parent, name, make(child))


def _as_linear(layer: Conv1D) -> nn.Linear:
    """GPT-2's linear layer, whose weight lies the other way round; transformers quantizes it too."""
    linear = nn.Linear(*layer.weight.shape, device="meta")
    linear.weight, linear.bias = nn.Parameter(layer.weight.T.contiguous()), layer.bias
    return linear


def check_kernels(device: Any) -> None:
    """RuntimeError, with what to do, where bitsandbytes cannot quantize to 4 bits on this device."""
    try:
        bnb.functional.quantize_4bit(torch.ones(BLOCK, device=device), quant_type="nf4")
    except (RuntimeError, NotImplementedError, AttributeError, OSError) as error:
        raise RuntimeError(
            tr(
                ko=f"bitsandbytes {bnb.__version__}에는 이 장치({device})에서 4비트로 양자화할 커널이 없다. "
                "CUDA에 맞는 bitsandbytes를 설치하거나, 가상 GPU(use_gpu('T4'))나 peft='lora'를 쓴다. "
                f"bitsandbytes가 알린 것: {error}",
                en=f"bitsandbytes {bnb.__version__} has no 4-bit kernel for {device}. Install one for your CUDA, "
                f"or use a virtual GPU (use_gpu('T4')) or peft='lora'. bitsandbytes says: {error}",
            )
        ) from error


def _real_layer(linear: nn.Linear, compute_dtype: torch.dtype, nested: bool = True) -> nn.Module:
    kind = Linear4bitDouble if compute_dtype == torch.float64 else bnb.nn.Linear4bit
    layer = kind(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=compute_dtype,
        compress_statistics=nested,
        quant_type="nf4",
    )
    layer.weight = bnb.nn.Params4bit(
        linear.weight.data, requires_grad=False, compress_statistics=nested, quant_type="nf4"
    )
    layer.bias = linear.bias
    return layer


def _real_8bit_layer(linear: nn.Linear) -> nn.Module:
    layer = bnb.nn.Linear8bitLt(
        linear.in_features, linear.out_features, bias=linear.bias is not None, has_fp16_weights=False, threshold=OUTLIER
    )
    layer.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    layer.bias = linear.bias
    return layer


class VirtualLinear8bit(bnb.nn.Linear8bitLt):
    """Holds what bitsandbytes' `Linear8bitLt` holds, and computes like it: a byte a weight, an fp32 scale a row."""

    quantization_state = ("scales",)

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        device = linear.weight.device
        weight = torch.empty(linear.weight.shape, dtype=torch.int8, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias, self.index = linear.bias, None
        self.state = bnb.MatmulLtState()
        self.state.threshold, self.state.has_fp16_weights = OUTLIER, False
        self.register_buffer("scales", torch.empty(self.out_features, device=device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, in_features) → (…, out_features)."""
        return Int8Product.apply(x, self.weight, self.scales, compute_bias(self, x.dtype), OUTLIER)


class VirtualLinear4bit(bnb.nn.Linear4bit):
    """Holds what bitsandbytes' `Linear4bit` holds, as tensors that fake-tensor mode understands, and computes like it.

    Packed weight (two to a byte), 8-bit absmax for each 64 weights, fp32 absmax for each 256 of those, an offset and
    the two code tables; without double quantization an fp32 absmax for each 64 weights and one code table. The weight
    is dequantized for each product, forward (but for a few rows, by the rule "gemm_4bit") and backward, and freed after
    it.
    """

    def __init__(
        self,
        linear: nn.Linear,
        compute_dtype: torch.dtype,
        storage: torch.dtype = torch.uint8,
        nested: bool = True,
    ):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype, self.nested = compute_dtype, nested
        device, count = linear.weight.device, linear.weight.numel()
        blocks = -(-count // BLOCK)
        packed = torch.empty((count + 1) // 2 // storage.itemsize, 1, dtype=storage, device=device)
        self.weight = Params4bit(packed, requires_grad=False)
        self.bias = linear.bias
        state = [("absmax", (blocks,), torch.uint8 if nested else torch.float32), ("code", (16,), torch.float32)]
        if nested:
            state += [
                ("offset", (), torch.float32),
                ("nested_absmax", (-(-blocks // NESTED_BLOCK),), torch.float32),
                ("nested_code", (256,), torch.float32),
            ]
        self.quantization_state = tuple(name for name, *_ in state)
        for name, size, dtype in state:
            self.register_buffer(name, torch.empty(size, dtype=dtype, device=device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, in_features) → (…, out_features)."""
        cast = x.to(self.compute_dtype)
        bias = compute_bias(self, self.compute_dtype)
        shape = (self.out_features, self.in_features)
        return _DequantizedLinear.apply(cast, self.weight, bias, shape, self.nested).to(x.dtype)


class Linear4bitDouble(bnb.nn.Linear4bit):
    """bitsandbytes' weights, multiplied in fp64, which its own kernels do not do (0.50 returns wrong numbers)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, in_features) → (…, out_features)."""
        weight = bnb.functional.dequantize_4bit(self.weight.data, self.weight.quant_state)
        return nn.functional.linear(x, weight.to(x.dtype), self.bias)


class Params4bit(nn.Parameter):
    """Named as bitsandbytes' class, by which peft knows what not to upcast to fp32; what peft asks of it is here."""

    quant_type = "nf4"
    compress_statistics = True


class _DequantizedLinear(torch.autograd.Function):
    """x · dequantize(W)ᵀ + b that saves only the packed weight (bitsandbytes' MatMul4Bit)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: Any, shape: tuple[int, int], nested: bool):
        ctx.shape, ctx.nested = shape, nested and in_force("nested_scales")
        if in_force("gemm_4bit") and x.numel() <= PACKED_ROWS * shape[1]:
            return x.new_empty(*x.shape[:-1], shape[0])
        return product(x, shape, bias, 2 * ctx.nested)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return product_backward(grad, ctx.shape, ctx.nested), None, None, None, None
