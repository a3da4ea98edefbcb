"""The recipes that a request allows, and what is not tried at all, with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..language import tr
from ..models import offloaded
from ..models.adapters import copies_tied_end
from ..models.build import build_model
from ..models.configs import cached_by_model, load_config
from ..models.fused_head import SINCE, has_fused_head
from ..shards.experts import why_no_experts
from ..shards.mesh import (
    context_label,
    copies_label,
    experts_label,
    sequence_label,
    stages_label,
    tensor_label,
)
from ..shards.stages import why_no_stages
from ..step.optimizers import needs_cuda
from ..step.own_code import OURS, beside_4_bits, steps_in_backward, too_early, trains_all
from ..step.setting import fused_head_label, rest_label
from ..units import human_bytes
from .engine import ASLEEP, AWAKE, why_no_engine
from .host import states_beyond
from .recipes import Recipe, cpu_offload_label, method_label, not_together
from .tensors import NODE, degrees_of, gpus_by_node, why_not, why_whole_texts, why_whole_tokens

if TYPE_CHECKING:
    from .request import Request


def why_not_split(request: Request) -> str:
    """Why nothing of the request is tried with tensor parallelism, whatever the degree; empty where something is."""
    return _of_full_alone(request, "텐서 병렬은", "tensor parallelism") or _with_adamw_alone(
        request, "텐서 병렬은", "tensor parallelism"
    )


def _of_full_alone(request: Request, ko: str, en: str) -> str:
    """Why what is so called is not counted of the request's methods and objective; empty where it is."""
    if "full" in request.methods and request.objective == "sft":
        return ""
    return tr(
        ko=f"{ko} SFT의 전체 미세 조정에서만 센다(DPO, GRPO, LoRA, QLoRA는 세지 않는다)",
        en=f"{en} is counted of SFT's full fine-tuning alone, not of DPO, GRPO, LoRA or QLoRA",
    )


def _with_adamw_alone(request: Request, ko: str, en: str) -> str:
    """Why what is so called is not counted in the request's precision and with its optimizer; empty where it is."""
    if not _in_fp16(request) and request.optimizer in (None, "adamw_fused"):
        return ""
    return tr(
        ko=f"{ko} bf16이나 fp32에서 AdamW(adamw_fused)만 센다",
        en=f"{en} is counted in bf16 or fp32, with AdamW (adamw_fused)",
    )


def why_not_with_optimizer(request: Request, method: str) -> str:
    """Why nothing of a method is tried with the optimizer that was asked for; empty where something is."""
    optimizer = request.optimizer
    if optimizer is None or not needs_cuda(optimizer, request.optim_args):
        return ""
    if trains_all(optimizer) and method != "full":
        return tr(ko="어댑터가 아니라 가중치를 학습하는 옵티마이저다", en="an optimizer of weights, not of adapters")
    if request.pairs and optimizer in OURS:
        return tr(ko="DPOConfig의 optim으로는 고를 수 없는 옵티마이저다", en="DPOTrainer has no name for it")
    if request.grpo:
        return tr(ko="GRPO와 함께는 세지 않는다", en="not counted of GRPO")
    if method == "qlora":
        return beside_4_bits()
    if steps_in_backward(optimizer) and request.gpus > 1:
        return too_early()
    if steps_in_backward(optimizer) and "fp16" in (request.precision or ""):
        return tr(
            ko="fp16의 GradScaler와 함께 쓸 수 없다. bf16이나 fp32로 한다",
            en="it does not go together with fp16's GradScaler: bf16 or fp32",
        )
    return ""


def why_no_way(request: Request) -> str:
    """Why the optimizer that was asked for leaves none of the methods; empty where it leaves one."""
    of: dict[str, list[str]] = {}
    for method in request.methods:
        of.setdefault(why_not_with_optimizer(request, method), []).append(method_label(method))
    return "; ".join(f"{', '.join(methods)}: {why}" for why, methods in of.items()) if all(of) else ""


