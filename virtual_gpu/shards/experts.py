"""Experts on GPUs of their own, by transformers' plan: which models have one, and what of them is dealt out."""

from __future__ import annotations

from dataclasses import fields
from fnmatch import fnmatch
from typing import Any

import torch

from ..language import tr
from ..models.build import build_model
from ..models.configs import running
from ..remembered import remembered
from .fake_rank import NODE
from .ledger import ConfigKey

SINCE = "5.23"  # of transformers: `ep_size`


def why_no_experts(config: Any, gpus: int, degree: int) -> str:
    """Why the experts of this model do not lie on groups of so many GPUs; empty where they do."""
    if not has_experts():  # whose plans say it otherwise
        return tr(ko=f"transformers {SINCE}부터 센다", en=f"needs transformers {SINCE}")
    experts = _experts(ConfigKey.of(config))
    if not experts:
        return tr(
            ko="transformers에 이 모델의 전문가를 나누는 계획(base_model_ep_plan의 ep_dispatch_experts)이 없다",
            en="transformers has no plan for experts of this model (ep_dispatch_experts in base_model_ep_plan)",
        )
    if gpus % degree or any(number % degree for number in experts):
        return tr(
            ko=f"GPU {gpus}개와 전문가 {experts[0]}개가 모두 {degree}로 나누어떨어져야 한다",
            en=f"{degree} has to divide {gpus} GPUs and {experts[0]} experts",
        )
    if degree > NODE or NODE % degree:
        return tr(
            ko=f"한 컴퓨터(GPU {NODE}개) 안의 같은 묶음만 센다. {NODE}을 나누는 수로 한다",
            en=f"counted in equal groups within one machine of {NODE} GPUs: a number that divides {NODE}",
        )
    return ""


def dispatched(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules whose parameters are experts (first dimension), by transformers' plan."""
    plan = getattr(model, "ep_plan", None) or {}
    patterns = [name for name, style in plan.items() if style == "ep_dispatch_experts"]
    return [module for name, module in model.named_modules() if any(fnmatch(name, pattern) for pattern in patterns)]


@remembered
def _experts(model: ConfigKey) -> tuple[int, ...]:
    """How many experts a layer has, of each kind of layer; none where transformers has no plan for them."""
    with running(model.config.model_type):
        built = build_model(model.config, torch.bfloat16)
    return tuple({p.shape[0] for module in dispatched(built) for p in module.parameters() if p.dim() > 2})


def has_experts() -> bool:
    """Whether the transformers that is installed deals experts out so."""
    try:
        from transformers.distributed import DistributedConfig
    except ImportError:
        return False
    return "ep_size" in {field.name for field in fields(DistributedConfig)}
