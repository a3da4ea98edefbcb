"""The parts of PyTorch's loop that split the model over the GPUs: FSDP2 by torchrun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .keeping import checkpointing
from .settings import autocast_dtype, fuse_head, lora, repeat_kv, weights_dtype

if TYPE_CHECKING:
    from ..plans import Plan


def parts(plan: Plan) -> dict[str, str]:
    """name → text: what a loop on several GPUs says otherwise where each holds its share of the model."""
    recipe = plan.recipe
    dtype = autocast_dtype(recipe) or weights_dtype(recipe)
    adapters = recipe.method != "full"
    in_fp32 = _IN_FP32 if plan.request.modules_to_save else ""
    return {
        "model": _MODEL.format(
            repeat_kv=repeat_kv(plan),
            fuse=fuse_head(recipe),
            checkpointing=checkpointing(plan),
            # As accelerate has it, which does not find the norm of a model with adapters.
            last="[head]"
            if adapters
            else '[*(m for m in model.base_model.children() if "Norm" in type(m).__name__), head]',
            adapters=f"{lora(plan)}model = get_peft_model(model, adapters)\n{in_fp32}" if adapters else "",
        ),
        "wrapped": _WRAPPED.format(
            dtype=dtype,
            reshard=recipe.stage == 3,
            mesh=_IN_COPIES.format(copies=recipe.replicas) if recipe.replicas > 1 else _MESH,
            policy=_ON_CPU if recipe.cpu_offload else "",
            offload=", offload_policy=on_cpu" if recipe.cpu_offload else "",
            buffers=_BUFFERS if recipe.cpu_offload else "model.to(device)  # the buffers\n",
        ),
        "synchronized": "",  # every micro-batch's gradients are split at once: no whole ones wait
        "of_shards": _IMPORTS.format(offload="CPUOffloadPolicy, " if recipe.cpu_offload else ""),
        "parallel": "",
        "save": SAVE.format(frozen=", ignore_frozen_params=True" if adapters else "", model="model"),
    }


# Of these a rank makes the model that has no weights of its own.
OF_TRANSFORMERS = ("AutoConfig",)
OF_ACCELERATE = "from accelerate import init_empty_weights\n"
_IMPORTS = """from torch.distributed.checkpoint import state_dict as sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import {offload}MixedPrecisionPolicy, fully_shard
"""
_IN_FP32 = """for parameter in model.parameters():  # FSDP2 gathers them in 16 bits all the same
    if parameter.requires_grad:
        parameter.data = parameter.data.float()
del parameter
"""
_MESH = "mesh = init_device_mesh(device.type, (world,))\n"
_IN_COPIES = """copies = {copies}  # of the model: weights are gathered within one, gradients added up with the others
mesh = init_device_mesh(device.type, (copies, world // copies), mesh_dim_names=("copies", "parts"))
"""
_ON_CPU = """# What a rank holds waits in the RAM, and the optimizer steps there. Pinned memory is a GPU's.
on_cpu = CPUOffloadPolicy(pin_memory=not args.cpu)
"""
_BUFFERS = """for module in model.modules():
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = buffer.to(device)
"""
_MODEL = """{repeat_kv}if rank == 0:  # it alone reads the weights, into its RAM
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=dtype, trust_remote_code=False
    )
else:
    config = AutoConfig.from_pretrained(args.model, trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
last = {last}
if embedding.weight is head.weight:  # one tensor belongs to one group
    last = [*last, embedding]
else:
    layers = [embedding, *layers]
{fuse}{checkpointing}{adapters}whole = model.state_dict() if rank == 0 else {{}}
"""
_WRAPPED = """half = None if args.cpu else torch.{dtype}  # of what is gathered, of gradients on their way, of outputs
precision = MixedPrecisionPolicy(half, half, half)
{policy}{mesh}for module in layers:  # one at a time is gathered, computed and let go
    fully_shard(module, mesh=mesh, mp_policy=precision{offload}, reshard_after_forward={reshard})
for module in (last, model):  # these stay: backward begins with them
    fully_shard(module, mesh=mesh, mp_policy=precision{offload}, reshard_after_forward=False)
from_rank_0 = sharded.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
sharded.set_model_state_dict(model, whole, options=from_rank_0)
model.tie_weights()  # what is the embedding and the head too has come as two
{buffers}del whole
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
"""
SAVE = """gathered = sharded.StateDictOptions(full_state_dict=True, cpu_offload=True{frozen})
weights = sharded.get_model_state_dict(model, options=gathered)
if rank == 0:
    {model}.save_pretrained(args.output, state_dict=weights)
    tokenizer.save_pretrained(args.output)
dist.destroy_process_group()
"""
