"""The parts of PyTorch's loop in which several GPUs share each text: context_parallel, and FSDP2 over all of them."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..plans import Plan


def parts(plan: Plan, whole: dict[str, str]) -> dict[str, str]:
    """name → text: what a loop that FSDP2 splits says otherwise where a text is split too; whole: what it says."""
    degree = plan.recipe.context_parallel
    return {
        "of_shards": whole["of_shards"] + _IMPORTS,
        "step_blocks": f"world // {degree} * MICRO_BATCH * ACCUMULATION",
        "loader": _LOADER.format(degree=degree),
        "device": whole["device"] + _REFUSED,
        "wrapped": whole["wrapped"] + _WRAPPED.format(degree=degree),
        "forward": _CUT.format(degree=degree)
        + textwrap.indent(whole["forward"].replace("labels=batch", "labels=targets, **of_part"), "    "),
        "backward": "    " + whole["backward"],
    }


_IMPORTS = """from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
"""
_REFUSED = """if args.cpu:
    raise SystemExit("Attention goes round GPUs alone: a text that is shared cannot be rehearsed with --cpu.")
"""
_LOADER = """# The GPUs of a group take the same blocks, of which each has its part.
sampler = DistributedSampler(blocks, world // {degree}, rank // {degree}, drop_last=True)
loader = DataLoader(torch.tensor(blocks), batch_size=MICRO_BATCH, sampler=sampler, drop_last=True)"""
_WRAPPED = """groups = init_device_mesh(device.type, (world // {degree}, {degree}), mesh_dim_names=("groups", "text"))


def without_mask(module, operands, named):
    \"""Attention is causal by itself; a mask would be of the whole text.\"""
    return operands, named | {{"attention_mask": None}}


for name, module in model.named_modules():
    if name.endswith("self_attn"):
        module.register_forward_pre_hook(without_mask, with_kwargs=True)
"""
# A part's sum over the mean part's number of targets: the mean of that over all ranks is the mean over all targets.
_CUT = """        # A part's last token has its next one on another GPU: targets are shifted before the text is cut.
        targets = torch.nn.functional.pad(batch[:, 1:], (0, 1), value=-100)
        positions = torch.arange(LENGTH, device=device)[None]
        of_part = {{"shift_labels": targets, "position_ids": positions}}
        of_part["num_items_in_batch"] = MICRO_BATCH * (LENGTH - 1) / {degree}  # the mean of all parts
        cut = context_parallel(groups["text"], buffers=[batch, targets, positions], buffer_seq_dims=[1, 1, 1])
        with cut, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
"""
