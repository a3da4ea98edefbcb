"""LoRA and QLoRA by peft's own code."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..errors import NoSuchLayer, NotSupported, WrongValue
from ..language import tr
from ..turns import in_turn
from ..units import boolean, positive_int

# peft imports bitsandbytes, which on a machine without CUDA warns of optional CPU kernels that nobody here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# peft asks every model for `is_gradient_checkpointing`, which transformers renamed in 5.23.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
PEFT = ("lora", "qlora")
LORA_RANK = 8
LORA_TARGETS = ("attention", "all-linear")
LORA_DROPOUT = 0.05
_LORA = {"lora_alpha": 32, "lora_dropout": LORA_DROPOUT, "bias": "none"}
# What makes queries and values, by the names that models have for it; the first group that a model has. Fused ones make
# the keys as well, and DeepSeek's latent attention makes queries and keys with values out of what it has compressed.
_ATTENTION = (
    ("q_proj", "v_proj"),
    ("qkv_proj",),
    ("query_key_value",),
    ("c_attn",),
    ("q_b_proj", "kv_b_proj"),
    ("q_proj", "kv_b_proj"),
)


def prepare_quantized(model: nn.Module) -> nn.Module:
    from peft import prepare_model_for_kbit_training

    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


@in_turn
def names_of_targets(value: Any) -> str | tuple[str, ...]:
    """`value` as what adapters can be put on: a word, or ends of layers' names; WrongValue otherwise."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or not all(isinstance(target, str) for target in value):
        raise WrongValue(
            tr(
                ko=f"lora_targets={value!r:.200}: 'attention', 'all-linear'나 층 이름의 목록이어야 한다.",
                en=f"lora_targets={value!r:.200}: must be 'attention', 'all-linear' or a list of layers' names.",
            )
        )
    return tuple(value)


def module_names(*arguments: str | Sequence[str]) -> tuple[str, ...]:
    """What arguments find modules by, each a name or several: names, their ends, or expressions."""
    return tuple(name for one in arguments for name in ([one] if isinstance(one, str) else one))


def add_adapters(
    model: nn.Module,
    rank: int = LORA_RANK,
    targets: str | Sequence[str] = "attention",
    *,
    modules_to_save: Sequence[str] = (),
    **more: Any,
) -> nn.Module:
    """The model with LoRA adapters from peft; everything else is frozen.

    targets: "attention" (the projections that peft takes by default: query and value, as in the LoRA paper; where it
    knows none, those of _ATTENTION), "all-linear" (every linear layer but the output head and gates with one output) or
    ends of layers' names. modules_to_save: ends of the names of modules that are trained whole beside the adapters, a
    copy of each. more: LoraConfig's other arguments. WrongValue for a rank below 1 or above a layer's smaller side,
    NoSuchLayer for targets that no linear layer has and modules that are not there, NotSupported where peft refuses.
    """
    from peft import LoraConfig, get_peft_model

    rank = positive_int(rank, "lora_rank")
    linears = linear_layers(model)
    if isinstance(targets, str) and is_pattern(targets):
        ends = [name for name in linears if re.fullmatch(targets, name)]
        if not ends:
            raise _no_such_layer(targets, targets, linears)
    else:
        ends = _ends(model, targets, linears)
    chosen = {name: layer for name, layer in linears.items() if any(_fits(name, end) for end in ends)}
    for name, layer in chosen.items():
        in_out = sides(layer)
        if rank > min(in_out):
            raise WrongValue(
                tr(
                    ko=f"lora_rank={rank}: {name}은(는) {in_out[0]} × {in_out[1]} 층이라 rank가 {min(in_out)}을(를) "
                    "넘을 수 없다.",
                    en=f"lora_rank={rank}: {name} is {in_out[0]} × {in_out[1]}; its rank is at most {min(in_out)}.",
                )
            )
    transposed = any(type(layer).__name__ == "Conv1D" for layer in chosen.values())  # GPT-2's
    pairs = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    task = {"task_type": "SEQ_2_SEQ_LM" if pairs else "CAUSAL_LM"}
    if modules_to_save:
        check_saved(model, modules_to_save)
        more["modules_to_save"] = list(modules_to_save)
    config = LoraConfig(**{"r": rank, **_LORA, **task, "fan_in_fan_out": transposed, "target_modules": ends, **more})
    # Beside weights without values the adapters have none either: to draw them would take half of a prediction's time.
    without_values = all(parameter.is_meta for parameter in model.parameters())
    try:
        return get_peft_model(model, config, low_cpu_mem_usage=without_values)
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
        there = ", ".join(sorted({name.split(".")[-1] for name in linears}))
        raise NotSupported(
            tr(
                ko=f"peft가 {', '.join(ends)}에 LoRA를 붙이지 못한다: {error} 이 모델의 선형층: {there}.",
                en=f"peft cannot put LoRA on {', '.join(ends)}: {error} Linear layers of this model: {there}.",
            )
        ) from error


