"""The parts of PyTorch's loop in which several GPUs compute each layer: parallelize_module, and FSDP2 over the others.

Every GPU of a group takes the same samples. A mesh of two dimensions has the groups along "tensor", FSDP2 along "data".
Parameters that are cut lie on both, the others (norms, a tied embedding) on "data" alone, so the optimizer and the
clipping take the two kinds apart. Gradients are reduced in the 16 bits that are computed in, as they were counted and
as accelerate has it; torchtitan reduces them in fp32.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ..tensors import TensorPlan, tensor_plan
from .fsdp2 import SAVE
from .keeping import checkpointing
from .settings import autocast_dtype, literal, repeat_kv, weights_dtype

if TYPE_CHECKING:
    from ..plans import Plan


def parts(plan: Plan, forward: str) -> dict[str, str]:
    """name → text: what a loop that FSDP2 splits (`fsdp2.parts`) says otherwise with tensor parallelism.

    forward: its lines from the model to the loss.
    """
    recipe, split = plan.recipe, tensor_plan(plan.request.model)
    degree, suffixes = recipe.tensor_parallel, tuple(f".{name.rpartition('.')[2]}" for name in split.summed)
    tokens = recipe.sequence_parallel
    names = ["ColwiseParallel", "RowwiseParallel", "parallelize_module"] + _OF_TOKENS * tokens
    layouts = ["Replicate"] * bool(split.ends) + ["Shard"] * tokens
    return {
        "model": _MODEL.format(repeat_kv=repeat_kv(plan), checkpointing=checkpointing(plan)),
        "wrapped": _WRAPPED.format(
            degree=degree,
            plan="".join(f"    {literal(name)}: {how},\n" for name, how in _styles(split, tokens).items()),
            dtype=autocast_dtype(recipe) or weights_dtype(recipe),
            reshard=recipe.stage == 3,
            summed=_OF_HEADS.format(suffixes=", ".join(map(literal, suffixes))) if suffixes else "",
        ),
        "of_shards": _IMPORTS.format(
            names=", ".join(sorted(names)),
            layouts=f"from torch.distributed.tensor import {', '.join(layouts)}\n" if layouts else "",
        ),
        "step_blocks": f"world // {degree} * MICRO_BATCH * ACCUMULATION",
        "loader": _LOADER.format(degree=degree),
        "clip": (_SUMMED if suffixes else "") + _CLIP,
        "save": SAVE.format(frozen="", model="loaded"),
        **(_loss(forward) if tokens else {}),
    }


def _styles(split: TensorPlan, tokens: bool) -> dict[str, str]:
    if tokens:
        return _TOKENS
    whole = "ColwiseParallel(output_layouts=Replicate())"
    by = {"ColwiseParallel()": split.columns, "RowwiseParallel()": split.rows, whole: split.ends}
    return {name: style for style, names in by.items() for name in names}


def _loss(forward: str) -> dict[str, str]:
    """The same lines, and backward, where each GPU has the logits of its part of the vocabulary."""
    return {
        "forward": _LOSS + textwrap.indent(forward, "    "),
        "backward": "    loss.backward()\n        loss = loss.full_tensor()",
    }


_OF_TOKENS = ["PrepareModuleInput", "SequenceParallel", "loss_parallel"]
_LOSS = "        with loss_parallel():  # of the logits each GPU has those of its part of the vocabulary\n"
# As `shards.sequence` has it: between the matrices each GPU has its part of the tokens.
_BLOCK = {
    "input_layernorm": "SequenceParallel()",
    "self_attn": """PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    )""",
    **{f"self_attn.{name}_proj": "ColwiseParallel()" for name in "qkv"},
    "self_attn.o_proj": "RowwiseParallel(output_layouts=Shard(1))",
    "post_attention_layernorm": "SequenceParallel()",
    "mlp": "PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))",
    "mlp.gate_proj": "ColwiseParallel()",
    "mlp.up_proj": "ColwiseParallel()",
    "mlp.down_proj": "RowwiseParallel(output_layouts=Shard(1))",
}
_TOKENS = {
    "model.embed_tokens": "ColwiseParallel(output_layouts=Replicate())",
    "model.layers.0": """PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
    )""",
    **{f"model.layers.*.{name}": style for name, style in _BLOCK.items()},
    "model.norm": "SequenceParallel(use_local_output=True)",
    "lm_head": "ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)",
}
_IMPORTS = """from torch.distributed.checkpoint import state_dict as sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
{layouts}from torch.distributed.tensor.parallel import {names}
"""
_LOADER = """# The GPUs of a group take the same blocks.
sampler = DistributedSampler(blocks, world // {degree}, rank // {degree}, drop_last=True)
loader = DataLoader(torch.tensor(blocks), batch_size=MICRO_BATCH, sampler=sampler, drop_last=True)"""
# A model with weights would send them while it is cut: all ranks make one without, and rank 0 hands its weights out.
_MODEL = """{repeat_kv}config = AutoConfig.from_pretrained(args.model, trust_remote_code=False)
with init_empty_weights(include_buffers=False):
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
model.tie_weights()
whole = {{}}
if rank == 0:  # it alone reads the weights, into its RAM
    loaded = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=dtype, trust_remote_code=False
    )
    whole = loaded.state_dict()
    loaded.to("meta")  # it is left to know how the weights were named and is to be saved
layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
if embedding.weight is not head.weight:  # one tensor belongs to one group: the model's own
    norms = [module for module in model.base_model.children() if "Norm" in type(module).__name__]
    layers = [embedding, *layers, [*norms, head]]
{checkpointing}"""
_WRAPPED = """plan = {{
{plan}}}
mesh = init_device_mesh(device.type, (world // {degree}, {degree}), mesh_dim_names=("data", "tensor"))
parallelize_module(model, mesh["tensor"], plan)
torch.manual_seed(rank // {degree})  # what is dropped out is the same for a group
half = None if args.cpu else torch.{dtype}  # of what is gathered, of gradients on their way, of outputs
precision = MixedPrecisionPolicy(half, half, half)
for module in (*layers, model):  # one at a time is gathered, computed and let go
    fully_shard(module, mesh=mesh["data"], mp_policy=precision, reshard_after_forward={reshard})
from_rank_0 = sharded.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
sharded.set_model_state_dict(model, whole, options=from_rank_0)
model.tie_weights()  # what is the embedding and the head too has come as two
model.to(device)  # the buffers
del whole
# On one dimension of the mesh, and on both: an operation takes tensors of one kind.
kinds = [[p for p in model.parameters() if p.device_mesh.ndim == dimensions] for dimensions in (1, 2)]
kinds = [kind for kind in kinds if kind]
trained = [{{"params": kind}} for kind in kinds]
{summed}"""
_OF_HEADS = """of_heads = [module.weight for name, module in model.named_modules() if name.endswith(({suffixes}))]
"""
_SUMMED = """    for parameter in of_heads:  # each GPU has seen its own heads
        dist.all_reduce(parameter.grad.to_local(), group=mesh["tensor"].get_group())
"""
_CLIP = """    norms = [torch.nn.utils.get_total_norm([p.grad for p in kind]).full_tensor() for kind in kinds]
    for kind in kinds:
        torch.nn.utils.clip_grads_with_norm_(kind, 1.0, torch.stack(norms).norm())
"""
