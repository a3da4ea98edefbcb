"""The ways in which GPUs share a model beside ZeRO: their names, and what each was not run together with."""

from __future__ import annotations

from typing import Any

import torch

from ..cards import GPUSpec
from ..errors import WrongValue
from ..language import language, tr
from ..models.build import build_model
from ..remembered import remembered
from .context import why_no_context, why_no_rotation
from .layout import Layout
from .ledger import ConfigKey
from .sequence import why_no_sequence, why_uneven


def copies_label(replicas: int | str = "") -> str:
    """FSDP2 over a mesh of two dimensions, with so many copies of the model, in the reader's language."""
    return tr(ko=f"HSDP {replicas}벌", en=f"HSDP, {replicas} copies") if replicas else "HSDP"


def tensor_label(degree: int | str = "") -> str:
    """Tensor parallelism of that degree in the reader's language."""
    return f"{tr(ko='텐서 병렬', en='tensor parallel')} {degree}".rstrip()


def sequence_label() -> str:
    """Sequence parallelism in the reader's language."""
    return tr(ko="시퀀스 병렬", en="sequence parallel")


def context_label(degree: int | str = "") -> str:
    """Context parallelism of that degree in the reader's language."""
    return f"{tr(ko='컨텍스트 병렬', en='context parallel')} {degree}".rstrip()


def mesh_labels(way: Any) -> list[str]:
    """How the GPUs of a `Layout`, or of a plan's recipe, share the work beside ZeRO, in the reader's language."""
    parts = [copies_label(way.replicas)] if way.replicas > 1 else []
    parts += [tensor_label(way.tensor_parallel)] if way.tensor_parallel > 1 else []
    parts += [sequence_label()] if way.sequence_parallel else []
    return parts + ([context_label(way.context_parallel)] if way.context_parallel > 1 else [])


def stages_label(stages: int = 0) -> str:
    """Of stages, of so many, in the reader's language."""
    number = f" {stages}" if stages else ""
    return tr(ko=f"파이프라인 병렬{number}", en=f"pipeline parallel{number}")


def experts_label(degree: int = 0) -> str:
    """Expert parallelism of that degree in the reader's language."""
    number = f" {degree}" if degree else ""
    return tr(ko=f"전문가 병렬{number}", en=f"expert parallel{number}")


def check_mesh(
    config: Any, layout: Layout, *, length: int, precision: str, spec: GPUSpec, adapters: bool, objective: str,
    fused_lm_head: bool, padded: bool,
) -> None:  # fmt: skip
    """WrongValue for what was not run with several copies of a model, or with tokens that GPUs share."""
    apart = tr(ko="함께 실행해 보지 않은 것이 있다", en="not run together with")
    others = {"peft": adapters, f"objective={objective!r}": objective != "sft"}
    if layout.replicas > 1:
        _refuse(f"replicas={layout.replicas}", _named(apart, others))
    others["fused_lm_head=True"] = fused_lm_head and objective == "sft"
    if layout.sequence_parallel:
        why = _named(apart, others) or why_uneven(length, layout.tensor_parallel)
        _refuse("sequence_parallel=True", why or no_sequence(config))
    if layout.context_parallel > 1:
        no_bf16 = tr(ko=f"{spec.name}(bf16이 없다)", en=f"{spec.name} (no bf16)")
        others |= {"padded=True": padded, f"stage={layout.stage}": layout.stage != 3}
        others |= {f"precision={precision!r}": precision == "fp32", no_bf16: not spec.has_bf16}  # flash attention
        why = _named(apart, others) or why_no_context(config, length, layout.context_parallel)
        _refuse(f"context_parallel={layout.context_parallel}", why or no_rotation(config))


def _named(why: str, others: dict[str, bool]) -> str:
    found = [name for name, there in others.items() if there]
    return f"{why}: {', '.join(found)}" if found else ""


def _refuse(what: str, why: str) -> None:
    if why:
        raise WrongValue(f"{what}: {why}")


def no_sequence(config: Any) -> str:
    """Why a model of this configuration shares no tokens between its matrices (`sequence`); empty where it can."""
    return _no_sequence(ConfigKey.of(config), language())


def no_rotation(config: Any) -> str:
    """Why a model of this configuration has no attention that GPUs share a text in (`context`); empty where it has."""
    return _no_rotation(ConfigKey.of(config), language())


# What is remembered is a text: in one language it is not the answer in the other.
@remembered
def _no_sequence(key: ConfigKey, _language: str) -> str:
    return why_no_sequence(build_model(key.config, torch.bfloat16))


@remembered
def _no_rotation(key: ConfigKey, _language: str) -> str:
    return why_no_rotation(build_model(key.config, torch.bfloat16))
