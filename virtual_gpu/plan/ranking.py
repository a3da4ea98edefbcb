"""How plans are ranked: by what the reader prefers, criterion by criterion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..language import tr
from .engine import ASLEEP

if TYPE_CHECKING:
    from .plans import Plan

# preference → its criteria, the weightiest first. fidelity: what changes training least; speed: the shortest bound on a
# step; margin: the most memory left.
PREFERENCES = {
    "fidelity": ("change", "waits", "extra", "sent", "offloaded", "seconds", "accumulation", "sleeps", "left"),
    "speed": ("seconds", "waits", "extra", "sent", "offloaded", "change", "accumulation", "sleeps", "left"),
    "margin": ("left", "change", "waits", "extra", "sent", "offloaded", "seconds", "accumulation", "sleeps"),
}


def key(plan: Plan) -> tuple:
    """The plan's place by its request's preference: the smallest first."""
    values = {
        "change": plan.recipe.change,
        "extra": plan.extra_flops,
        "waits": plan.recipe.spread,
        "sent": plan.sent_bytes,
        "offloaded": plan.to_cpu_bytes,
        "seconds": plan.seconds or 0.0,  # of one card all or none have a bound
        "accumulation": plan.accumulation,
        "sleeps": plan.recipe.vllm == ASLEEP,
        "left": -plan.left_bytes,
    }
    return tuple(values[name] for name in PREFERENCES[plan.request.prefer])


def criteria(prefer: str = "fidelity") -> tuple[str, ...]:
    """What the ranking goes by, in its order."""
    labels = {
        "change": tr(ko="학습 방법을 더 많이 바꾼다", en="changes training more"),
        "extra": tr(ko="추가 연산이 많다", en="more extra work"),
        "waits": tr(ko="GPU들이 차례를 기다린다", en="GPUs wait for each other"),
        "sent": tr(ko="GPU끼리 보내는 양이 많다", en="GPUs send more"),
        "offloaded": tr(ko="CPU와 주고받는 양이 많다", en="more goes to the CPU and back"),
        "seconds": tr(ko="시간의 하한이 길다", en="longer lower bound on time"),
        "accumulation": tr(ko="마이크로 배치가 작다", en="smaller micro-batch"),
        "sleeps": tr(ko="엔진을 재우고 깨운다", en="the engine is put to sleep and woken"),
        "left": tr(ko="남는 메모리가 적다", en="less memory left"),
    }
    return tuple(labels[name] for name in PREFERENCES[prefer])


def preference_label(prefer: str) -> str:
    """What a preference puts first, in the reader's language."""
    return {
        "fidelity": tr(ko="학습을 덜 바꾸는 것", en="what changes training least"),
        "speed": tr(ko="시간의 하한이 짧은 것", en="the shortest bound on time"),
        "margin": tr(ko="메모리가 많이 남는 것", en="what leaves most memory"),
    }[prefer]
