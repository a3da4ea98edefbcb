"""PyTorch's loop in which each GPU, or group of GPUs, has some of the layers: torch.distributed.pipelining by torchrun.

The parts are `shards.stages`': the model itself without what the others have. Micro-batches go through them in the
order of 1F1B, and FSDP2 splits each stage over its GPUs, also where that is one: its policy is the mixed precision.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from . import optimizers
from .keeping import checkpointing
from .settings import BLOCKS, autocast_dtype, docstring, head, repeat_kv, torchrun, weights_dtype

if TYPE_CHECKING:
    from ..plans import Plan


def script(plan: Plan) -> str:
    """train.py."""
    recipe = plan.recipe
    return _SCRIPT.format(
        title=docstring(plan),
        torchrun=torchrun(plan.request.gpus),
        stages=recipe.pipeline_parallel,
        head=head(plan),
        weights=weights_dtype(recipe),
        half=autocast_dtype(recipe) or weights_dtype(recipe),
        blocks=BLOCKS,
        sdpa="from transformers.integrations import sdpa_attention\n" if plan.request.repeats_kv else "",
        repeat_kv=repeat_kv(plan),
        checkpointing=textwrap.indent(checkpointing(plan), " " * 8),
        reshard=recipe.stage == 3,
        optimizer=optimizers.made(plan),
        schedule=optimizers.schedule(recipe),
        each=optimizers.each(recipe),
    )


_SCRIPT = '''"""{title}

{torchrun} train.py --text my_text.txt
"""

import argparse
import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
{sdpa}
STAGES = {stages}  # each has as many layers, on GPUs of its own
{head}
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
here, local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cpu") if args.cpu else torch.device("cuda", here)
if not args.cpu:
    torch.cuda.set_device(device)
if world % STAGES:
    raise SystemExit(f"{{world}} processes are no equal parts of {{STAGES}} stages.")
# One rank waits for the other while the model is read.
dist.init_process_group("gloo" if args.cpu else "cuda:nccl,cpu:gloo", timeout=timedelta(hours=2))
dtype = torch.float32 if args.cpu else torch.{weights}  # of the weights
half = torch.float32 if args.cpu else torch.{half}  # of what is gathered, computed, and sent on

mesh = init_device_mesh(device.type, (STAGES, world // STAGES), mesh_dim_names=("stages", "data"))
stage, place = mesh["stages"].get_local_rank(), mesh["data"].get_local_rank()
first, last = stage == 0, stage == STAGES - 1
{blocks}needed = world // STAGES * MICRO_BATCH * ACCUMULATION
if len(blocks) < needed:
    raise SystemExit(f"{{args.text}}: {{len(ids)}} tokens are fewer than one step's {{needed}} blocks of {{LENGTH}}.")
# A step's micro-batches at once: all stages take the same blocks, the GPUs of one stage others.
sampler = DistributedSampler(blocks, world // STAGES, place, drop_last=True)
loader = DataLoader(torch.tensor(blocks), batch_size=MICRO_BATCH * ACCUMULATION, sampler=sampler, drop_last=True)
steps = min(len(loader), args.max_steps) if args.max_steps > 0 else len(loader)


class Part(torch.nn.Module):
    """The model with this stage's layers alone, the first with the embedding, the last with the norm and the head."""

    def __init__(self, model):
        super().__init__()
        body = model.base_model
        each = len(body.layers) // STAGES
        del body.layers[(stage + 1) * each :], body.layers[: stage * each]
        self.before = stage * each  # layers of the stages before
        self.norm = next(name for name, module in body.named_children() if "norm" in name)
        if not first:
            body.set_input_embeddings(None)
        if not last:
            setattr(body, self.norm, torch.nn.Identity())
            model.set_output_embeddings(None)
        self.model = model

    def forward(self, x):
        given = {{"input_ids": x}} if first else {{"inputs_embeds": x}}
        hidden = self.model.base_model(**given, use_cache=False).last_hidden_state
        return self.model.get_output_embeddings()(hidden) if last else hidden

    def groups(self):
        """What FSDP2 gathers together."""
        body, model = self.model.base_model, self.model
        ends = [[getattr(body, self.norm), model.get_output_embeddings()]] if last else []
        return [*([model.get_input_embeddings()] if first else []), *body.layers, *ends, self]


