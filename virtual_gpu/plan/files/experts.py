"""The parts of PyTorch's loop in which experts lie on GPUs of their own: transformers' `DistributedConfig`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .keeping import checkpointing
from .settings import autocast_dtype, repeat_kv

if TYPE_CHECKING:
    from ..plans import Plan


def parts(plan: Plan) -> dict[str, str]:
    """name → text: what a loop on several GPUs says otherwise where tokens travel to the experts."""
    recipe = plan.recipe
    mixed = "not args.cpu" if autocast_dtype(recipe) else "False"
    return {
        "model": repeat_kv(plan)
        + _MODEL.format(degree=recipe.expert_parallel, mixed=mixed, checkpointing=checkpointing(plan)),
        "wrapped": _GROUPS,
        "modules": "import os\nfrom datetime import timedelta\n",
        "synchronized": "",  # every micro-batch's gradients are split at once: no whole ones wait
        "parallel": "",
        "clip": _CLIP,
        "save": _SAVE,
    }


OF_DISTRIBUTED = "from transformers.distributed import DistributedConfig\n"
PATIENCE = ", timeout=timedelta(hours=2)"  # the others wait while the first one writes the whole model
_MODEL = """if world % {degree}:
    raise SystemExit(f"{{world}} processes are no equal parts of {degree}, which have the experts between them.")
if args.cpu and torch.cuda.is_available():
    raise SystemExit("transformers puts the model on this machine's GPU: rehearse with CUDA_VISIBLE_DEVICES= set.")
# Each GPU has some experts, and FSDP2 splits the rest over all. Mixed: computed in bf16.
shared = DistributedConfig(fsdp_size=world, ep_size={degree}, fsdp_mixed_precision={mixed})
model = AutoModelForCausalLM.from_pretrained(
    args.model, dtype=dtype, trust_remote_code=False, distributed_config=shared
)
{checkpointing}"""
_GROUPS = """meshes = {}
for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
    meshes.setdefault(parameter.device_mesh, []).append(parameter)
trained = [{"params": group} for group in meshes.values()]  # a fused step does not take them together
"""
_CLIP = """    norms = [
        torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]).full_tensor()
        for group in meshes.values()
    ]
    norm = torch.stack(norms).norm()
    for group in meshes.values():
        torch.nn.utils.clip_grads_with_norm_(group, 1.0, norm)
"""
_SAVE = """model.save_pretrained(args.output)  # gathered for the first of them
if rank == 0:
    tokenizer.save_pretrained(args.output)
dist.destroy_process_group()
"""
