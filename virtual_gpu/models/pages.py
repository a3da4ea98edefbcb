"""Pages: CUDA's managed memory, which bitsandbytes' paged optimizers take for their states.

They are no block of PyTorch's allocator. The driver moves them: they lie on the card while it has room, else in the
RAM, and come back when a kernel touches them. So they take nothing of what PyTorch can reserve. On Windows and WSL2
they cannot exceed the card. Sources: bitsandbytes 0.50, get_paged in functional.py, get_state_buffer in
optim/optimizer.py; CUDA C Programming Guide, Unified Memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..language import tr
from ..units import human_bytes

if TYPE_CHECKING:
    from ..counting.gpu import VirtualGPU
    from ..counting.mode import CountingMode

PAGED_FROM = 100_000  # elements: a smaller state is a tensor like any other (get_state_buffer's 1e5)


def is_paged(tensor: Any) -> bool:
    """Whether a tensor lies in managed memory."""
    return getattr(tensor, "is_paged", False)


def page(mode: CountingMode, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of a virtual GPU that its allocator knows nothing of."""
    with mode, mode.uncounted():
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    tensor.is_paged = True
    return tensor


def pages_label(nbytes: int, evicted: int) -> str:
    """Where so many bytes of state are, in the reader's language. evicted: of them, what finds no room on the card."""
    pages, out = human_bytes(nbytes), human_bytes(evicted)
    if not evicted:
        fits = tr(ko="도 GPU에 놓일 수 있다", en=", may find room")
        return tr(ko=f"옵티마이저 상태의 페이지 {pages}", en=f"pages of state, {pages}") + fits
    return tr(
        ko=f"옵티마이저 상태의 페이지 {pages} 가운데 적어도 {out}는 GPU에 자리가 없어 스텝마다 RAM으로 오간다(윈도우와 "
        "WSL2에서는 되지 않는다)",
        en=f"of the pages of state, {pages}, at least {out} find no room and go to the RAM and back in a step (not on "
        "Windows and WSL2)",
    )


def put_into_pages(optimizer: Any, gpu: VirtualGPU) -> None:
    """Let a paged optimizer of bitsandbytes have its pages on a virtual GPU, whose tensors call themselves the CPU's.

    There it would take none: its pages are CUDA's. `prefetch_state` asks the driver to move them, and holds nothing.
    """
    optimizer.get_state_buffer = functools.partial(_buffer, gpu)
    optimizer.prefetch_state = lambda parameter: None


def _buffer(gpu: VirtualGPU, parameter: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if parameter.numel() < PAGED_FROM:
        return torch.zeros_like(parameter, dtype=dtype)
    return page(gpu.mode, parameter.shape, dtype, parameter.device)
