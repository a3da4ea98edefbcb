"""Chapter 8: adapters reached by the gradient, merged, loaded, counted."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path

import torch
from torch import nn

from virtual_gpu.drawing.labels import html_table
from virtual_gpu.language import tr
from virtual_gpu.models.adapters import add_adapters
from virtual_gpu.models.build import build_model, count_parameters
from virtual_gpu.models.configs import load_config
from virtual_gpu.step.predict import model_bytes
from virtual_gpu.step.setting import Setting
from virtual_gpu.units import human_bytes

# ---- checkpointing --------------------------------------------------------------------------------------------------


def reached(model: nn.Module, ids: torch.Tensor, *, input_grads: bool) -> tuple[int, int, str]:
    """(trainable tensors that one backward reached, all of them, the first warning) under checkpointing's old way.

    The old way (use_reentrant=True) looks for a gradient among a block's inputs. input_grads: whether the output of
    the frozen embedding asks for one, as `enable_input_require_grads` makes it.
    """
    base = model.get_base_model()
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    enable({"use_reentrant": True})  # the name before transformers 5.23
    if not input_grads:  # transformers turns it on together with checkpointing
        base.disable_input_require_grads()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count = sum(parameter.grad is not None for parameter in trainable)
    return count, len(trainable), str(caught[0].message) if caught else ""


# ---- merging and loading --------------------------------------------------------------------------------------------


def merge(model: nn.Module) -> None:
    """Add each adapter to its weight, in place. RuntimeError where that is done already, rather than peft's silence."""
    if _merged(model):
        raise RuntimeError(
            tr(
                ko="어댑터가 이미 합쳐져 있다. 한 번 더 합치면 BA가 두 번 더해진다. unmerge(model)로 먼저 떼어 낸다.",
                en="The adapter is merged already; once more would add BA twice. unmerge(model) takes it out.",
            )
        )
    model.merge_adapter()


def unmerge(model: nn.Module) -> None:
    """Take the adapters out of the weights again; RuntimeError where they are not in them."""
    if not _merged(model):
        raise RuntimeError(
            tr(
                ko="합쳐진 어댑터가 없다. merge(model)로 합친 모델에만 쓴다.",
                en="No adapter is merged; merge(model) comes first.",
            )
        )
    model.unmerge_adapter()


def _merged(model: nn.Module) -> bool:
    layers = [module for module in model.modules() if hasattr(module, "merged_adapters")]
    if not layers:
        raise RuntimeError(tr(ko="이 모델에는 LoRA 어댑터가 없다.", en="This model has no LoRA adapter."))
    return any(layer.merged_adapters for layer in layers)


def load_adapter(model: nn.Module, folder: str | Path, name: str) -> None:
    """Load a saved adapter beside those that a peft model has, under a name, and use it.

    FileNotFoundError where the folder holds none; ValueError where its shapes are those of another base model, before
    anything of it is loaded. (A base of the same shapes cannot be told from the right one.)
    """
    from safetensors import safe_open

    folder = Path(folder)
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(
            tr(
                ko=f"{folder}에 어댑터(adapter_model.safetensors)가 없다. save_pretrained로 저장한 폴더를 준다.",
                en=f"{folder} holds no adapter (adapter_model.safetensors); give a folder made by save_pretrained.",
            )
        )
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    layers = dict(model.get_base_model().named_modules())
    with safe_open(file, "pt") as saved:
        for key in list(saved.keys()):
            module, _, matrix = key.removeprefix("base_model.model.").rpartition(".lora_")
            if not module or matrix[0] not in "AB":
                continue
            layer, shape = layers.get(module), tuple(saved.get_slice(key).get_shape())
            here = getattr(layer, "in_features" if matrix[0] == "A" else "out_features", None)
            if here != shape[matrix[0] == "A"]:
                base = config.get("base_model_name_or_path")
                base = f" ({base})" if base else ""
                there = tr(ko="그런 층이 없다", en="has no such layer") if here is None else str(here)
                raise ValueError(
                    tr(
                        ko=f"이 어댑터는 다른 모델{base}의 것이다. {module}: 어댑터는 {shape[matrix[0] == 'A']}, "
                        f"이 모델은 {there}. 어댑터를 학습한 모델을 불러온 뒤 다시 한다.",
                        en=f"This adapter belongs to another model{base}. {module}: {shape[matrix[0] == 'A']} in the"
                        f" adapter, this model: {there}. Load the model that it was trained on.",
                    )
                )
    model.load_adapter(str(folder), adapter_name=name)
    model.set_adapter(name)


# ---- counting -------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def trainable_parameters(
    model_id: str, peft: str | None = "lora", lora_rank: int = 8, lora_targets: str | tuple[str, ...] = "attention"
) -> tuple[int, int]:
    """(trainable, all) parameters of an architecture with adapters, counted on tensors without memory."""
    setting = Setting(1, model_id=model_id, peft=peft, lora_rank=lora_rank, lora_targets=lora_targets)
    model = build_model(load_config(setting.model_id), torch.float16)
    if peft is not None:
        model = add_adapters(model, setting.lora_rank, setting.lora_targets)
    return count_parameters(model, trainable_only=True), count_parameters(model)


class StorageTable(list):
    """Rows (kind, parameters, bytes) of what a model's parameters are stored in."""

    def _repr_html_(self) -> str:
        heads = [
            tr(ko="무엇", en="what"),
            tr(ko="자료형", en="dtype"),
            tr(ko="파라미터", en="parameters"),
            tr(ko="바이트", en="bytes"),
            tr(ko="파라미터당", en="each"),
        ]
        return html_table(
            heads,
            [[kind, dtype, f"{n:,}", human_bytes(size), f"{size / n:.4f}"] for kind, dtype, n, size in self],
        )

    def __repr__(self) -> str:
        return "\n".join(f"{kind} ({dtype}): {n:,}, {size:,} B" for kind, dtype, n, size in self)


def storage_table(model: nn.Module) -> StorageTable:
    """What a model's parameters are stored in: 4-bit layers with statistics, embeddings, head, norms, adapters."""
    four_bit = tr(ko="4비트 선형층", en="4-bit linear layers")
    head = model.get_output_embeddings()
    rows: dict[tuple[str, str], list[int]] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        for part, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            count, size = parameter.numel(), parameter.nbytes
            if parameter.dtype == torch.uint8:
                kind, count = four_bit, count * 2
                size = model_bytes(module) - (0 if module.bias is None else module.bias.nbytes)
            elif "lora_" in name:
                kind = tr(ko="어댑터", en="adapters")
            elif isinstance(module, nn.Embedding):
                kind = tr(ko="임베딩", en="embeddings")
            elif module is head:
                kind = tr(ko="출력층", en="output head")
            elif part == "weight" and isinstance(module, nn.Linear):
                kind = tr(ko="선형층", en="linear layers")
            else:
                kind = tr(ko="정규화와 편향", en="norms and biases")
            row = rows.setdefault((kind, str(parameter.dtype).removeprefix("torch.")), [0, 0])
            row[0] += count
            row[1] += size
    return StorageTable((*key, *row) for key, row in rows.items())
