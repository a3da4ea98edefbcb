"""Which card each part of a model lies on where its layers are spread over several: transformers' `device_map`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import NotSupported
from ..language import tr
from .build import build_model, dtype_argument, name_the_loss


def device_map(config: Any, layers: Sequence[int]) -> dict[str, int]:
    """Part of the model → its card: the embedding on the first, what follows the layers on the last.

    layers: how many each card gets, in their order. What is tied to the embedding lies beside it. NotSupported for a
    model without a list of as many layers.
    """
    model = build_model(config, torch.float16)
    cards = [card for card, number in enumerate(layers) for _ in range(number)]
    blocks = _blocks_of(model, len(cards))
    last, found, passed = len(layers) - 1, {}, False
    tied = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    for name, tensors in _parts(model, blocks):
        if name == blocks:
            found |= {f"{blocks}.{number}": card for number, card in enumerate(cards)}
            passed = True
        elif any(id(tensor) in tied for tensor in tensors):
            found[name] = 0  # an embedding, and the head that is tied to it
        else:
            found[name] = last if passed else 0
    return found


def ready_to_spread() -> None:
    """Import what `load_spread` needs: before there is a CUDA GPU, for which transformers would look for more."""
    import transformers.modeling_utils  # noqa: F401
    from transformers import AutoModelForCausalLM, Trainer  # noqa: F401


def load_spread(config: Any, layers: Sequence[int], dtype: torch.dtype, four_bits: bool = False) -> torch.nn.Module:
    """The architecture as transformers loads it onto the cards of a process, of which each gets so many layers."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how = dtype_argument(dtype)
    if four_bits:
        how["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, device_map=device_map(config, layers), trust_remote_code=False, **how
        )
    model.config.use_cache = False
    name_the_loss(model)
    return model


def _blocks_of(model: torch.nn.Module, number: int) -> str:
    """The name of the list of a model's layers: so many, beside its embedding."""
    embedding = model.get_input_embeddings()
    inside = next(name for name, part in model.named_modules() if part is embedding).rpartition(".")[0]
    lists = (
        name for name, part in model.named_modules() if isinstance(part, torch.nn.ModuleList) and len(part) == number
    )
    found = next((name for name in lists if name.startswith(f"{inside}." if inside else "")), None)
    if found is None:
        raise NotSupported(
            tr(
                ko=f"device_map: 이 모델에는 층 {number}개의 목록이 없다.",
                en=f"device_map: this model has no list of {number} layers.",
            )
        )
    return found


def _parts(model: torch.nn.Module, blocks: str) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """(name, its tensors) of what lies on one card each: the parts beside the layers, and tensors of what is around.

    The list of the layers is among them, in its place.
    """
    for name, module in model.named_modules():
        if not name or blocks.startswith(f"{name}."):  # around the layers
            own = (*module.named_parameters(name, recurse=False), *module.named_buffers(name, recurse=False))
            yield from ((called, [tensor]) for called, tensor in own)
            continue
        above = name.rpartition(".")[0]
        if not above or blocks.startswith(f"{above}."):
            yield name, list(module.parameters())
