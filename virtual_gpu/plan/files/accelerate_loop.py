"""A loop with Hugging Face's Accelerator: the parts of a step in sight, the rest said by accelerate's configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...language import tr
from . import optimizers, torch_loop
from .keeping import of_keeping
from .settings import (
    BLOCKS,
    LAUNCH,
    accelerate_yaml,
    autocast_dtype,
    docstring,
    head,
    loading,
    of_launch,
    trained_part,
    weights_dtype,
)
from .torch_loop import imports_of

if TYPE_CHECKING:
    from ..plans import Plan

NAMES = ("train.py", "accelerate.yaml")


def cannot(plan: Plan) -> str:
    """Why these files could not train as the plan says; empty where they can."""
    if plan.recipe.cpu_offload and plan.request.gpus == 1 and plan.accumulation > 1:
        # `Accelerator.accumulate` listens to sync_each_batch where there are several processes (accelerate 1.15)
        return tr(
            ko="GPU 한 장이면 accelerate는 마이크로 배치 사이에 모든 그레이디언트를 카드에 둔다",
            en="on one GPU accelerate keeps all gradients on the card between micro-batches",
        )
    return optimizers.cannot_as_one(plan) or torch_loop.cannot(plan)  # what is not split there is not split here


def files(plan: Plan) -> dict[str, str]:
    """name → text: train.py, and for several GPUs accelerate.yaml."""
    recipe, several = plan.recipe, plan.request.gpus > 1 or plan.recipe.stage > 0
    of_bnb, of_transformers = imports_of(plan)
    mixed = {"float16": "fp16", "bfloat16": "bf16"}.get(autocast_dtype(recipe))
    script = _SCRIPT.format(
        title=docstring(plan),
        command=LAUNCH if several else "python",
        of_bnb=of_bnb,
        of_transformers=of_transformers,
        head=head(plan),
        # As it was counted: of shards no whole gradients wait between micro-batches.
        each=", sync_each_batch=True" if recipe.stage else "",
        mixed=f'"no" if args.cpu else "{mixed}"' if mixed else '"no"',
        dtype=weights_dtype(recipe),
        blocks=BLOCKS,
        model=_model(plan),
        optimizer=optimizers.made(plan),
        fused=", fused_lm_head=True" if recipe.fused_lm_head else "",
        **of_keeping(plan),
        **of_launch(recipe),
    )
    return {"train.py": script} | ({"accelerate.yaml": accelerate_yaml(plan)} if several else {})


def _model(plan: Plan) -> str:
    if not plan.recipe.stage:
        return loading(plan, "accelerator.device") + trained_part(plan)
    if plan.recipe.kept:
        return loading(plan) + trained_part(plan)
    # FSDP2 checkpoints as accelerate.yaml says.
    unchecked = replace(plan, recipe=replace(plan.recipe, checkpointing=False))
    return loading(plan) + trained_part(unchecked)


_SCRIPT = '''"""{title}

{command} train.py --text my_text.txt
"""

import argparse
{of_keeping}{modules}from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
{of_bnb}{of_checkpoint}from torch.utils.data import DataLoader
{of_transformers}
{head}
{launched}accumulation = GradientAccumulationPlugin(num_steps=ACCUMULATION{each})
accelerator = Accelerator(cpu=args.cpu, mixed_precision={mixed}, gradient_accumulation_plugin=accumulation)
dtype = torch.float32 if args.cpu else torch.{dtype}  # of the weights

{blocks}needed = accelerator.num_processes * MICRO_BATCH * ACCUMULATION
if len(blocks) < needed:
    raise SystemExit(f"{{args.text}}: {{len(ids)}} tokens are fewer than one step's {{needed}} blocks of {{LENGTH}}.")
loader = DataLoader(torch.tensor(blocks), batch_size=MICRO_BATCH, shuffle=True, drop_last=True)

{model}model.train()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
{optimizer}model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = len(loader) // ACCUMULATION
steps = min(steps, args.max_steps) if args.max_steps > 0 else steps
schedule = torch.optim.lr_scheduler.LinearLR(optimizer.optimizer, 1.0, 0.0, total_iters=steps)

step, total = 0, 0.0
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch, use_cache=False{fused}).loss
        accelerator.backward(loss)
        total += loss.detach() / ACCUMULATION
        del loss  # what its graph still holds would lie there through the next forward
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        schedule.step()
        step += 1
        if step % 10 == 0 or step == steps:
            accelerator.print(f"step {{step}} of {{steps}}: loss {{total:.4f}}")
        if step == steps:
            break
        total = 0.0

weights = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained(args.output, state_dict=weights)
    tokenizer.save_pretrained(args.output)
accelerator.end_training()
'''
