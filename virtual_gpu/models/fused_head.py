"""TRL's fused head: logits in tiles, in forward and again in backward, so that all of them never lie there at once.

TRL 1.16, which does this to every model that SFTTrainer trains: `add_fused_lm_head` in trl/trainer/utils.py, tiles of
4,096 tokens by 32,768 words in trl/kernels/chunked_logprob.py. Two Triton kernels fold a tile into statistics of its
tokens, in place; what is allocated, the Python around them allocates. On a card TRL takes them where Triton is there,
which comes with PyTorch for CUDA on Linux; so a virtual card takes them, and runs neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
    """Whether a TRL is installed whose head is known here."""
    return _installed_between(SINCE)


def has_logits_by_row() -> bool:
    """Whether a TRL is installed whose DPO makes whole logits in the order that is known here (see `step.pairs`)."""
    return _installed_between("1.6", "1.14")


def _installed_between(first: str, end: str | None = None) -> bool:
    """Whether a TRL from the one version on is installed, and before the other."""
    try:
        there = version(metadata.version("trl"))
    except metadata.PackageNotFoundError:
        return False
    return version(first) <= there and (end is None or there < version(end))


def require_fused_head() -> None:
    """ImportError, with what to install, where there is none."""
    if not has_fused_head():
        raise ImportError(
            tr(
                ko=f"fused_lm_head=True: TRL {SINCE}부터 쓴다. \"pip install 'trl>={SINCE}'\"로 설치한 뒤 커널을 다시 "
                "시작한다.",
                en=f"fused_lm_head=True: needs TRL {SINCE}. \"pip install 'trl>={SINCE}'\", then restart the kernel.",
            )
        )


def can_fuse_head(model: nn.Module) -> bool:
    """Whether TRL's head gives this model's logits: what its backbone and its output embedding alone make.

    Where more comes between or after them, TRL's loss is another one: of some 130 causal architectures of transformers
    5.23, built small, it differed in those that are refused here.
    """
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    linear = getattr(head, "original_module", head)  # of peft's copy in `modules_to_save`
    if model.base_model is model or not isinstance(linear, nn.Linear) or config.model_type in _SHIFTS_NOT:
        return False
    if any(getattr(config, name, None) is not None for name in _LOGITS_CHANGED):
        return False
    used = {id(parameter) for part in (model.base_model, head) for parameter in part.parameters()}
    return all(id(parameter) in used for parameter in model.parameters())


# What the configuration says of the logits, and TRL does not read (it reads `final_logit_softcapping` and the scales).
_LOGITS_CHANGED = (
    "logits_soft_cap", "output_logit_soft_cap", "unpadded_vocab_size", "logits_mup_width_multiplier",
)  # fmt: skip
_SHIFTS_NOT = ("cpmant",)  # its loss takes the labels as they stand


@contextmanager
def fused_head(
    model: nn.Module, virtual: bool, outputs: Sequence[str] = ("log_probs",), some: bool = False
) -> Iterator[None]:
    """Inside, the model's forward takes `fused_lm_head=True`.

    virtual: it lies on a virtual GPU. outputs: what the head leaves of each token, by TRL's names. some: see
    `as_on_cuda`. ImportError without TRL, WrongValue for a model whose logits TRL does not make.
    """
    require_fused_head()
    model = _under_adapters(model)
    if getattr(model.config, "is_encoder_decoder", False) or not can_fuse_head(model):
        raise WrongValue(
            tr(
                ko=f"fused_lm_head=True: TRL의 머리로는 {type(model).__name__}의 로짓을 만들 수 없다.",
                en=f"fused_lm_head=True: TRL's head does not make the logits of {type(model).__name__}.",
            )
        )
    from trl.trainer import add_fused_lm_head

    before = vars(model).get("forward")  # accelerate's, where a hook is on the model
    add_fused_lm_head(model, outputs=tuple(outputs))
    try:
        with as_on_cuda(some) if virtual else nullcontext():
            yield
    finally:
        del model.forward
        if before is not None:
            model.forward = before


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
def as_on_cuda(some: bool = False) -> Iterator[None]:
    """Inside, TRL does with tensors of a virtual GPU, which call themselves the CPU's, what it does with CUDA's.

    But for one thing: on CUDA it picks the tokens that have a loss by a mask, and which they are is in values that are
    not there. All of them count here, as where nothing is padding; some: those that the GPU's `answers.chosen` say.
    """
    stand_ins = STAND_INS | {"_addmm_fp32": _addmm_fp32, "_use_triton": lambda device: True}
    with mock.patch.multiple("trl.kernels.chunked_logprob", create=True, **stand_ins):
        if not some:
            yield
            return
        with mock.patch("trl.trainer.utils._use_triton", lambda device: True):
            yield
