"""TRL's fused head: logits in tiles, in forward and again in backward, so that all of them never lie there at once.

TRL 1.16, which does this to every model that SFTTrainer trains: `add_fused_lm_head` in trl/trainer/utils.py, tiles of
4,096 tokens by 32,768 words in trl/kernels/chunked_logprob.py. Two Triton kernels fold a tile into statistics of its
tokens, in place; what is allocated, the Python around them allocates. On a card TRL takes them where Triton is there,
which comes with PyTorch for CUDA on Linux; so a virtual card takes them, and runs neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from ..errors import WrongValue
from ..language import tr
from ..rules.registry import version

SINCE = "1.16"


def has_fused_head() -> bool:
    """Whether a TRL is installed that has one."""
    try:
        return version(metadata.version("trl")) >= version(SINCE)
    except metadata.PackageNotFoundError:
        return False


def require_fused_head() -> None:
    """ImportError, with what to install, where there is none."""
    if not has_fused_head():
        raise ImportError(
            tr(
                ko=f"fused_lm_head=True: TRL {SINCE}부터 있다. \"pip install 'trl>={SINCE}'\"로 설치한 뒤 커널을 다시 "
                "시작한다.",
                en=f"fused_lm_head=True: it comes with TRL {SINCE}. \"pip install 'trl>={SINCE}'\", then restart the "
                "kernel.",
            )
        )


def add_fused_head(model: nn.Module) -> None:
    """Let the model's forward take `fused_lm_head=True`; ImportError without TRL, WrongValue for an encoder-decoder."""
    require_fused_head()
    model = _under_adapters(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise WrongValue(
            tr(
                ko=f"fused_lm_head=True: TRL의 머리는 인코더-디코더({type(model).__name__})에는 없다.",
                en=f"fused_lm_head=True: TRL has no such head for an encoder-decoder ({type(model).__name__}).",
            )
        )
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model)


def remove_fused_head(model: nn.Module) -> None:
    """Give the model the forward of its class back."""
    vars(_under_adapters(model)).pop("forward", None)


def _under_adapters(model: nn.Module) -> nn.Module:
    """The causal model itself, of which peft's adapters are a wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class _Kernel:
    """A Triton kernel that is asked for by its grid, `kernel[grid](...)`, and not run."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: None


# What of trl.kernels.chunked_logprob is other in a program that finds a virtual card.
STAND_INS = {
    "_forward_kernel": _Kernel(),
    "_backward_kernel": _Kernel(),
    "_TRITON_AVAILABLE": True,
    "triton": SimpleNamespace(cdiv=lambda a, b: -(-a // b)),
}


def _addmm_fp32(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """TRL's own of CUDA: no copies of half-precision factors in fp32."""
    if a.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc)
    else:
        acc.addmm_(a, b)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Inside, TRL does with tensors of a virtual GPU, which call themselves the CPU's, what it does with CUDA's.

    But for one thing: on CUDA it picks the tokens that have a loss by a mask, and which they are is in values that are
    not there. All of them count here, as where nothing is padding.
    """
    stand_ins = STAND_INS | {"_addmm_fp32": _addmm_fp32, "_use_triton": lambda device: True}
    with mock.patch.multiple("trl.kernels.chunked_logprob", create=True, **stand_ins):
        yield
