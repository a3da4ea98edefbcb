"""What grouped-query models need on a T4 as transformers ships sdpa, and with the one line that repeats their heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from helpers.rows import Rows, table
from virtual_gpu.language import tr
from virtual_gpu.plan import Recipe
from virtual_gpu.plan.measure import setting_of
from virtual_gpu.plan.plans import make_request, method_label
from virtual_gpu.step.predict import Need, predict_need
from virtual_gpu.units import GiB


@contextmanager
def repeated_heads() -> Iterator[None]:
    """transformers repeats keys and values for every head, as it does where sdpa would not take fewer."""
    from transformers.integrations import sdpa_attention

    shipped = sdpa_attention.use_gqa_in_sdpa
    sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False
    try:
        yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = shipped


def with_repeated_heads(*plans: tuple[str, str, bool, int]) -> Rows:
    """A row for each (model, method, checkpointing, length), one sample at a time on a T4: GiB without the line and
    with it, and the parameters of them.
    """
    rows = []
    for model, method, checkpointing, length in plans:
        shipped = _need(model, method, checkpointing, length)
        with repeated_heads():
            repeated = _need(model, method, checkpointing, length)
        rows.append(
            {
                "plan": f"{model.rpartition('/')[2]} · {method_label(method)}"
                + (tr(ko=" · 체크포인팅", en=" · checkpointing") if checkpointing else ""),
                "length": length,
                "shipped": shipped.card / GiB,
                "repeated": repeated.card / GiB,
                "parameters": shipped.states["parameters"] / GiB,
            }
        )
    columns = {
        "plan": (tr(ko="1 × 16", en="1 × 16"), ""),
        "length": (tr(ko="길이", en="length"), ""),
        "shipped": (tr(ko="그대로 (GiB)", en="as shipped (GiB)"), ".2f"),
        "repeated": (tr(ko="한 줄을 적으면 (GiB)", en="with the line (GiB)"), ".2f"),
        "parameters": (tr(ko="그 가운데 파라미터 (GiB)", en="parameters of them (GiB)"), ".2f"),
    }
    return table(rows, columns)


def _need(model: str, method: str, checkpointing: bool, length: int) -> Need:
    request = make_request(model, "T4", length=length, batch=16, methods=(method,))
    setting = setting_of(request, Recipe(method, "mixed_fp16", "adamw_fused", checkpointing=checkpointing), 1, 16)
    # Not what is remembered of it: that does not know of the line, and would keep what it changes.
    return predict_need.__wrapped__(setting, request.spec.compute_capability)
