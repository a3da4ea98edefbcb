"""What is worth a run after another one, and what of a run's result fits."""

from __future__ import annotations

from ..models import offloaded
from ..models.configs import load_config
from ..models.depth import text_config
from ..step.splits import equal_splits
from .files.settings import upcasts
from .host import holds_step
from .plans import Plan
from .recipes import Recipe
from .request import Request

# At most: in half precision and fp32, its logarithm of softmax, the gradient in fp32 and in half precision.
LOGIT_BYTES = 16
# Of a weight of the head, at most: autocast's copy of it, and where it is trained that copy's gradient. LoRA freezes
# weights that are in half precision already.
HEAD_BYTES = {"full": 4, "qlora": 2, "lora": 0}


def splits_of(request: Request, recipe: Recipe) -> list[tuple[int, int]]:
    """Every (micro-batch, how many of them) that the recipe may have, the smallest first.

    What steps in the backward has one. A pipeline has one for each stage at least.
    """
    splits = equal_splits(request.per_gpu)[::-1] if recipe.accumulates else [(request.per_gpu, 1)]
    return [split for split in splits if split[1] >= recipe.pipeline_parallel]


def ends_of(request: Request, recipe: Recipe) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """Of these the smallest; and the whole batch at once, which accumulates nothing, where that is another one."""
    splits = splits_of(request, recipe)
    return splits[0], splits[-1] if len(splits) > 1 and splits[-1][1] == 1 else None


def needed_bytes(plan: Plan) -> int:
    """What plans are compared by where nothing else counts."""
    return plan.needed_bytes


def may_fuse(request: Request, recipe: Recipe, fit: Plan | None, miss: Plan | None) -> bool:
    """Whether a fused head is worth a run, after the same recipe without: to fit at all, or more samples at once.

    More of them, unless time is what counts, only under checkpointing, where logits take most of what a sample takes.
    """
    if not may_tile(request, recipe):
        return False
    if request.prefer == "margin":
        return True
    if fit is not None:
        return fit.accumulation > 1 and (recipe.checkpointing or request.prefer == "speed")
    config = text_config(load_config(request.model))
    logits, head = LOGIT_BYTES * miss.micro_batch * request.length, HEAD_BYTES[recipe.method] * config.hidden_size
    saved = config.vocab_size * (logits + head)
    # The whole batch at once keeps no gradients.
    saved += miss.at_peak.get("gradients", 0) if miss.accumulation > 1 else 0
    return miss.tensors_bytes - saved <= request.limit_bytes


def can_move(recipe: Recipe) -> bool:
    """Whether the recipe's checkpoints can be on the CPU: of layers on several GPUs none, of old libraries neither."""
    one_by_one = recipe.pipeline_parallel * recipe.expert_parallel == 1 and not recipe.spread
    return one_by_one and offloaded.can_offload(recipe.stage)


def may_offload(plan: Plan) -> bool:
    """Whether the same with checkpoints on the CPU is worth a run: all activations are more than what is missing."""
    recipe = plan.recipe
    first_in_16_bits = upcasts(recipe) and recipe.precision != "fp32"
    if not recipe.checkpointing or first_in_16_bits or not can_move(recipe):
        return False
    return plan.tensors_bytes - plan.at_peak.get("activations", 0) <= plan.request.limit_bytes


def heads_of(request: Request, recipe: Recipe) -> tuple[bool, ...]:
    """Without a fused head, and with it where there is one; DPO and GRPO have no other."""
    return (True,) if request.objective != "sft" else (False, True) if may_tile(request, recipe) else (False,)


def may_tile(request: Request, recipe: Recipe) -> bool:
    """Whether the recipe may have a fused head beside its own."""
    return recipe == recipe.whole_layers and not recipe.spread and request.can_fuse_head


def fits_with_ram(plan: Plan) -> bool:
    """Whether it fits the card, and what a step keeps there the RAM of the machine, where one is named."""
    return plan.fits and holds_step(plan)
