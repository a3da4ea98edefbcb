"""A loop in PyTorch alone, every part of a step in sight; on several GPUs by torchrun: DDP, or split by FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...language import tr
from . import experts, fsdp2, optimizers, stages, tensors, texts
from .keeping import of_keeping
from .settings import (
    BLOCKS,
    autocast_dtype,
    docstring,
    from_peft,
    head,
    imports,
    loading,
    torchrun,
    trained_part,
    upcasts,
    weights_dtype,
)

if TYPE_CHECKING:
    from ..plans import Plan
    from ..recipes import Recipe

NAMES = ("train.py",)


def cannot(plan: Plan) -> str:
    """Why these files could not train as the plan says; empty where they can."""
    if plan.recipe.stage and plan.recipe.method == "qlora":
        return tr(ko="4비트 가중치는 나누어 보지 않았다", en="4-bit weights were not split with it")
    return optimizers.cannot(plan)


def files(plan: Plan) -> dict[str, str]:
    """name → text: train.py alone."""
    recipe, gpus = plan.recipe, plan.request.gpus
    if recipe.pipeline_parallel > 1:
        return {"train.py": stages.script(plan)}
    several = gpus > 1 or recipe.stage > 0
    by_fsdp2 = recipe.stage > 0 and recipe.expert_parallel == 1  # else transformers splits it
    of_bnb, of_transformers = imports_of(plan, *(fsdp2.OF_TRANSFORMERS if by_fsdp2 else ()))
    of_transformers += experts.OF_DISTRIBUTED if recipe.expert_parallel > 1 else ""
    parts = {"model": loading(plan, "device") + trained_part(plan), "of_shards": ""}
    said = {"torchrun": torchrun(gpus), "backend": "cuda:nccl,cpu:gloo" if recipe.cpu_offload else "nccl"}
    said["patience"] = experts.PATIENCE if recipe.expert_parallel > 1 else ""
    parts |= {name: text.format(**said) for name, text in (_SEVERAL if several else _ONE).items()}
    parts |= {} if recipe.accumulates else {"clip": ""}  # there is nothing left to clip
    parts |= _precision(recipe) | (fsdp2.parts(plan) if by_fsdp2 else {})
    parts |= experts.parts(plan) if recipe.expert_parallel > 1 else {}
    parts |= tensors.parts(plan, parts["forward"]) if recipe.tensor_parallel > 1 else {}
    parts |= texts.parts(plan, parts) if recipe.context_parallel > 1 else {}
    script = _SCRIPT.format(
        title=docstring(plan),
        of_bnb=(fsdp2.OF_ACCELERATE if by_fsdp2 else "") + of_bnb,
        of_transformers=of_transformers,
        head=head(plan),
        dtype=weights_dtype(recipe),
        blocks=BLOCKS,
        optimizer=optimizers.made(plan),
        each=optimizers.each(recipe),
        schedule=optimizers.schedule(recipe),
        **of_keeping(plan),
        **parts,
    )
    return {"train.py": script}


def imports_of(plan: Plan, *more: str) -> tuple[str, str]:
    """(before torch's, from transformers' on) the imports that the plan needs; more: of transformers."""
    recipe, (repeated, fused) = plan.recipe, imports(plan)
    line = optimizers.imported(plan)
    names = ["LoraConfig", "get_peft_model"] + (["prepare_model_for_kbit_training"] if upcasts(recipe) else [])
    bits = ", BitsAndBytesConfig" if recipe.method == "qlora" else ""
    last = f"from transformers import {', '.join([*more, 'AutoModelForCausalLM', 'AutoTokenizer'])}{bits}\n"
    if "bitsandbytes" in line:  # and what comes behind transformers, by its name
        return line + from_peft(recipe, *names), last + repeated + fused
    return from_peft(recipe, *names), last + repeated + line + fused


def _precision(recipe: Recipe) -> dict[str, str]:
    """The lines of mixed precision: autocast, but where FSDP2's policy says it, and for fp16 a scaler.

    With both, what autocast computes in fp32 (PyTorch's LayerNorm) would be fp32 after all.
    """
    dtype = autocast_dtype(recipe)
    scaled = dtype == "float16"
    forward = _FORWARD.format(fused=", fused_lm_head=True" if recipe.fused_lm_head else "")
    if dtype and not recipe.stage:
        forward = _AUTOCAST.format(dtype=dtype) + "    " + forward
    return {
        "forward": forward,
        "scaler": "scaler = torch.amp.GradScaler(device.type, enabled=not args.cpu)\n" if scaled else "",
        "backward": "scaler.scale(loss).backward()" if scaled else "loss.backward()",
        "unscale": optimizers.unscaled(recipe) if scaled else "",
        "step": optimizers.step(recipe, scaled),
    }


_FORWARD = "        loss = model(input_ids=batch, labels=batch, use_cache=False{fused}).loss / ACCUMULATION\n"
_AUTOCAST = "        with torch.autocast(device.type, torch.{dtype}, enabled=not args.cpu):\n"
_TRAINED = "trained = [parameter for parameter in model.parameters() if parameter.requires_grad]\n"
_CLIP = "    torch.nn.utils.clip_grad_norm_(trained, 1.0)\n"
_ONE = {
    "command": "python",
    "modules": "",
    "distributed": "",
    "parallel": "",
    "sampler": "",
    "device": 'device = torch.device("cpu" if args.cpu else "cuda")\n',
    "step_blocks": "MICRO_BATCH * ACCUMULATION",
    "loader": "loader = DataLoader(torch.tensor(blocks), batch_size=MICRO_BATCH, shuffle=True, drop_last=True)",
    "wrapped": _TRAINED,
    "synchronized": "",
    "clip": _CLIP,
    "shown": "step % 10 == 0 or step == steps",
    "save": "model.save_pretrained(args.output)\ntokenizer.save_pretrained(args.output)\n",
}
_SEVERAL = {
    "command": "{torchrun}",
    "modules": "import os\n",
    "distributed": "import torch.distributed as dist\n",
    "parallel": "from torch.nn.parallel import DistributedDataParallel\n",
    "sampler": ", DistributedSampler",
    "device": """rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cpu") if args.cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
if not args.cpu:
    torch.cuda.set_device(device)
dist.init_process_group("gloo" if args.cpu else "{backend}"{patience})
""",
    "step_blocks": "world * MICRO_BATCH * ACCUMULATION",
    "loader": """sampler = DistributedSampler(blocks, drop_last=True)
loader = DataLoader(torch.tensor(blocks), batch_size=MICRO_BATCH, sampler=sampler, drop_last=True)""",
    "wrapped": f"{_TRAINED}model = DistributedDataParallel(model, device_ids=None if args.cpu else [device])\n",
    "synchronized": "        model.require_backward_grad_sync = micro_batch == ACCUMULATION - 1  # once a step\n",
    "clip": _CLIP,
    "shown": "rank == 0 and (step % 10 == 0 or step == steps)",
    "save": """if rank == 0:
    model.module.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
dist.destroy_process_group()
""",
}
_SCRIPT = '''"""{title}

{command} train.py --text my_text.txt
"""

import argparse
{of_keeping}{modules}from pathlib import Path

import torch
{distributed}{of_bnb}{of_shards}{parallel}{of_checkpoint}from torch.utils.data import DataLoader{sampler}
{of_transformers}
{head}
{device}dtype = torch.float32 if args.cpu else torch.{dtype}  # of the weights

{blocks}needed = {step_blocks}
if len(blocks) < needed:
    raise SystemExit(f"{{args.text}}: {{len(ids)}} tokens are fewer than one step's {{needed}} blocks of {{LENGTH}}.")
{loader}
steps = len(loader) // ACCUMULATION
steps = min(steps, args.max_steps) if args.max_steps > 0 else steps

{model}model.train()
{wrapped}
{optimizer}{schedule}{scaler}batches = iter(loader)
for step in range(1, steps + 1):
    total = torch.zeros((), device=device)
    for micro_batch in range(ACCUMULATION):
{synchronized}        batch = next(batches).to(device)
{forward}        {backward}
        total += loss.detach()
        del loss  # what its graph still holds would lie there through the next forward
{unscale}{clip}{step}{each}    if {shown}:
        print(f"step {{step}} of {{steps}}: loss {{total.item():.4f}}")

{save}'''
