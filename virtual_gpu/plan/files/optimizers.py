"""The optimizer in a loop of one's own: the lines that import it, make it, and step it, as the Trainer does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...language import tr
from ...step.optimizers import BITSANDBYTES, in_8_bits_of_bitsandbytes
from ...step.own_code import IN_BACKWARD, MUON, OURS

if TYPE_CHECKING:
    from ..plans import Plan
    from ..recipes import Recipe

_BNB = BITSANDBYTES | {
    "ademamix": "AdEMAMix",
    "ademamix_8bit": "AdEMAMix8bit",
    "paged_ademamix_32bit": "PagedAdEMAMix32bit",
    "paged_ademamix_8bit": "PagedAdEMAMix8bit",
    "rmsprop_bnb": "RMSprop",
    "rmsprop_bnb_8bit": "RMSprop8bit",
    "rmsprop_bnb_32bit": "RMSprop32bit",
}
_BETAS = {"lion": "betas=(0.9, 0.999), "}  # the Trainer's, where the class has others
# name → (what it is imported by, the call), as the Trainer makes them: no weight decay
OPTIMIZERS = {
    "adamw": ("", "torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)"),
    "adamw_fused": ("", "torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=True)"),
    **{
        name: (f"from bitsandbytes.optim import {kind}\n", f"{kind}(trained, lr=LEARNING_RATE, {more}weight_decay=0.0)")
        for name, kind in _BNB.items()
        for more in (next((text for part, text in _BETAS.items() if part in name), ""),)
    },
    "sgd": ("", "torch.optim.SGD(trained, lr=LEARNING_RATE)"),
    "rmsprop": ("", "torch.optim.RMSprop(trained, lr=LEARNING_RATE)"),
    "adagrad": ("", "torch.optim.Adagrad(trained, lr=LEARNING_RATE)"),
    "adafactor": (
        "from transformers.optimization import Adafactor\n",
        "Adafactor(trained, lr=LEARNING_RATE, scale_parameter=False, relative_step=False)",
    ),
}
_MANAGER = "GlobalOptimManager"
_EMBEDDINGS = """for module in model.modules():
    if isinstance(module, torch.nn.Embedding):  # 32 bits for what it remembers of them, as the Trainer has it
        GlobalOptimManager.get_instance().register_module_override(module, "weight", {"optim_bits": 32})
"""
_MUON = """whole = getattr(model, "module", model)  # without DDP
outer = {id(p) for m in whole.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
outer |= {id(p) for p in whole.get_output_embeddings().parameters()}
matrices = [p for p in trained if p.dim() == 2 and id(p) not in outer]  # of the blocks
inner = {id(p) for p in matrices}
others = [p for p in trained if id(p) not in inner]
optimizers = [
    torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
    torch.optim.AdamW(others, lr=LEARNING_RATE, weight_decay=0.0, fused=True),
]
"""
_IN_BACKWARD = """of_each = {p: torch.optim.AdamW([p], lr=LEARNING_RATE, weight_decay=0.0, fused=True) for p in trained}
optimizers = of_each.values()


def step_now(parameter):
    \"""Step with its gradient as soon as it is there, which then goes: none of them waits, and none is clipped.\"""
    of_each[parameter].step()
    of_each[parameter].zero_grad()


for parameter in trained:
    parameter.register_post_accumulate_grad_hook(step_now)
"""
_SCHEDULE = "torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)"


def cannot(plan: Plan) -> str:
    """Why a loop cannot say the plan's optimizer; empty where it can."""
    name = plan.recipe.optimizer
    if plan.request.optim_args or name not in (*OPTIMIZERS, *OURS):
        return tr(
            ko=f"{name}: Trainer만 optim_args와 optim_target_modules로 만들 수 있다",
            en=f"the Trainer makes {name}, of optim_args and optim_target_modules",
        )
    return ""


def cannot_as_one(plan: Plan) -> str:
    """Why a loop that knows one optimizer cannot say the plan's; empty where it can."""
    if plan.recipe.optimizer not in OURS:
        return cannot(plan)
    return tr(ko="옵티마이저가 여러 개다", en="there are several optimizers")


def made(plan: Plan) -> str:
    """The lines that make it, and what is said of it before its first step."""
    recipe = plan.recipe
    if recipe.optimizer in OURS:
        return {MUON: _MUON, IN_BACKWARD: _IN_BACKWARD}[recipe.optimizer]
    return f"optimizer = {OPTIMIZERS[recipe.optimizer][1]}\n" + (_EMBEDDINGS if _spares_embeddings(plan) else "")


def imported(plan: Plan) -> str:
    """The line that imports what PyTorch does not have; empty without."""
    recipe = plan.recipe
    if recipe.optimizer in OURS:
        return ""
    if _spares_embeddings(plan):
        return f"from bitsandbytes.optim import {', '.join(sorted((_BNB[recipe.optimizer], _MANAGER)))}\n"
    return OPTIMIZERS[recipe.optimizer][0]


def schedule(recipe: Recipe) -> str:
    """The line that makes the schedule of the learning rate, of each optimizer one."""
    if recipe.optimizer not in OURS:
        return f"schedule = {_SCHEDULE}\n"
    return f"schedules = [\n    {_SCHEDULE} for optimizer in optimizers\n]\n"


def unscaled(recipe: Recipe) -> str:
    """The lines that take fp16's scale off the gradients."""
    if recipe.optimizer not in OURS:
        return "    scaler.unscale_(optimizer)\n"
    return "    for optimizer in optimizers:\n        scaler.unscale_(optimizer)\n"


def step(recipe: Recipe, scaled: bool) -> str:
    """The lines of the step; none where each parameter has made its own in the backward."""
    if not recipe.accumulates:
        return ""
    call = "scaler.step(optimizer)" if scaled else "optimizer.step()"
    lines = f"    for optimizer in optimizers:\n        {call}\n" if recipe.optimizer in OURS else f"    {call}\n"
    return lines + ("    scaler.update()\n" if scaled else "")


def each(recipe: Recipe) -> str:
    """The lines behind a step: another learning rate, and no gradients."""
    if recipe.optimizer not in OURS:
        return "    schedule.step()\n    optimizer.zero_grad()\n"
    rates = "    for schedule in schedules:\n        schedule.step()\n"
    return rates + ("    for optimizer in optimizers:\n        optimizer.zero_grad()\n" if recipe.accumulates else "")


def _spares_embeddings(plan: Plan) -> bool:
    """Whether the Trainer would have the states of embeddings in fp32, of which some may be trained."""
    trains_some = plan.recipe.method == "full" or bool(plan.request.modules_to_save)
    return trains_some and in_8_bits_of_bitsandbytes(plan.recipe.optimizer)
