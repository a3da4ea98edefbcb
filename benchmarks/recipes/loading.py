"""Models as `from_pretrained` leaves them on a card, for whatever transformers is installed."""

from __future__ import annotations

from typing import Any

import torch

from virtual_gpu.models.build import build_model


def loaded(config: Any, dtype: torch.dtype, attention: str = "sdpa") -> torch.nn.Module:
    """The model on `cuda`, loaded as transformers does with a device map: the allocator is warmed up first.

    `caching_allocator_warmup` (transformers/modeling_utils.py, 4.50 and later) takes the weights' bytes in one block
    and frees it; the weights then lie in that one segment. It is the installed transformers' own that is called.
    """
    from transformers import modeling_utils

    model = build_model(config, dtype, attention)
    modeling_utils.caching_allocator_warmup(model, dict.fromkeys(model.state_dict(), torch.device("cuda:0")), None)
    placed: dict[int, torch.Tensor] = {}
    for part in model.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in placed:
                    value = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    placed[id(tensor)] = torch.nn.Parameter(value, tensor.requires_grad) if is_parameter else value
                tensors[name] = placed[id(tensor)]
    return model.eval()