def check_peft(peft: str | None, load_in_8bit: Any, modules_to_save: Any) -> tuple[bool, tuple[str, ...]]:
    """The last two as they count beside `peft`; WrongValue for what does not go together, or is no list of names."""
    if boolean(load_in_8bit, "load_in_8bit") and peft != "lora":
        raise WrongValue(
            tr(
                ko=f"load_in_8bit=True, peft={peft!r}: 8비트 가중치는 peft='lora'와 함께 쓴다. int8 가중치는 학습할 수 "
                "없고, 'qlora'의 가중치는 4비트다.",
                en=f"load_in_8bit=True, peft={peft!r}: weights in 8 bits go with peft='lora'; int8 ones cannot be "
                "trained, and those of 'qlora' have 4 bits.",
            )
        )
    names = modules_to_save
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise WrongValue(
            tr(
                ko=f"modules_to_save={names!r:.200}: 모듈 이름의 목록이어야 한다.",
                en=f"modules_to_save={names!r:.200}: must be a list of modules' names.",
            )
        )
    return load_in_8bit, tuple(sorted({*names})) if peft else ()  # in whatever order they are said


def copies_tied_end(model: nn.Module, names: Sequence[str]) -> bool:
    """Whether one of these modules is the embedding or the head, and both are one tensor.

    Both then lie in modules of their own, which FSDP2 gathers in two groups: since PyTorch 2.13 it refuses that
    (accelerate 1.15, utils/fsdp_utils.py).
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or embedding.weight is not head.weight:
        return False
    ends = [name for name, part in model.named_modules() if part is embedding or part is head]
    return any(_fits(end, name) for end in ends for name in names)


def check_saved(model: nn.Module, names: Sequence[str]) -> None:
    """NoSuchLayer for the first that no module with weights of numbers is called."""
    whole = {name for name, part in model.named_modules() if all(p.is_floating_point() for p in part.parameters())}
    missing = [name for name in names if not any(_fits(there, name) for there in whole)]
    if missing:
        outer = (model.get_input_embeddings(), model.get_output_embeddings())
        ends = sorted(
            {name.split(".")[-1] for name, part in model.named_modules() if any(part is one for one in outer)}
        )
        raise NoSuchLayer(
            tr(
                ko=f"modules_to_save: 이 모델에 없거나 양자화된 층이다: {', '.join(missing)}. 임베딩과 출력층의 이름: "
                f"{', '.join(ends)}.",
                en=f"modules_to_save: not in this model, or quantized: {', '.join(missing)}. Its embeddings and head: "
                f"{', '.join(ends)}.",
            )
        )


def sides(layer: nn.Module) -> tuple[int, int]:
    """(inputs, outputs), also of a layer whose weights are packed."""
    return (layer.in_features, layer.out_features) if hasattr(layer, "in_features") else tuple(layer.weight.shape)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """name → linear layer, without the output head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and module is not head
    }


def is_pattern(targets: str) -> bool:
    """Whether a text is a regular expression of whole names, as peft takes one; WrongValue for what is none."""
    if not {*targets} & {*"\\^$|?*+()[]{}"}:
        return False
    try:
        re.compile(targets)
    except re.error as error:
        raise WrongValue(
            tr(
                ko=f"lora_targets={targets!r:.200}: 정규식이 아니다({error}).",
                en=f"lora_targets={targets!r:.200}: no regular expression ({error}).",
            )
        ) from error
    return True


def _ends(model: nn.Module, targets: str | Sequence[str], linears: dict[str, nn.Module]) -> list[str]:
    """The ends of names that `targets` stands for in this model."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    there = sorted({name.split(".")[-1] for name in linears})
    ends = [targets] if isinstance(targets, str) else list(targets)
    if ends == ["all-linear"]:
        gates = {name.split(".")[-1] for name, layer in linears.items() if 1 in sides(layer)}
        ends = [end for end in there if end not in gates]
    elif ends == ["attention"]:
        known = DEFAULTS.get(getattr(getattr(model, "config", None), "model_type", None))
        groups = [known, *_ATTENTION] if isinstance(known, list) else _ATTENTION
        ends = next((group for group in groups if all(end in there for end in group)), groups[0])
    missing = [str(end) for end in ends if not any(_fits(name, end) for name in linears)]
    if missing or not ends:
        raise _no_such_layer(", ".join(missing) or "-", targets, linears)
    return list(ends)


def _no_such_layer(what: str, targets: str | Sequence[str], linears: dict[str, nn.Module]) -> NoSuchLayer:
    there = ", ".join(sorted({name.split(".")[-1] for name in linears}))
    others = ", ".join(repr(name) for name in LORA_TARGETS if targets != name)
    return NoSuchLayer(
        tr(
            ko=f"LoRA를 붙일 층을 찾지 못했다: {what}. 이 모델의 선형층: {there}. {others}도 쓸 수 있다.",
            en=f"No layer to put LoRA on: {what}. Linear layers of this model: {there}. {others} may do as well.",
        )
    )


def _fits(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")