precision = MixedPrecisionPolicy(half, torch.float32, half)  # gradients are added up in fp32
{repeat_kv}for turn in range(local):  # a rank of this machine after the other reads the whole model, and keeps its part
    if turn == here:
        model = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=dtype, trust_remote_code=False
        )
        if len(model.base_model.layers) % STAGES:
            raise SystemExit(f"{{len(model.base_model.layers)}} layers are no equal parts of {{STAGES}} stages.")
        if model.get_input_embeddings().weight is model.get_output_embeddings().weight:
            raise SystemExit("Embedding and head are one tensor, which the first and the last stage cannot share.")
{checkpointing}        model.train()
        part = Part(model)
        for group in part.groups():
            fully_shard(group, mesh=mesh["data"], mp_policy=precision, reshard_after_forward={reshard})
        part.to(device)  # the buffers
    dist.barrier()
trained = list(part.parameters())


def loss_of(logits, ids):
    return model.loss_function(logits=logits, labels=ids, vocab_size=config.vocab_size)


def like(*shape, of=half):
    return torch.empty(MICRO_BATCH, LENGTH, *shape, dtype=of, device="meta", requires_grad=of.is_floating_point)


config = model.config
hidden = like(config.hidden_size)
shapes = {{
    "input_args": (like(of=torch.int64) if first else hidden,),
    "output_args": (like(config.vocab_size) if last else hidden,),
}}
pipeline = PipelineStage(part, stage, STAGES, device, group=mesh["stages"].get_group(), **shapes)
in_order = Schedule1F1B(pipeline, ACCUMULATION, loss_fn=loss_of)
del hidden, shapes

{optimizer}{schedule}batches = iter(loader)
for step in range(1, steps + 1):
    batch, losses = next(batches).to(device), []
    # Forward and backward of all micro-batches; what they return is not kept.
    in_order.step(
        *([batch] if first else []), target=batch if last else None, losses=losses if last else None,
        return_outputs=False,
    )
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in trained]).full_tensor() ** 2
    dist.all_reduce(norm, group=mesh["stages"].get_group())  # of all stages
    torch.nn.utils.clip_grads_with_norm_(trained, 1.0, norm.sqrt())
    optimizer.step()
{each}    if last and place == 0 and (step % 10 == 0 or step == steps):
        print(f"step {{step}} of {{steps}}: loss {{torch.stack(losses).mean().item():.4f}}")

# Each stage saves its part under the names of the whole model's weights.
weights = {{}}
for name, parameter in part.model.named_parameters():
    whole, words = parameter.full_tensor(), name.split(".")  # of all GPUs of the stage
    if "layers" in words:
        number = words.index("layers") + 1
        words[number] = str(int(words[number]) + part.before)
    if place == 0:
        weights[".".join(words)] = whole.cpu()
file = f"model-{{stage + 1:05}}-of-{{STAGES:05}}.safetensors"
if place == 0:
    Path(args.output).mkdir(parents=True, exist_ok=True)
    save_file(weights, Path(args.output, file), metadata={{"format": "pt"}})
found = [None] * world
dist.all_gather_object(found, {{name: (file, tensor.nbytes) for name, tensor in weights.items()}})
if rank == 0:
    named = {{name: where for of_rank in found for name, where in of_rank.items()}}
    size = sum(nbytes for _, nbytes in named.values())
    index = {{"metadata": {{"total_size": size}}, "weight_map": {{name: file for name, (file, _) in named.items()}}}}
    Path(args.output, "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    Path(args.output, "model.safetensors").unlink(missing_ok=True)  # an older model's: it would be read instead
    config.save_pretrained(args.output)
    model.generation_config.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
dist.destroy_process_group()
'''
