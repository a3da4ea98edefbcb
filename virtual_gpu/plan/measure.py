"""One plan, measured: memory on the virtual GPU (of shards by `rank_need` or `on_cpu`), FLOPs, a bound on time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..errors import NotSupported
from ..models.adapters import linear_layers
from ..models.attention import REPEATED
from ..models.build import build_model
from ..models.configs import cached_by_model, load_config
from ..models.depth import text_config
from ..shards.adapters import adapters_of
from ..shards.layout import Layout
from ..shards.ledger import closed_form, closed_form_adapters
from ..shards.rank_step import rank_need
from ..step.flops import training_flops
from ..step.setting import Setting
from ..step.splits import split_setting
from .engine import AWAKE, beside, least_bytes
from .files.settings import autocast_dtype, weights_dtype
from .on_a_card import predict_need, states_of
from .plans import Plan
from .recipes import Recipe, not_together
from .request import Request
from .tensors import gpus_by_node


def setting_of(request: Request, recipe: Recipe, micro_batch: int, accumulation: int) -> Setting:
    """The experiment that one GPU runs."""
    precision = recipe.precision
    if recipe.method != "full" and precision.startswith("mixed_"):
        precision = precision.replace("mixed", "autocast")
    return split_setting(
        micro_batch,
        accumulation,
        gradient_checkpointing=recipe.checkpointing,
        fused_lm_head=recipe.fused_lm_head,
        objective=request.objective,
        reference=recipe.reference,
        padded=request.objective != "sft",  # two answers are seldom of one length
        completion_length=request.completion_length,
        rollout=max(request.per_gpu, micro_batch) if request.grpo else 0,
        beta=request.beta,
        iterations=request.iterations,
        vllm=recipe.vllm,
        kept_results=recipe.kept,
        offload_checkpoints=recipe.offload,
        rest_in_fp32=recipe.rest_in_fp32,
        fp32_embedding_state=True,
        attention=REPEATED if request.repeats_kv else "sdpa",
        model_id=request.model,
        peft=None if recipe.method == "full" else recipe.method,
        sequence_length=request.length,
        precision=precision,
        optimizer=recipe.optimizer,
        lora_rank=request.lora_rank,
        lora_targets=request.lora_targets,
        modules_to_save=request.modules_to_save,
        optim_args=request.optim_args,
        optim_target_modules=request.optim_target_modules,
    )


def held(request: Request, recipe: Recipe) -> dict[str, int]:
    """kind → bytes of parameters, gradients and optimizer state on each GPU, whatever micro-batch, length and GPU.

    Of the whole model without a run; of shards by `closed_form`.
    """
    if recipe.cpu_offload:
        return dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    if recipe.pipeline_parallel > 1:
        from .in_stages import states_of_stages

        return states_of_stages(
            request.model, request.gpus, recipe.pipeline_parallel, getattr(torch, weights_dtype(recipe))
        )
    if recipe.expert_parallel > 1:
        from .in_experts import states_of_experts

        return states_of_experts(
            request.model, request.gpus, recipe.expert_parallel, getattr(torch, weights_dtype(recipe))
        )
    if recipe.stage:
        states, once_given = _held_split(request, recipe)
    else:
        states = states_of(setting_of(request, recipe.at_once, 1, 1).short(1))
        if recipe.spread:
            return {kind: nbytes // request.gpus for kind, nbytes in states.items()}
        states = states | ({"other": states["gradients"]} if request.gpus > 1 else {})  # DDP's buckets
        once_given = states["gradients"]
    if recipe.vllm:
        beside_it = 0 if recipe.vllm == AWAKE else once_given  # which is gone while completions are made
        states["engine"] = max(least_bytes(request) - beside_it, 0)
    return states


def _held_split(request: Request, recipe: Recipe) -> tuple[dict[str, int], int]:
    """(kind → bytes on each GPU of what is split, those of them that are there in a micro-batch alone)."""
    layout = Layout(request.gpus, recipe.stage, recipe.tensor_parallel, replicas=recipe.replicas)
    if recipe.method == "full":
        second = recipe.reference == "same" if request.pairs else request.beta > 0
        memory = closed_form(request.model, layout, _convention(recipe), second=second, fp32_shards=True)
    else:
        adapters = adapters_of(
            recipe.method, request.lora_rank, request.lora_targets, _convention(recipe), layout, request.spec,
            request.modules_to_save,
        )  # fmt: skip
        memory = closed_form_adapters(request.model, layout, adapters)
    states = {
        "parameters": memory.parameters,
        "gathered": memory.gathered,
        # What stays gathered at stage 2 goes in backward, as gradients come that are no more.
        "gradients": 0 if recipe.stage == 2 else memory.gradients,
        "optimizer": memory.optimizer,
    }
    stays = states["gathered"] // 2 if request.beta and recipe.method == "full" else 0  # a reference's
    return states, states["gathered"] - stays + states["gradients"]


def hopeless(request: Request, recipe: Recipe) -> Plan:
    """The recipe as a plan of which only the states are known, which are too much already."""
    kinds, request = held(request, recipe), request.of(recipe)
    return Plan(request, recipe, 1, request.per_gpu, sum(kinds.values()), kinds, 0, 0, 0, None, at_least=True)


def _convention(recipe: Recipe) -> str:
    return "mixed" if recipe.precision.startswith("mixed") else recipe.precision


def of_rank(request: Request, recipe: Recipe, micro_batch: int, accumulation: int) -> dict[str, Any]:
    """`rank_step`'s arguments for one of the GPUs that ZeRO splits the plan over."""
    return {
        "model": request.model, "ranks": request.gpus, "stage": recipe.stage, "precision": _convention(recipe),
        "batch_size": micro_batch, "sequence_length": request.length, "gpu": request.gpu,
        "gradient_checkpointing": recipe.checkpointing, "accumulating": accumulation > 1,
        "tensor_parallel": recipe.tensor_parallel, "replicas": recipe.replicas,
        "sequence_parallel": recipe.sequence_parallel, "context_parallel": recipe.context_parallel,
        "peft": None if recipe.method == "full" else recipe.method,
        "lora_rank": request.lora_rank, "lora_targets": request.lora_targets,
        "modules_to_save": request.modules_to_save,
        "as_accelerate": recipe.tensor_parallel == 1, "fp32_shards": recipe.method == "full",
        "repeat_kv": request.repeats_kv, "fused_lm_head": recipe.fused_lm_head, "offload_checkpoints": recipe.offload,
        "kept_results": recipe.kept, "objective": request.objective, "reference": recipe.reference,
        "completion_length": request.completion_length, "rollout": max(request.per_gpu, micro_batch) * request.grpo,
        "beta": request.beta, "iterations": request.iterations,
    }  # fmt: skip


