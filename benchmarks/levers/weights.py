"""Levers on the weights: fewer bits, adapters, parts that stay trainable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .program import Program, adapted, checkpointed, shape


def four_bits(
    kind: str = "nf4", double: bool = False, upcast: bool = True, **more: Any
) -> Callable[[Program], nn.Module]:
    """bitsandbytes' 4-bit layers, loaded as for QLoRA. upcast: the other weights to fp32, as peft prepares them."""
    return _quantized(lambda compute: {
        "load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double,
        "bnb_4bit_compute_dtype": compute, **more,
    }, upcast)  # fmt: skip


def eight_bits() -> Callable[[Program], nn.Module]:
    """LLM.int8()."""
    return _quantized(lambda compute: {"load_in_8bit": True})


def reentrant(model: nn.Module) -> None:
    """Checkpointing whose first forward makes no graph, to which LLM.int8()'s inputs would hang."""
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


def _quantized(config: Callable[[torch.dtype], dict[str, Any]], upcast: bool = True) -> Callable[[Program], nn.Module]:
    def load(program: Program) -> nn.Module:
        from peft import prepare_model_for_kbit_training
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        model = AutoModelForCausalLM.from_pretrained(
            program.model_id, dtype=program.weights, quantization_config=BitsAndBytesConfig(**config(program.weights)),
            device_map={"": 0}, **shape(program),
        )  # fmt: skip
        return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False) if upcast else model

    return load


def with_whole_embeddings(model: nn.Module) -> nn.Module:
    """`modules_to_save`: embeddings and head are trained whole beside the adapters, as for new tokens."""
    ends = [
        next(name for name, module in model.named_modules() if module is wanted).split(".")[-1]
        for wanted in (model.get_input_embeddings(), model.get_output_embeddings())
    ]
    return adapted(model, modules_to_save=ends)


def attention_only(model: nn.Module) -> nn.Module:
    return adapted(model, target_modules=["q_proj", "v_proj"])


def experts_too(model: nn.Module) -> nn.Module:
    """`target_parameters`: LoRA on the experts' weights, which are one parameter of three dimensions and no layer."""
    names = {name.split(".experts.")[-1] for name, _ in model.named_parameters() if ".experts." in name}
    parameters = [f"mlp.experts.{name}" for name in sorted(names)]
    return adapted(model, target_modules=["q_proj", "v_proj"], target_parameters=parameters, lora_dropout=0.0)


def tied(program: Program) -> nn.Module:
    """Embeddings and head are one parameter. Another model: the one that has them apart cannot be tied afterwards."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        program.model_id, dtype=program.weights, tie_word_embeddings=True, **shape(program)
    ).cuda()


def float8(model: nn.Module) -> None:
    """torchao's training in fp8: products in fp8, weights and what is kept for backward in 16 bits."""
    from torchao.float8 import convert_to_float8_training

    checkpointed(model)
    head = model.get_output_embeddings()
    convert_to_float8_training(model, module_filter_fn=lambda module, name: module is not head)