def why_not_copies(request: Request) -> str:
    """Why nothing of the request is tried with several copies of the model (HSDP); empty where something is."""
    copies, gpus = request.replicas or gpus_by_node(request.gpus)[0], request.gpus
    if why := _of_full_alone(request, "HSDP는", "HSDP") or _with_adamw_alone(request, "HSDP는", "HSDP"):
        return why
    if (request.tensor_parallel or 1) > 1:
        return tr(ko="텐서 병렬과 함께 실행해 보지 않았다", en="not run together with tensor parallelism")
    if gpus % copies or gpus // copies < 2:
        return tr(
            ko=f"GPU {gpus}개를 {copies}벌로 똑같이 나누어 한 벌에 2개 이상씩 줄 수 없다",
            en=f"{gpus} GPUs do not make {copies} copies of two GPUs or more each",
        )
    return ""


def why_not_in_parts(request: Request) -> str:
    """Why nothing of the request is tried with context parallelism, whatever the degree; empty where something is."""
    if why := _of_full_alone(request, "컨텍스트 병렬은", "context parallelism"):
        return why
    if "bf16" not in (request.precision or ("bf16" if request.spec.has_bf16 else "")):
        return tr(
            ko="컨텍스트 병렬의 어텐션은 플래시 어텐션이고, bf16에서만 센다",
            en="context parallelism goes by flash attention, and is counted in bf16 alone",
        )
    if request.optimizer not in (None, "adamw_fused"):
        return tr(ko="AdamW(adamw_fused)만 센다", en="only AdamW (adamw_fused) is counted")
    if (request.tensor_parallel or 1) * (request.replicas or 1) > 1:
        return tr(
            ko="텐서 병렬이나 HSDP와 함께 실행해 보지 않았다", en="not run together with tensor parallelism or HSDP"
        )
    return ""


def why_not_in_stages(request: Request) -> str:
    """Why nothing of the request is tried in the stages that it asks for; empty where it is."""
    if why := _of_full_alone(request, "파이프라인 병렬은", "pipeline parallelism") or _with_adamw_alone(
        request, "파이프라인 병렬은", "pipeline parallelism"
    ):
        return why
    stages = request.pipeline_parallel or 1
    others = (request.tensor_parallel or 1) * (request.context_parallel or 1) * (request.replicas or 1)
    if others > 1 or request.device_map:
        return not_together()
    if request.gpus % stages:
        return tr(
            ko=f"GPU {request.gpus}개를 스테이지 {stages}개에 똑같이 나눌 수 없다",
            en=f"{request.gpus} GPUs are not equal parts of {stages} stages",
        )
    each, (machines, node) = request.gpus // stages, gpus_by_node(request.gpus)
    if machines > 1 and node % each and each % node:
        return tr(
            ko=f"GPU {each}개짜리 스테이지가 두 컴퓨터에 걸친다(한 컴퓨터에 {node}개). 세지 않는다",
            en=f"stages of {each} GPUs would lie on two machines of {node}, which is not counted",
        )
    if request.batch // request.groups < stages:
        least = stages * request.groups
        return tr(
            ko=f"스테이지마다 마이크로 배치가 하나씩은 있어야 한다. 배치를 {least} 이상으로 한다",
            en=f"needs at least one micro-batch for each stage: a batch of {least}",
        )
    return why_no_stages(load_config(request.model), stages)


def why_not_by_experts(request: Request) -> str:
    """Why nothing of the request is tried with experts on as many GPUs as it asks for; empty where it is."""
    if why := _of_full_alone(request, "전문가 병렬은", "expert parallelism") or _with_adamw_alone(
        request, "전문가 병렬은", "expert parallelism"
    ):
        return why
    others = (request.tensor_parallel, request.context_parallel, request.replicas, request.pipeline_parallel)
    if any((degree or 1) > 1 for degree in others) or request.device_map:
        return not_together()
    return why_no_experts(load_config(request.model), request.gpus, request.expert_parallel or 1)