def measure(request: Request, recipe: Recipe, micro_batch: int, accumulation: int) -> Plan:
    """One plan, measured: memory on the virtual GPU, FLOPs counted."""
    layers: tuple[int, ...] = ()
    to_card = to_cpu = activations = to_copies = to_next = generation = training = of_experts = tokens = 0
    request, tensors, engine = request.of(recipe), recipe.tensor_parallel, None
    if recipe.cpu_offload:
        from .on_cpu import step_on_cpu  # brings all of a program's card

        step = step_on_cpu(
            request.model, request.gpus, request.spec, weights=getattr(torch, weights_dtype(recipe)),
            half=getattr(torch, autocast_dtype(recipe) or weights_dtype(recipe)), batch_size=micro_batch,
            sequence_length=request.length, checkpointing=recipe.checkpointing, offload_checkpoints=recipe.offload,
            fused_lm_head=recipe.fused_lm_head, repeat_kv=request.repeats_kv,
        )  # fmt: skip
        needed, at_peak = step.needed, step.at_peak
        collectives, offloaded = step.sent * accumulation, step.offloaded * accumulation
        pinned, paged = step.pinned, 0
        to_card, to_cpu = step.to_card * accumulation, step.to_cpu * accumulation
    elif recipe.pipeline_parallel > 1:
        from .in_stages import staged_step  # brings all of a program's card

        staged = staged_step(
            request.model, request.gpus, recipe.pipeline_parallel, recipe.stage, request.spec,
            weights=getattr(torch, weights_dtype(recipe)),
            half=getattr(torch, autocast_dtype(recipe) or weights_dtype(recipe)),
            batch_size=micro_batch, sequence_length=request.length, micro_batches=accumulation,
            checkpointing=recipe.checkpointing, repeat_kv=request.repeats_kv,
        )  # fmt: skip
        needed, at_peak = staged.needed, staged.at_peak
        collectives, to_next, offloaded, pinned, paged = staged.sent, staged.sent_to_next, 0, 0, 0
    elif recipe.expert_parallel > 1:
        from .in_experts import experts_step  # brings all of a program's card

        found = experts_step(
            request.model, request.gpus, recipe.expert_parallel, request.spec,
            weights=getattr(torch, weights_dtype(recipe)), mixed=recipe.precision.startswith("mixed"),
            batch_size=micro_batch, sequence_length=request.length, accumulating=accumulation > 1,
            checkpointing=recipe.checkpointing, repeat_kv=request.repeats_kv,
        )  # fmt: skip
        needed, at_peak, offloaded, pinned, paged = found.needed, found.at_peak, 0, 0, 0
        collectives = found.sent * accumulation
        of_experts, tokens = found.sent_experts * accumulation, found.sent_tokens * accumulation
    elif recipe.stage:
        need = rank_need(**of_rank(request, recipe, micro_batch, accumulation))
        parts = _as_parts(need.at_peak)
        need = need._replace(at_peak=parts, at_generation=_as_parts(need.at_generation))
        needed, at_peak = need.card, parts | {"fragmentation": need.card - need.tensors}
        collectives, activations = need.sent * accumulation, need.sent_activations * accumulation
        collectives += need.sent_once // request.iterations
        if recipe.vllm:
            needed, at_peak, engine = beside(request, recipe, need)
            generation, training = sum(need.at_generation.values()), need.tensors
        offloaded, pinned, paged = need.offloaded * accumulation, need.pinned, 0
        to_copies, to_next = need.sent_to_copies * accumulation, need.sent_to_next * accumulation
    elif recipe.spread:
        from .spread import spread_need  # brings all of a program's card

        if recipe.offload or recipe.kept or recipe.fused_lm_head:
            raise NotSupported(f"{recipe.title}: {not_together()}")
        setting = setting_of(request, recipe, micro_batch, accumulation)
        found = spread_need(setting, request.gpus, request.spec.compute_capability)
        need, layers = found.fullest, found.layers
        needed, at_peak = need.card, need.at_peak | {"fragmentation": need.card - need.tensors}
        collectives = offloaded = pinned = paged = 0
        to_next = found.sent * accumulation
    else:
        setting = setting_of(request, recipe, micro_batch, accumulation)
        need = predict_need(setting, request.spec.compute_capability, request.gpus > 1)
        needed, at_peak = need.card, need.at_peak | {"fragmentation": need.card - need.tensors}
        collectives = 2 * need.states["gradients"]  # DDP's all-reduce, once a step
        offloaded, pinned = need.offloaded // setting.gradient_accumulation_steps * accumulation, need.pinned
        paged, generation, training = need.paged, need.generation, need.training
        if recipe.vllm:
            needed, at_peak, engine = beside(request, recipe, need)
    flops, least = (
        request.batch * training_flops(setting_of(request, one, 1, 1)).total for one in (recipe, recipe.at_once)
    )
    texts, copies = recipe.context_parallel, recipe.replicas
    shards = request.gpus // (tensors * copies * recipe.pipeline_parallel)
    sent, between = _round_rings(
        request.gpus,
        (activations - to_next, tensors * texts, 1),
        (to_next, 0, 1),
        (collectives, shards, tensors),
        (to_copies, copies, tensors * shards),
        (of_experts, request.gpus // recipe.expert_parallel, recipe.expert_parallel),
        (tokens, recipe.expert_parallel, 1),
    )
    if recipe.spread:
        sent, between = to_next, 0
    machines, node = gpus_by_node(request.gpus)
    if recipe.pipeline_parallel > 1 and machines > 1:  # of two machines one sends hidden states and one gradients
        between += to_next * min(shards, node) // (2 if machines == 2 and recipe.pipeline_parallel > 2 else 1)
    plan = Plan(
        request, recipe, micro_batch, accumulation, needed, at_peak, flops, least, sent, None,
        between_nodes_bytes=between,
        offloaded_bytes=offloaded, pinned_bytes=pinned, paged_bytes=paged,
        states_to_card_bytes=to_card, states_to_cpu_bytes=to_cpu, generation_bytes=generation,
        training_bytes=training if request.grpo else 0, layers=layers,
        engine=engine,
    )  # fmt: skip
    return replace(plan, seconds=_lower_bound(plan))


def _as_parts(of_a_rank: Mapping[str, int]) -> dict[str, int]:
    """A rank's bytes by part under the names that a plan has for them."""
    return {"other" if part == "communication" else part: nbytes for part, nbytes in of_a_rank.items()}


def _round_rings(gpus: int, *rings: tuple[int, int, int]) -> tuple[int, int]:
    """(bytes that each GPU sends, bytes that leave a node); of a ring: bytes, ranks, GPUs from one of them to the next.

    Round a ring a rank passes on everything but one share, and in an all-reduce does so twice, which its bytes have
    twice (NCCL's nccl-tests, doc/PERFORMANCE.md). A ring goes round each node before it leaves it, once. Of no ranks
    all is sent, to one other in the node.
    """
    _, node = gpus_by_node(gpus)
    sent = between = 0
    for nbytes, ranks, stride in rings:
        passed_on = nbytes * (ranks - 1) // ranks if ranks else nbytes
        sent += passed_on
        between += passed_on * min(stride, node) if stride * ranks > node else 0
    return sent, between


def expected(request: Request, recipe: Recipe) -> tuple[int, float]:
    """(bytes beside the states whatever the micro-batch, bytes a sample), roughly: where a search looks first.

    Half-precision inputs and outputs of the layers' matrices (of checkpoints, of each layer alone), the logits in both
    precisions with their gradients, and autocast's copies of fp32 weights that are trained. Of checkpoints on the CPU
    what one block computes again is left. Nothing that is shown rests on it.
    """
    _, sides, inputs = _weights(request.model)
    config = text_config(load_config(request.model))
    if recipe.offload:
        token = 2.3 * sides / config.num_hidden_layers
    else:
        token = 4 * inputs if recipe.checkpointing else 2.3 * sides
    token += 0 if recipe.fused_lm_head else 10 * config.vocab_size
    token /= request.gpus if recipe.spread else recipe.context_parallel
    copies = recipe.method == "full" and recipe.precision.startswith("mixed")
    return held(request, recipe)["parameters"] // 2 if copies else 0, request.sequences * request.length * token


@cached_by_model
def _weights(model: str) -> tuple[int, int, int]:
    """Of the layers' matrices: their parameters, the sum of their sides, and the layers' widths added up."""
    config = load_config(model)
    layers = linear_layers(build_model(config, torch.float16)).values()
    shapes = [layer.weight.shape for layer in layers]
    text = text_config(config)
    return sum(map(math.prod, shapes)), sum(map(sum, shapes)), text.hidden_size * text.num_hidden_layers


def _lower_bound(plan: Plan) -> float | None:
    """Seconds below which no optimizer step can end: at the published peak rates, and the weights read in every pass.

    Of computing and reading the longer counts. Checkpoints on the CPU come and go between them, on the stream that
    computes (see `models.offloaded`), so that is added; pages travel beside it, and count where they take longer, and
    so do parameters and gradients of states on the CPU, each in its direction.
    Not counted: everything else (activations, dequantization, communication, launches), and what goes to the CPU where
    the card's link is not published. FLOPs are PyTorch's count, which has attention whole where a kernel may skip half
    of it under a causal mask. None for a card of which rate or bandwidth is not published: the bandwidth alone would
    bound an RTX 3060's step of 66 TFLOP to 5 ms. A generation comes before all this: it reads the weights for each
    token of the completions, as many as there may be.
    """
    request, recipe, spec = plan.request, plan.recipe, plan.request.spec
    rate = spec.bf16_tflops if "bf16" in recipe.precision else spec.fp16_tflops
    if rate is None or spec.bandwidth_bytes_per_s is None:
        return None
    at_once = 1 if recipe.spread else request.gpus  # spread layers: one card after another
    stages, times = recipe.pipeline_parallel, plan.accumulation
    filled = (times + stages - 1) / times  # a pipeline's last stage begins when the others have had their turn
    compute = filled * plan.flops / at_once / (rate * 1e12)
    count, *_ = _weights(request.model)
    count //= recipe.tensor_parallel * stages
    # A product whose result is kept does not read its weights again; of which they are nothing is said here.
    passes = 3 if recipe.checkpointing and not recipe.kept else 2
    # What GRPO's loss asks for is made once a generation, which several steps learn from.
    scored = ((request.beta > 0) + (request.iterations > 1 or bool(request.vllm))) / request.iterations
    again = (request.pairs and recipe.reference == "same") + scored
    once = (count // 2 if recipe.method == "qlora" else 2 * count) / spec.bandwidth_bytes_per_s
    reading = (passes + again) * (times + stages - 1) * once
    generating = request.completion_length * once / request.iterations
    link = spec.link_bytes_per_s or math.inf
    beside = max(plan.evicted_bytes, plan.states_to_card_bytes, plan.states_to_cpu_bytes) / link
    return max(max(compute, reading) + 2 * plan.offloaded_bytes / link, beside) + generating
