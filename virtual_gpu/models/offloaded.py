"""What a checkpointed block keeps, in the CPU's RAM: its input, or a result (see `models.kept`), waits for backward.

Of inputs it is transformers' own, since 5.17: `gradient_checkpointing_kwargs={"offload": True}` puts PyTorch's
`save_on_cpu` with pinned memory around each block's checkpoint (modeling_utils.py,
`_activation_checkpointing_enable`). Both copies run on the stream that computes, so nothing lies on the card longer
than its name does. Without an accelerator it raises: there is no allocator of pinned memory (5.23, PyTorch 2.13).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from importlib import metadata
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from ..errors import OldLibrary
from ..language import tr
from ..rules.registry import version

if TYPE_CHECKING:
    from ..counting.gpu import VirtualGPU

SINCE, SINCE_SHARDED = "5.17", "1.15"


def reentrant_by_default() -> bool:
    """Whether the installed transformers checkpoints reentrantly where nothing is said: before 5.0."""
    return version(metadata.version("transformers")) < version("5.0")


def can_offload(stage: int = 0) -> bool:
    """Whether transformers moves checkpoints to the CPU, and at a ZeRO stage accelerate's FSDP2 too (1.15)."""
    needed = {"transformers": SINCE} | ({"accelerate": SINCE_SHARDED} if stage else {})
    return all(version(metadata.version(name)) >= version(since) for name, since in needed.items())


def require_offload() -> None:
    """OldLibrary, with what to install, where it does not."""
    if not can_offload():
        raise OldLibrary(
            tr(
                ko=f"체크포인트를 CPU로 옮기기(offload)는 transformers {SINCE}부터 된다. "
                f"\"pip install -U 'transformers>={SINCE}'\"로 설치한 뒤 커널을 다시 시작한다.",
                en=f"Checkpoints on the CPU (offload) need transformers {SINCE}. "
                f"\"pip install -U 'transformers>={SINCE}'\", then restart the kernel.",
            )
        )


def pinned_bytes(nbytes: int) -> int:
    """What a tensor takes of pinned RAM: the next power of two, by default (PyTorch 2.13, CachingHostAllocator.h)."""
    return 1 << max(nbytes - 1, 0).bit_length()


@dataclass(frozen=True)
class Moved:
    """What went to the CPU. sizes: bytes of a tensor, for each token → how often, of one micro-batch.

    By the token, so that micro-batches of other sizes have the same ones; and how often grows with the depth.
    """

    sizes: Mapping[Fraction, int]

    @classmethod
    def of(cls, sizes: Counter[int], tokens: int, micro_batches: int) -> Moved:
        """From bytes → how often, of so many micro-batches of so many tokens each."""
        return cls({Fraction(nbytes, tokens): times // micro_batches for nbytes, times in sizes.items()})

    def nbytes(self, tokens: int) -> int:
        """Bytes that a micro-batch of so many tokens sends, and gets back."""
        return sum(int(size * tokens) * times for size, times in self.sizes.items())

    def pinned(self, tokens: int) -> int:
        """What they take of pinned RAM until they come back."""
        return sum(pinned_bytes(int(size * tokens)) * times for size, times in self.sizes.items())


@contextmanager
def offloading(gpu: VirtualGPU | None, sizes: Counter[int]) -> Iterator[None]:
    """Inside, each tensor that goes to the CPU is counted by its bytes.

    gpu: the virtual GPU that the model lies on, None for a real one. Its tensors call themselves the CPU's, so there
    `save_on_cpu` would leave them on it: they are forgotten instead, and made anew when they come back.
    """

    def hooks(pin_memory: bool = False, device_type: str = "cuda") -> saved_tensors_hooks:
        found = _forgetting(gpu) if gpu is not None else save_on_cpu(pin_memory, device_type)
        pack = found.pack_hook

        def told(tensor: torch.Tensor) -> Any:
            sizes[tensor.nbytes] += 1
            return pack(tensor)

        found.pack_hook = told
        return found

    with mock.patch("transformers.modeling_utils.save_on_cpu", hooks):
        yield


def _forgetting(gpu: VirtualGPU) -> saved_tensors_hooks:
    def pack(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
        tensor.contiguous()  # a copy from the card is made of such a one (ATen's Copy.cu)
        return tensor.shape, tensor.dtype

    def unpack(packed: tuple[torch.Size, torch.dtype]) -> torch.Tensor:
        shape, dtype = packed
        with gpu.mode:
            return torch.empty(shape, dtype=dtype, device="cpu")

    return saved_tensors_hooks(pack, unpack)


def leaving(gpu: VirtualGPU | None, sizes: Counter[int]) -> Callable[[torch.Tensor], Callable[[], torch.Tensor]]:
    """What copies a tensor to pinned RAM, and gives what copies it back; both on the stream that computes.

    In its own strides, else a copy on the card would come before (ATen's Copy.cu). gpu, sizes: as of `offloading`.
    """

    def leave(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        if tensor.nbytes:
            sizes[tensor.nbytes] += 1
        if gpu is not None:
            shape, strides, dtype = tensor.shape, tensor.stride(), tensor.dtype
            return lambda: torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        device, there = tensor.device, torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        there.copy_(tensor, non_blocking=True)
        return lambda: there.to(device, non_blocking=True)

    return leave