def why_not_spread(request: Request) -> str:
    """Why nothing of the request is tried with its layers spread over the GPUs of one process; empty where it is."""
    if not 1 < request.gpus <= NODE:
        return tr(
            ko=f"한 컴퓨터에 있는 GPU 2~{NODE}개에만 층을 나눌 수 있다(GPU {request.gpus}개)",
            en=f"layers are spread over 2 to {NODE} GPUs of a machine, not {request.gpus}",
        )
    if request.objective != "sft":
        return tr(ko=f"{request.objective.upper()}에서는 세지 않는다", en=f"not counted of {request.objective.upper()}")
    if (request.tensor_parallel or 1) * (request.context_parallel or 1) * (request.replicas or 1) > 1:
        return not_together()
    if request.optimizer is not None and request.optimizer not in _SPREAD:
        names = ", ".join(_SPREAD)
        return tr(ko=f"옵티마이저는 {names}만 센다", en=f"only these optimizers are counted: {names}")
    return ""


_SPREAD = ("adamw_fused", "adamw_8bit")


def why_not_by_engine(request: Request) -> str:
    """Why no engine makes the completions of what the request trains; empty where one does."""
    if {*request.methods} == {"qlora"}:
        return _of_4_bits()
    return why_no_engine(request.model, request.spec, request.per_gpu)


def _of_4_bits() -> str:
    return tr(
        ko="4비트 가중치에 어댑터를 합쳐 vLLM에 건네는 것은 실행해 보지 않았다. full과 lora만 센다",
        en="adapters merged into 4-bit weights for vLLM were not run: only full and lora are counted",
    )


def _parts(request: Request) -> list[int]:
    """How many GPUs may share a text: as many as are asked for, or those that share it evenly within a node."""
    uneven = request.batch > request.gpus and request.batch % request.gpus
    if request.gpus == 1 or why_not_in_parts(request) or (request.context_parallel is None and uneven):
        return []
    degrees = [request.context_parallel] if request.context_parallel else range(2, NODE + 1)
    return [n for n in degrees if n > 1 and not why_whole_texts(request.model, request.gpus, request.length, n)]


