"""The KV cache of a causal language model: as a cache object holds it, and of which models it is shown."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from virtual_gpu.models.configs import load_config

BYTES = {"fp16/bf16": 2.0, "fp32": 4.0, "8 bit": 1.0, "4 bit": 0.5}
# Models of the catalogue whose layers keep plain keys and values; some only of a window.
MODELS = (
    "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B",
    "EleutherAI/polyglot-ko-1.3b", "EleutherAI/polyglot-ko-5.8b", "EleutherAI/polyglot-ko-12.8b",
    "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B", "google/gemma-3-1b-pt",
    "kakaocorp/kanana-nano-2.1b-base", "upstage/SOLAR-10.7B-v1.0", "mistralai/Mistral-7B-v0.3", "microsoft/phi-4",
)  # fmt: skip


def cache_bytes(cache: Any) -> int:
    """Bytes of the GPU that a cache of transformers holds: of whole storages, a slice keeps all that it is cut from."""
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values) if t is not None and t.is_cuda]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@lru_cache(maxsize=64)
def parameters(model_id: str) -> int:
    """How many parameters a model has."""
    from virtual_gpu.models.build import build_model, count_parameters

    return count_parameters(build_model(load_config(model_id), torch.float16))
