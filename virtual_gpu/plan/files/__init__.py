"""A plan as files that train so, of several kinds: which there are, and which of them can say a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import NotSupported
from ...language import tr
from ...units import choose
from . import accelerate_loop, deepspeed_trainer, torch_loop, trainer, trl_dpo, trl_grpo, trl_sft

if TYPE_CHECKING:
    from ..plans import Plan

_KINDS = {
    "trainer": trainer,
    "torch": torch_loop,
    "accelerate": accelerate_loop,
    "trl": trl_sft,
    "deepspeed": deepspeed_trainer,
}
_OF_TRL = {"dpo": trl_dpo, "grpo": trl_grpo}  # whose loss is in a trainer of TRL's alone
KINDS = tuple(_KINDS)


def kind_named(kind: Any) -> str:
    """One of KINDS, by its name in any case; UnknownName lists them."""
    return choose(kind, KINDS, tr(ko="파일 종류", en="kind of files"))


def names_of(kind: str) -> tuple[str, ...]:
    """What files of a kind may be called, all of them."""
    return _KINDS[kind_named(kind)].NAMES


def default_kind(objective: str) -> str:
    """The kind of files that is written where none is asked for."""
    return "trl" if objective in _OF_TRL else KINDS[0]


def check_kind(kind: str, objective: str) -> str:
    """The kind's name; NotSupported for one whose loss is not the objective's."""
    kind = kind_named(kind)
    if objective in _OF_TRL and kind != default_kind(objective):
        why = _of_another_loss(objective)
        raise NotSupported(
            tr(
                ko=f"{kind}: {why}. 쓸 수 있는 종류: {default_kind(objective)}",
                en=f"{kind}: {why}. Kinds that can: {default_kind(objective)}",
            )
        )
    return kind


def files_of(plan: Plan, kind: str | None = None) -> dict[str, str]:
    """name → text of the files of a kind; NotSupported where it cannot say this plan, with the kinds that can.

    None: `default_kind`, or where that one cannot the first that can.
    """
    if kind is None:
        kind = default_kind(plan.request.objective)
        kind = next((name for name in (kind, *KINDS) if not _cannot(plan, name)), kind)
    kind = kind_named(kind)
    reason = _cannot(plan, kind)
    if reason:
        able = ", ".join(name for name in KINDS if not _cannot(plan, name))
        raise NotSupported(
            tr(
                ko=f"{kind}: 이 계획({plan.title})을 파일로 쓸 수 없다. {reason}. 쓸 수 있는 종류: {able}",
                en=f"{kind}: no files for this plan ({plan.title}): {reason}. Kinds that can: {able}",
            )
        )
    return _OF_TRL.get(plan.request.objective, _KINDS[kind]).files(plan)


def _cannot(plan: Plan, kind: str) -> str:
    """Why files of that kind could not train as the plan says; empty where they can."""
    objective = plan.request.objective
    if objective in _OF_TRL:
        return "" if kind == default_kind(objective) else _of_another_loss(objective)
    if plan.recipe.tensor_parallel > 1 and kind != "torch":
        return tr(
            ko="텐서 병렬은 PyTorch의 parallelize_module로 나누는 루프에서만 실행해 보았다",
            en="tensor parallelism was run in a loop with PyTorch's parallelize_module alone",
        )
    if plan.recipe.context_parallel > 1 and kind != "torch":
        return tr(
            ko="컨텍스트 병렬은 PyTorch의 context_parallel을 쓰는 루프에서만 실행해 보았다",
            en="context parallelism was run in a loop with PyTorch's context_parallel alone",
        )
    if plan.recipe.pipeline_parallel > 1 and kind != "torch":
        return tr(
            ko="파이프라인 병렬은 PyTorch의 pipelining을 쓰는 루프에서만 실행해 보았다",
            en="pipeline parallelism was run in a loop with PyTorch's pipelining alone",
        )
    if plan.recipe.expert_parallel > 1 and kind != "torch":
        return tr(
            ko="전문가 병렬은 transformers의 DistributedConfig를 쓰는 루프에서만 실행해 보았다",
            en="expert parallelism was run in a loop with transformers' DistributedConfig alone",
        )
    if plan.recipe.spread and kind != "trainer":
        return tr(
            ko="층을 카드에 나눈 모델은 Trainer로만 실행해 보았다",
            en="a model whose layers are spread over cards was run by the Trainer alone",
        )
    return _KINDS[kind].cannot(plan)


def _of_another_loss(objective: str) -> str:
    name = objective.upper()
    return tr(ko=f"{name}의 손실은 TRL의 {name}Trainer에 있다", en=f"{name}'s loss is in TRL's {name}Trainer")