def _copies(request: Request) -> list[int]:
    """How many copies of the model may be tried: those that are asked for, or one in each node, each two and so on."""
    if request.replicas == 1 or (request.replicas is None and request.gpus <= NODE) or why_not_copies(request):
        return []
    if request.replicas:
        return [request.replicas]
    found = [gpus_by_node(request.gpus)[0]]
    while found[-1] % 2 == 0 and found[-1] > 2:
        found.append(found[-1] // 2)
    return found


def recipes_of(request: Request) -> list[Recipe]:
    """Every recipe that the request allows, without checkpointing."""
    bf16 = request.spec.has_bf16
    mixed = request.precision or ("mixed_bf16" if bf16 else "mixed_fp16")
    optimizer, found = request.optimizer or "", []
    if steps_in_backward(optimizer) and request.precision is None and not bf16:
        mixed = "fp32"  # there is no step to which a scaler could tell that fp16 has overflowed
    for method in request.methods:
        if why_not_with_optimizer(request, method):
            continue
        precisions, optimizers = [mixed], [request.optimizer or "adamw_fused"]
        if method == "full":
            precisions += ["bf16"] if bf16 and request.precision is None and request.objective == "sft" else []
            optimizers += [] if request.optimizer else ["adamw_8bit"]
        found += [Recipe(method, precision, optimizer) for precision in precisions for optimizer in optimizers]
        if method == "qlora" and mixed != "fp32":
            found.append(Recipe(method, mixed, optimizers[0], rest_in_fp32=False))
    if request.objective != "sft":  # TRL's head is fused whatever is asked, what is beside 4 bits stays in 16
        found = [r for r in found if r.method != "qlora" or not r.rest_in_fp32 or mixed == "fp32"]
        found = [replace(r, fused_lm_head=True) for r in found]
    if request.pairs:
        found += [replace(r, reference="precomputed") for r in found if r.method == "full"]
    if request.vllm:
        ways = (AWAKE, ASLEEP) if request.vllm == AWAKE else (request.vllm,)
        found = [replace(r, vllm=way) for r in found if r.method != "qlora" for way in ways]
    spread = [replace(r, spread=True) for r in found] if request.device_map and not why_not_spread(request) else []
    shards = [r for r in found if r.method == "full" and r.optimizer == "adamw_fused" and "fp16" not in r.precision]
    on_cpu = request.cpu_offload and request.objective == "sft"
    offloaded = [replace(recipe, stage=3, cpu_offload=True) for recipe in shards] if on_cpu else []
    offloaded = [recipe for recipe in offloaded if not states_beyond(request, recipe)]
    if request.gpus > 1 and not _why_no_zero(request):
        found += [replace(recipe, stage=stage) for stage in (2, 3) for recipe in shards]
        adapters = [r for r in found if r.method != "full" and r.optimizer == "adamw_fused" and "mixed" in r.precision]
        if not request.pairs:
            adapters = [r for r in adapters if r.rest_in_fp32]  # of shards the rest is never upcast (`shards.adapters`)
        found += [replace(recipe, stage=3) for recipe in adapters]
    for copies in _copies(request):
        found += [replace(recipe, stage=3, replicas=copies) for recipe in shards]
    for degree in _degrees(request):
        stages = (2, 3) if degree < request.gpus else (3,)  # of one rank nothing is split
        tokens = request.sequence_parallel and not why_whole_tokens(request.model, request.length, degree)
        cut = {"tensor_parallel": degree, "sequence_parallel": tokens}
        found += [replace(recipe, stage=stage, **cut) for stage in stages for recipe in shards]
    if (stages := request.pipeline_parallel or 1) > 1 and not why_not_in_stages(request):
        zeros = (2, 3) if stages < request.gpus else (3,)
        found += [replace(recipe, stage=zero, pipeline_parallel=stages) for zero in zeros for recipe in shards]
    if (experts := request.expert_parallel or 1) > 1 and not why_not_by_experts(request):
        found += [replace(recipe, stage=3, expert_parallel=experts) for recipe in shards]
    halves = [recipe for recipe in shards if "bf16" in recipe.precision]
    for degree in _parts(request):
        found += [replace(recipe, stage=3, context_parallel=degree) for recipe in halves]
    found += spread + offloaded
    return [recipe for recipe in found if request.allows(recipe) and not why_not_whole(request, recipe)]


@cached_by_model
def copies_end(model: str, names: tuple[str, ...]) -> bool:
    """`copies_tied_end` of a model by its name."""
    return copies_tied_end(build_model(load_config(model), torch.bfloat16), names)


def why_not_whole(request: Request, recipe: Recipe) -> str:
    """Why adapters of a recipe do not go with what is trained whole beside them; empty where they do."""
    if not request.modules_to_save or recipe.method == "full":
        return ""
    if "fp16" in recipe.precision and not (recipe.method == "qlora" and recipe.rest_in_fp32):
        return tr(
            ko="modules_to_save는 fp16 가중치째로 학습하는데, GradScaler가 거절한다",
            en="modules_to_save trains weights in fp16, which GradScaler refuses",
        )
    if recipe.stage and copies_end(request.model, request.modules_to_save):
        return tr(
            ko="출력층이 임베딩과 한 텐서라, modules_to_save로 그 사본을 학습하면서 FSDP2로 나눌 수 없다",
            en="the head is the embedding, which FSDP2 cannot split while modules_to_save trains a copy of it",
        )
    if recipe.vllm:
        return not_together()
    return ""


def _degrees(request: Request) -> tuple[int, ...]:
    """The degrees of tensor parallelism that may be tried: of a batch of some samples more, none unless asked for."""
    uneven = request.tensor_parallel is None and request.batch > request.gpus and request.batch % request.gpus
    if request.gpus == 1 or uneven or why_not_split(request):
        return ()
    return degrees_of(request.model, request.gpus)


def left_out(request: Request) -> list[tuple[str, str]]:
    """(what, why) of what is not tried at all."""
    rows = []
    if request.objective != "sft":
        rows += _why_not_with_objective(request)
    if "full" in request.methods:
        rows.append(
            (
                tr(ko="전체 미세 조정 · 순수 fp16", en="full fine-tuning · pure fp16"),
                tr(
                    ko="제대로 배우지 못한다(3장): foreach는 ε가 0이 되어 무너지고, fused도 분산이 0으로 저장된다",
                    en="it does not learn well: foreach's epsilon becomes 0, and fused stores a variance of 0",
                ),
            )
        )
    if not request.spec.has_bf16:
        rows.append(("bf16", tr(ko=f"{request.gpu}에는 bf16 연산 장치가 없다", en=f"{request.gpu} has no bf16 units")))
    if request.selective and request.objective == "sft" and request.prefer == "margin":
        what = tr(ko="남는 메모리에 결과를 남기는 것", en="results kept in what is left")
        why = tr(ko="prefer='margin'은 남는 메모리를 쓰지 않는다", en="prefer='margin' spends no memory that is left")
        rows.append((what, why))
    for method in request.methods:
        if why := why_not_with_optimizer(request, method):
            rows.append((f"{method_label(method)} · {request.optimizer}", why))
    if request.modules_to_save:
        tried = recipes_of(replace(request, modules_to_save=(), host=None))
        whys = ((_named(recipe), why_not_whole(request, recipe)) for recipe in tried)
        rows += [*dict.fromkeys((what, why) for what, why in whys if why)]
    if request.cpu_offload and request.objective == "sft":
        rows += [(f"{name} · {cpu_offload_label()}", why) for name, why in _why_not_on_cpu(request)]
    if "full" in request.methods and request.optimizer is None:
        what = tr(ko="페이지 옵티마이저", en="paged optimizers")
        rows.append((what, tr(ko="optimizer='paged_adamw_8bit'이면 센다", en="with optimizer='paged_adamw_8bit'")))
    if not offloaded.can_offload():
        what = tr(ko="체크포인트를 CPU로", en="checkpoints on the CPU")
        since = offloaded.SINCE
        rows.append((what, tr(ko=f"transformers {since}부터 센다", en=f"needs transformers {since}")))
    elif request.gpus > 1 and not offloaded.can_offload(3):
        what = tr(ko="ZeRO-2, 3 · 체크포인트를 CPU로", en="ZeRO-2, 3 · checkpoints on the CPU")
        rows.append((what, tr(ko="accelerate 1.15부터 센다", en="needs accelerate 1.15")))
    if not has_fused_head():
        rows.append((fused_head_label(), tr(ko=f"TRL {SINCE}부터 센다: pip install trl", en=f"needs TRL {SINCE}")))
    if request.gpus > 1:
        if (request.pipeline_parallel or 1) > 1:
            rows += _why_not_beside(request, stages_label())
        elif (request.expert_parallel or 1) > 1:
            rows += _why_not_beside(request, experts_label())
        else:
            rows += _why_not_together(request)
            rows += _why_whole_texts(request) + _why_no_pipeline(request) + _why_experts_gathered(request)
            rows += _why_not_in_copies(request) if request.gpus > NODE or request.replicas else []
        rows += [("ZeRO", why)] if (why := _why_no_zero(request)) else _why_not_sharded(request)
    return rows


def _named(recipe: Recipe) -> str:
    """A way to put adapters on, without how it is trained."""
    parts = [method_label(recipe.method)]
    parts += [rest_label()] if recipe.method == "qlora" and not recipe.rest_in_fp32 else []
    parts += [f"ZeRO-{recipe.stage}"] if recipe.stage else []
    return " · ".join(parts)


def _why_not_sharded(request: Request) -> list[tuple[str, str]]:
    """(what, why) of what FSDP2 splits, and is not tried."""
    rows = [(f"{method_label(method)} · ZeRO-1", _why_not_stage_1(method)) for method in request.methods]
    if request.optimizer not in (None, "adamw_fused"):
        why = tr(
            ko="나누어 가진 조각의 옵티마이저 상태는 AdamW(adamw_fused)만 센다",
            en="of split parameters only the states of AdamW (adamw_fused) are counted",
        )
        rows.append((f"ZeRO-2, 3 · {request.optimizer}", why))
    for method in (method for method in request.methods if method != "full"):
        why = tr(
            ko="모은 가중치를 통째로 둔 채 자기 조각도 가져 DDP보다 더 든다",
            en="all weights stay gathered beside the own shard: more than DDP takes",
        )
        rows.append((f"{method_label(method)} · ZeRO-2", why))
    if "full" in request.methods and not request.spec.has_bf16 and request.precision != "fp32":
        why = tr(ko="ZeRO 계산은 bf16으로만 실행해 보았다", en="the ledger was run in bf16 alone")
        rows.append((f"{method_label('full')} · ZeRO-2, 3", why))
    return rows


def _why_not_together(request: Request) -> list[tuple[str, str]]:
    """(what, why) of what is not tried with tensor parallelism, or without it; of full fine-tuning alone."""
    if "full" not in request.methods or request.tensor_parallel == 1:
        return []
    full, rows = method_label("full"), []
    if why := why_not_split(request) or ("" if _degrees(request) else why_not(request.model, request.gpus, 2)):
        return [(f"{full} · {tensor_label()}", why)]
    for method in (method for method in request.methods if method != "full"):
        why = tr(ko="전체 미세 조정만 센다", en="only full fine-tuning is counted")
        rows.append((f"{method_label(method)} · {tensor_label()}", why))
    for what, why in (
        (
            "ZeRO-1",
            tr(
                ko="PyTorch의 ZeroRedundancyOptimizer는 텐서 병렬의 파라미터(DTensor)를 받지 못한다",
                en="PyTorch's ZeroRedundancyOptimizer does not take its parameters (DTensor)",
            ),
        ),
        (
            fused_head_label(),
            tr(
                ko="TRL의 함수는 나눈 출력층의 가중치를 다시 모으므로, 로짓을 통째로 둘 때보다 더 든다",
                en="TRL's head gathers the weights of the cut head: more than whole logits take",
            ),
        ),
        *([(cpu_offload_label(), tr(ko="함께 실행해 보지 않았다", en="not run together"))] * request.cpu_offload),
    ):
        rows.append((f"{tensor_label()} · {what}", why))
    for degree in _degrees(request) if request.sequence_parallel else ():
        if request.tensor_parallel in (None, degree) and (
            why := why_whole_tokens(request.model, request.length, degree)
        ):
            rows.append((f"{tensor_label(degree)} · {sequence_label()}", why))
    if request.tensor_parallel is None and request.batch % request.gpus:
        why = tr(
            ko=f"배치 {request.batch}을(를) GPU {request.gpus}개에 똑같이 나눌 수 없다",
            en=f"a batch of {request.batch} does not divide among {request.gpus} GPUs",
        )
        rows.append((tr(ko="텐서 병렬 없이", en="without tensor parallelism"), why))
    return rows


def _why_no_pipeline(request: Request) -> list[tuple[str, str]]:
    """(what, why) of stages, of full fine-tuning alone."""
    if "full" not in request.methods or request.pipeline_parallel:
        return []
    why = tr(
        ko="스테이지 수마다 일정을 통째로 실행해야 해서 오래 걸린다. pipeline_parallel=스테이지 수를 주면 센다",
        en="not searched by default, since each number of stages is a run of its own: give pipeline_parallel=N",
    )
    return [(f"{method_label('full')} · {stages_label()}", why)]


def _why_experts_gathered(request: Request) -> list[tuple[str, str]]:
    """(what, why) of experts on GPUs of their own, where the model has some; of full fine-tuning alone."""
    if "full" not in request.methods or request.expert_parallel:
        return []
    if why_no_experts(load_config(request.model), 1, 1):
        return []
    why = tr(ko="expert_parallel=GPU 수를 주면 센다", en="with expert_parallel=N it is counted")
    return [(f"{method_label('full')} · {experts_label()}", why)]


def _why_not_beside(request: Request, label: str) -> list[tuple[str, str]]:
    """(what, why) of what is not tried with the stages or experts that were asked for."""
    others = [tensor_label(), context_label(), copies_label(), fused_head_label()]
    others += [cpu_offload_label()] * request.cpu_offload
    of_full = tr(ko="전체 미세 조정만 센다", en="only full fine-tuning is counted")
    rows = [(f"{method_label(method)} · {label}", of_full) for method in request.methods if method != "full"]
    return rows + [(f"{label} · {what}", not_together()) for what in others]


def _why_whole_texts(request: Request) -> list[tuple[str, str]]:
    """(what, why) of what is not tried with context parallelism; of full fine-tuning alone."""
    others = (request.tensor_parallel or 1) * (request.replicas or 1)
    if "full" not in request.methods or request.context_parallel == 1 or others > 1:
        return []
    if why := why_not_in_parts(request) or (
        "" if _parts(request) else why_whole_texts(request.model, request.gpus, request.length, 2)
    ):
        return [(f"{method_label('full')} · {context_label()}", why)]
    apart = tr(ko="함께 실행해 보지 않았다", en="not run together")
    others = ["ZeRO-2", tensor_label(), fused_head_label(), *[cpu_offload_label()] * request.cpu_offload]
    return [(f"{context_label()} · {what}", apart) for what in others]


def _why_not_in_copies(request: Request) -> list[tuple[str, str]]:
    """(what, why) of what is not tried with several copies of the model; of full fine-tuning alone."""
    if "full" not in request.methods or request.replicas == 1:
        return []
    if why := why_not_copies(request):
        return [(f"{method_label('full')} · {copies_label()}", why)]
    of_full = tr(ko="전체 미세 조정만 센다", en="only full fine-tuning is counted")
    rows = [(f"{method_label(method)} · {copies_label()}", of_full) for method in request.methods if method != "full"]
    apart = tr(ko="함께 실행해 보지 않았다", en="not run together")
    return rows + [(f"{copies_label()} · {what}", apart) for what in ("ZeRO-2", tensor_label(), cpu_offload_label())]


def _why_not_with_objective(request: Request) -> list[tuple[str, str]]:
    """(what, why) of what is not tried of DPO or GRPO."""
    name = request.objective.upper()
    once = tr(ko=f"{name}에서는 아직 세지 않는다", en=f"not counted of {name}")
    rows = _why_not_generated_so(request) if request.grpo else []
    if "full" in request.methods and request.spec.has_bf16 and request.precision is None:
        # Of weights from N(0, 0.02) in bf16, AdamW's first step of 1e-6 moves 2 in 100 (measured), of 5e-5 57.
        why = tr(
            ko=f"{name}의 작은 학습률(1e-6)로는 갱신이 거의 다 반올림되어 사라진다",
            en=f"of steps as small as {name}'s (1e-6) bf16 rounds nearly all away",
        )
        rows.append((tr(ko="전체 미세 조정 · 순수 bf16", en="full fine-tuning · pure bf16"), why))
    if request.selective:
        rows.append((tr(ko="남는 메모리에 결과를 남기는 것", en="results kept in what is left"), once))
    if request.cpu_offload:
        rows.append((cpu_offload_label(), once))
    return rows


def _why_not_generated_so(request: Request) -> list[tuple[str, str]]:
    """(what, why) of the ways in which GRPO's completions are not generated."""
    rows = []
    if not request.vllm:
        why = tr(
            ko=f"vllm='{AWAKE}'(같은 카드)이면 센다. 다른 GPU의 서버로 가중치를 보내는 것은 실행해 보지 않았다",
            en=f"with vllm='{AWAKE}' (on the same card); sending the weights to a server elsewhere was not run",
        )
        rows.append(("use_vllm=True", why))
    elif "qlora" in request.methods:
        rows.append((f"{method_label('qlora')} · vLLM", _of_4_bits()))
    if request.vllm and request.host is not None:
        why = tr(ko="엔진이 RAM에서 쓰는 것은 세지 않는다", en="what the engine takes of it is not counted")
        rows.append((f"vLLM · {request.host}", why))
    return [
        *rows,
        (
            "steps_per_generation",
            tr(
                ko="옵티마이저 스텝 하나의 답을 한꺼번에 만드는 것(TRL의 기본값)만 센다",
                en="the completions of an optimizer step are generated at once, as TRL does by default",
            ),
        ),
    ]


def _why_no_zero(request: Request) -> str:
    """Why ZeRO splits nothing of the request; empty where it does."""
    if request.grpo and not request.vllm:
        return tr(
            ko=f"나눈 모델이 답을 만들면 토큰마다 가중치를 모두 모은다. 실행해 보지 않았다. vllm='{AWAKE}'이면 센다",
            en="a split model that generates gathers all weights for each token, which was not run; with "
            f"vllm='{AWAKE}' it is counted",
        )
    return ""


def _in_fp16(request: Request) -> bool:
    """Whether what is trained of the weights is computed in fp16 alone."""
    return "fp16" in (request.precision or ("bf16" if request.spec.has_bf16 else "fp16"))


def _why_not_on_cpu(request: Request) -> list[tuple[str, str]]:
    """(what, why) of what is not tried with its states in the CPU's RAM."""
    rows, full = [], method_label("full")
    if "full" in request.methods and _in_fp16(request):
        rows.append((full, tr(ko="bf16과 fp32로만 실행해 보았다", en="run in bf16 and in fp32 alone")))
    if "full" in request.methods and request.optimizer not in (None, "adamw_fused"):
        why = tr(ko="AdamW(adamw_fused)만 센다", en="only AdamW (adamw_fused) is counted")
        rows.append((f"{full} · {request.optimizer}", why))
    for recipe in recipes_of(replace(request, host=None)):
        if recipe.cpu_offload and (missing := states_beyond(request, recipe)):
            lack = human_bytes(missing)
            why = tr(ko=f"{request.host}의 RAM이 {lack} 모자란다", en=f"{request.host} lacks {lack} of RAM")
            rows.append((f"{full} · {recipe.precision}", why))
    for method in (method for method in request.methods if method != "full"):
        why = tr(
            ko="전체 미세 조정만 센다. 어댑터라면 옮길 것이 얼린 가중치뿐이다",
            en="only full fine-tuning is counted: with adapters it is the frozen weights that there are to move",
        )
        rows.append((method_label(method), why))
    return rows


def _why_not_stage_1(method: str) -> str:
    """Stage 1 sends 3 numbers a parameter once a step (PyTorch's), FSDP2's stage 2 as planned 2 every micro-batch."""
    if method != "full":
        return tr(
            ko="나누는 것이 어댑터의 옵티마이저 상태뿐이라 DDP와 거의 같다",
            en="only the adapters' optimizer state is split: nearly what DDP takes",
        )
    return tr(
        ko="ZeRO-2(FSDP2)보다 메모리를 더 쓴다. 통신은 누적이 없을 때만 ZeRO-2가 더 적다",
        en="needs more memory than ZeRO-2 (FSDP2), which sends less only where nothing is accumulated",
    )
