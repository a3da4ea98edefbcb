"""What cannot be quantized, said clearly."""

from __future__ import annotations

from typing import Any

import torch

from virtual_gpu.language import tr
from virtual_gpu.units import boolean

# What a format prescribes: bits, and how many numbers share a scale (None: as one likes).
FIXED = {"nf4": (4, None), "mxfp4": (4, 32), "nvfp4": (4, 16)}


def check_bits(bits: Any, method: str) -> int:
    """The bits of a code: 2 to 8, or what the format prescribes."""
    prescribed = FIXED[method][0] if method in FIXED else None
    if bits is None:
        return prescribed or 8
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ValueError(
            tr(ko=f"bits={bits!r}: 2부터 8까지의 정수여야 한다.", en=f"bits={bits!r}: an integer of 2 to 8.")
        )
    if prescribed and bits != prescribed:
        name = method.upper()
        raise ValueError(
            tr(ko=f"bits={bits}: {name}는 {prescribed}비트 형식이다.", en=f"bits={bits}: {name} has {prescribed} bits.")
        )
    return bits


def check_tensor(tensor: Any) -> torch.Tensor:
    """A copy of the numbers in fp32."""
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise ValueError(tr(ko=f"torch 텐서가 아니라 {kind}이다.", en=f"{kind} is not a torch tensor."))
    if not tensor.dtype.is_floating_point:
        raise ValueError(
            tr(
                ko=f"{tensor.dtype} 텐서는 양자화할 수 없다. 실수(부동소수점) 텐서여야 한다.",
                en=f"a {tensor.dtype} tensor cannot be quantized: it must be of a floating-point type.",
            )
        )
    if tensor.numel() == 0:
        raise ValueError(tr(ko="빈 텐서라서 양자화할 값이 없다.", en="the tensor is empty: nothing to quantize."))
    numbers = tensor.detach().to(torch.float32, copy=True)
    if bad := int((~numbers.isfinite()).sum()):
        raise ValueError(
            tr(
                ko=f"nan이나 inf(fp32의 범위를 넘는 값 포함)가 {bad}개 있다. 양자화하기 전에 없앤다.",
                en=f"{bad} values are nan or inf (or beyond fp32): remove them first.",
            )
        )
    return numbers


def check_grouping(numbers: torch.Tensor, method: str, block_size: Any, per_channel: bool) -> tuple[int, str]:
    """(numbers that share a scale, "tensor", "channel" or "block")."""
    per_channel = boolean(per_channel, "per_channel")
    prescribed = FIXED[method][1] if method in FIXED else None
    if prescribed:
        if per_channel or block_size not in (None, prescribed):
            name = method.upper()
            raise ValueError(
                tr(
                    ko=f"block_size={block_size!r}: {name}의 블록은 언제나 값 {prescribed}개다.",
                    en=f"block_size={block_size!r}: {name} has blocks of {prescribed}.",
                )
            )
        return prescribed, "block"
    if per_channel:
        if block_size is not None:
            raise ValueError(
                tr(
                    ko="block_size와 per_channel은 함께 쓸 수 없다.",
                    en="choose block_size or per_channel, not both.",
                )
            )
        if numbers.dim() < 2:
            raise ValueError(tr(ko="채널별 양자화에는 2차원 이상의 텐서가 필요하다.", en="channels need 2 dimensions."))
        return numbers.numel() // len(numbers), "channel"
    if block_size is None:
        return numbers.numel(), "tensor"
    count = numbers.numel()
    if isinstance(block_size, bool) or not isinstance(block_size, int) or not 1 <= block_size <= count:
        raise ValueError(
            tr(
                ko=f"block_size={block_size!r}: 1부터 텐서의 원소 수 {count:,}까지의 정수여야 한다.",
                en=f"block_size={block_size!r}: an integer of 1 to the tensor's {count:,} elements.",
            )
        )
    return block_size, "block"
