"""A plan as files that train so, of several kinds: which there are, and which of them can say a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import NotSupported
from ...language import tr
from ...units import choose
from . import accelerate_loop, deepspeed_trainer, torch_loop, trainer, trl_sft

if TYPE_CHECKING:
    from ..plans import Plan

_KINDS = {
    "trainer": trainer,
    "torch": torch_loop,
    "accelerate": accelerate_loop,
    "trl": trl_sft,
    "deepspeed": deepspeed_trainer,
}
KINDS = tuple(_KINDS)


def kind_named(kind: Any) -> str:
    """One of KINDS, by its name in any case; UnknownName lists them."""
    return choose(kind, KINDS, tr(ko="파일 종류", en="kind of files"))


def names_of(kind: str) -> tuple[str, ...]:
    """What files of a kind may be called, all of them."""
    return _KINDS[kind_named(kind)].NAMES


def files_of(plan: Plan, kind: str = "trainer") -> dict[str, str]:
    """name → text of the files of a kind; NotSupported where it cannot say this plan, with the kinds that can."""
    kind = kind_named(kind)
    reason = _KINDS[kind].cannot(plan)
    if reason:
        able = ", ".join(name for name, module in _KINDS.items() if not module.cannot(plan))
        raise NotSupported(
            tr(
                ko=f"{kind}: 이 계획({plan.title})을 파일로 쓸 수 없다. {reason}. 쓸 수 있는 종류: {able}",
                en=f"{kind}: no files for this plan ({plan.title}): {reason}. Kinds that can: {able}",
            )
        )
    return _KINDS[kind].files(plan)
