"""Tensor parallelism in plans: which degrees a model and its GPUs allow, and what each layer's matrices are cut along.

The split is `fake_rank.split_tensors`': transformers' own plan for the blocks, by PyTorch's parallelize_module.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch

import torch

from ..errors import WrongValue
from ..language import tr
from ..models.build import build_model
from ..models.configs import cached_by_model, load_config
from ..shards.context import why_no_context
from ..shards.fake_rank import NODE, body_of, is_tied
from ..shards.layout import Layout
from ..shards.mesh import no_rotation, no_sequence
from ..shards.sequence import why_uneven

_COLUMNS, _ROWS = "colwise", "rowwise"
_SUMMED = "replicated_with_grad_allreduce"


@dataclass(frozen=True)
class TensorPlan:
    """Names of modules, as the whole model has them, `*` for a block's number.

    columns, rows: what their matrices are cut along. summed: norms of attention's heads, whole on each GPU, which sees
    its own heads alone: their gradients are added up over the group. ends: untied embedding and head, each cut along
    its columns. beyond: what the cut would leave whole or wrong; empty where the model can be trained so.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    summed: tuple[str, ...]
    ends: tuple[str, ...]
    beyond: tuple[str, ...]


@cached_by_model
def tensor_plan(model: str) -> TensorPlan:
    """How the model's layers are cut by transformers' plan, which it has (`Layout.check_model`)."""
    config = load_config(model)
    whole = build_model(config, torch.bfloat16)
    body = body_of(whole)
    prefix = next(name for name, module in whole.named_modules() if module is body)
    plan = config.base_model_tp_plan
    styles = {
        name: style for name, _ in body.named_modules() for pattern, style in plan.items() if fnmatch(name, pattern)
    }
    cut = {name.rpartition(".")[0] for name, style in styles.items() if style in (_COLUMNS, _ROWS)}
    beyond = []
    for name, module in body.named_modules():
        inside = any(name == part or name.startswith(f"{part}.") for part in cut)
        # What lies beside a cut matrix sees a part of its result; who has no weights is not trained.
        known = styles[name] in (_COLUMNS, _ROWS, _SUMMED) if name in styles else not inside
        if not known and next(module.parameters(recurse=False), None) is not None:
            beyond.append(name)
    if any(getattr(config, "activation_sparsity_pattern", None) or ()):  # Gemma 3n: of a token's whole width of an MLP
        beyond.append("activation_sparsity_pattern")

    def of(wanted: str) -> tuple[str, ...]:
        used = [pattern for pattern, style in plan.items() if style == wanted]
        return tuple(f"{prefix}.{one}" for one in used if any(fnmatch(name, one) for name in styles))

    ends = (whole.get_input_embeddings(), whole.get_output_embeddings())
    names = () if is_tied(whole) else tuple(next(n for n, m in whole.named_modules() if m is end) for end in ends)
    return TensorPlan(of(_COLUMNS), of(_ROWS), of(_SUMMED), names, tuple(beyond))


def why_not(model: str, gpus: int, degree: int) -> str:
    """Why that model is not trained by groups of so many of the GPUs; empty where it can be."""
    try:
        Layout(gpus, 3, degree).check_model(load_config(model))
        beyond = tensor_plan(model).beyond
    except WrongValue as error:
        return str(error)
    if degree > NODE or (gpus > NODE and NODE % degree):
        return tr(
            ko=f"GPU {gpus}개를 {NODE}개짜리 노드 안에서 {degree}개씩 묶을 수 없다",
            en=f"{gpus} GPUs do not make groups of {degree} within nodes of {NODE}",
        )
    if beyond:
        return tr(
            ko=f"PyTorch의 parallelize_module이 나누지 못하는 것이 있다: {beyond[0]}",
            en=f"PyTorch's parallelize_module does not split all of it: {beyond[0]}",
        )
    return ""


def why_whole_tokens(model: str, length: int, degree: int) -> str:
    """Why groups of so many GPUs do not share the tokens of that model too; empty where they do."""
    return why_uneven(length, degree) or no_sequence(load_config(model))


def in_nodes(gpus: int, degree: int) -> bool:
    """Whether groups of so many of the GPUs stay in nodes."""
    return gpus % degree == 0 and degree <= NODE and (gpus <= NODE or NODE % degree == 0)


def why_whole_texts(model: str, gpus: int, length: int, degree: int) -> str:
    """Why no groups of so many of the GPUs share a text of that model; empty where they can."""
    if not in_nodes(gpus, degree):
        return tr(
            ko=f"GPU {gpus}개를 {NODE}개짜리 노드 안에서 {degree}개씩 묶을 수 없다",
            en=f"{gpus} GPUs do not make groups of {degree} within nodes of {NODE}",
        )
    return why_no_context(load_config(model), length, degree) or no_rotation(load_config(model))


def degrees_of(model: str, gpus: int) -> tuple[int, ...]:
    """The degrees above 1 by which that model can be split among so many GPUs, the smallest first."""
    return tuple(degree for degree in range(2, min(NODE, gpus) + 1) if not why_not(model, gpus, degree))


def gpus_by_node(gpus: int) -> tuple[int, int]:
    """(machines, GPUs of each), NODE of them at most."""
    each = next(each for each in range(min(NODE, gpus), 0, -1) if gpus % each == 0)
    return gpus // each, each
