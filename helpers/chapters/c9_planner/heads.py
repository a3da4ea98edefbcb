"""What grouped-query models need on a T4 as transformers ships them, with each line that makes it less."""

from __future__ import annotations

from dataclasses import replace

from helpers.rows import Rows, table
from virtual_gpu.language import tr
from virtual_gpu.models.attention import REPEATED
from virtual_gpu.plan import Recipe
from virtual_gpu.plan.measure import setting_of
from virtual_gpu.plan.recipes import method_label
from virtual_gpu.plan.request import make_request
from virtual_gpu.step.predict import predict_need
from virtual_gpu.step.setting import fused_head_label, rest_label
from virtual_gpu.units import GiB


def with_each_line(*plans: tuple[str, str, bool, int]) -> Rows:
    """A row for each (model, method, checkpointing, length), one sample at a time on a T4, in GiB.

    Columns: without any line, with the one that repeats heads, with TRL's head besides, and for QLoRA with the weights
    that are not 4-bit left in 16 bits besides; the parameters are of the first.
    """
    rows = []
    for model, method, checkpointing, length in plans:
        request = make_request(model, "T4", length=length, batch=16, methods=(method,))
        setting = setting_of(request, Recipe(method, "mixed_fp16", "adamw_fused", checkpointing=checkpointing), 1, 16)
        lines = {"attention": "sdpa"}, {}, {"fused_lm_head": True}, {"fused_lm_head": True, "rest_in_fp32": False}
        shipped, repeated, fused, rest = (
            predict_need(replace(setting, **{"attention": REPEATED} | line), request.spec.compute_capability)
            for line in lines
        )
        rows.append(
            {
                "plan": f"{model.rpartition('/')[2]} · {method_label(method)}"
                + (tr(ko=" · 체크포인팅", en=" · checkpointing") if checkpointing else ""),
                "length": length,
                "shipped": shipped.card / GiB,
                "parameters": shipped.states["parameters"] / GiB,
                "repeated": repeated.card / GiB,
                "fused": fused.card / GiB,
                "rest": rest.card / GiB if method == "qlora" else None,
            }
        )
    columns = {
        "plan": (tr(ko="1 × 16", en="1 × 16"), ""),
        "length": (tr(ko="길이", en="length"), ""),
        "shipped": (tr(ko="그대로 (GiB)", en="as shipped (GiB)"), ".2f"),
        "repeated": (tr(ko="헤드를 되풀이 (GiB)", en="heads repeated (GiB)"), ".2f"),
        "fused": (f"+ {fused_head_label()} (GiB)", ".2f"),
        "rest": (f"+ {rest_label()} (GiB)", ".2f"),
        "parameters": (tr(ko="그 가운데 파라미터 (GiB)", en="parameters of them (GiB)"), ".2f"),
    }
    return table(rows, columns)
