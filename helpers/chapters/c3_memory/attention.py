"""What a layer keeps for backward, tensor by tensor, and what `scaled_dot_product_attention` makes of grouped heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.language import tr
from virtual_gpu.models.build import build_on_gpu
from virtual_gpu.models.configs import load_config
from virtual_gpu.rules.attention import Request, attention_kernel
from virtual_gpu.units import human_bytes

from ...rows import LeftRows
from .tables import table

_BATCH = 4
_SMALL = 0.25  # bytes a token and hidden unit: below it a tensor goes into the last row


class _Kept:
    """The storages that one layer saves for backward, each under the first module that asked for it."""

    def __init__(self, layer: nn.Module, weights: set[int]):
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._within: list[str] = []
        self._seen = weights
        for name, module in layer.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._within.append(name))
            module.register_forward_hook(self._leave)

    def _leave(self, *_: Any) -> None:
        self._within.pop()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.untyped_storage()._cdata
        if self._within and key not in self._seen:
            self._seen.add(key)
            self.tensors.append((self._within[-1], tensor))  # alive, so that no other storage takes its place
        return tensor


def kept_by_a_layer(model_id: str, card: str = "T4", length: int = 1024, attention: str = "sdpa") -> LeftRows:
    """What the first layer of a decoder keeps for backward in fp16: shape, dtype, bytes for each token and hidden unit.

    A tensor that is a part of another (a view) stands with the whole storage that it keeps alive.
    """
    config = load_config(model_id)
    config.num_hidden_layers = 2
    gpu = VirtualGPU(CATALOG[card], limited=False)
    model = build_on_gpu(config, torch.float16, attention, None, gpu)
    kept = _Kept(model.base_model.layers[0], {p.untyped_storage()._cdata for p in model.parameters()})
    with gpu, torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        _ = model(input_ids=torch.zeros(_BATCH, length, dtype=torch.int64), use_cache=False).logits
    rows, small, total = [], 0.0, 0.0
    for module, tensor in kept.tensors:
        share = tensor.untyped_storage().nbytes() / (_BATCH * length * config.hidden_size)
        total += share
        if share < _SMALL:
            small += share
        else:
            rows.append([module, str(tuple(tensor.shape)), str(tensor.dtype).removeprefix("torch."), f"{share:.1f}"])
    rows.append([tr(ko="그 밖", en="others"), "", "", f"{small:.1f}"])
    rows.append([tr(ko="합", en="together"), "", "", f"{total:.1f}"])
    return table("module shape dtype per_sbh", rows)


def grouped_heads(length: int = 2048, heads: int = 32, groups: int = 8, width: int = 64) -> LeftRows:
    """Attention in fp16 with fewer heads of keys and values, by kernel: what is kept for backward, and held at most.

    "repeat_kv" copies each head of keys and values as often as needed before the call.
    """
    rows = []
    for card in ("T4", "A100-40GB"):
        for how in ("enable_gqa", "repeat_kv"):
            gpu = VirtualGPU(CATALOG[card], limited=False)
            with gpu:
                query, key, value = (
                    torch.empty(1, n, length, width, dtype=torch.float16, requires_grad=True)
                    for n in (heads, groups, groups)
                )
                before = gpu.memory_allocated()
                if how == "repeat_kv":
                    key, value = (tensor.repeat_interleave(heads // groups, 1) for tensor in (key, value))
                out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=how == "enable_gqa")
            kept, peak = gpu.memory_allocated() - before, gpu.max_memory_allocated() - before
            asked = Request(out.dtype, width, width, length, length, grouped_query=how == "enable_gqa", is_causal=True)
            rules = [rule.name for rule in gpu.rules.active()]
            kernel = attention_kernel(gpu.rules.compute_capability, asked, rules=rules)
            rows.append([card, how, kernel, human_bytes(kept), human_bytes(peak)])
    return table("gpu call kernel kept peak", rows)
