"""Loading a model: from the hub, or its architecture alone where weights are not to be had."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from virtual_gpu.counting.gpu import as_gpu
from virtual_gpu.language import tr
from virtual_gpu.models.adapters import (
    LORA_DROPOUT,
    LORA_RANK,
    PEFT,
    add_adapters,
    check_peft,
    prepare_quantized,
)
from virtual_gpu.models.attention import ATTENTION, attention_argument
from virtual_gpu.models.build import build_on_gpu, dtype_argument
from virtual_gpu.models.configs import (
    auto_class,
    bundled,
    checkpoint_dtype,
    hub_argument,
    load_config,
    resolve_model_id,
)
from virtual_gpu.optional import require
from virtual_gpu.real import GPU
from virtual_gpu.units import choose

from .gpu import current_gpu


def load_model_and_tokenizer(
    model_id: str,
    peft: str | None = None,
    *,
    dtype: torch.dtype | str = "auto",
    attention: str = "sdpa",
    gpu: GPU | str | None = None,
    quiet: bool = False,
    lora_rank: int = LORA_RANK,
    lora_targets: str | Sequence[str] = "attention",
    lora_dropout: float = LORA_DROPOUT,
    double_quantization: bool = True,
    rest_in_fp32: bool = True,
    load_in_8bit: bool = False,
    modules_to_save: Sequence[str] = (),
) -> tuple[nn.Module, Any]:
    """A language model (causal, or an encoder-decoder) on the GPU in use, and its tokenizer.

    On a real GPU: the hub's weights, or random ones in the bundled architecture when the hub does not answer. On a
    virtual GPU: the architecture alone, nothing is downloaded, with a byte-level tokenizer. One line says which.
    peft: None, "lora" (r=8, alpha=32, dropout 0.05) or "qlora" (the same on weights in NF4 with double quantization;
    `prepare_model_for_kbit_training` without its checkpointing). lora_rank, lora_targets: see `add_adapters`;
    double_quantization, rest_in_fp32, load_in_8bit, modules_to_save: see `Setting`.
    dtype: "auto" is the checkpoint's. attention: "sdpa" is eager where an architecture has no other.
    ValueError for unknown names; ImportError where peft or bitsandbytes is missing.
    """
    gpu = as_gpu(gpu) if gpu is not None else current_gpu()
    attention = choose(attention, ATTENTION, tr(ko="어텐션", en="attention"))
    if peft is not None:
        peft = choose(peft, PEFT, "peft")
    load_in_8bit, modules_to_save = check_peft(peft, load_in_8bit, modules_to_save)
    if peft is not None:
        require("peft", *(["bitsandbytes"] if peft == "qlora" or load_in_8bit else []))
    model_id = resolve_model_id(model_id)
    if not gpu.is_virtual:
        try:
            return _load_from_hub(
                model_id, peft, dtype, attention, gpu, lora_rank, lora_targets, lora_dropout,
                double_quantization, rest_in_fp32, load_in_8bit, modules_to_save,
            )  # fmt: skip
        except OSError as error:  # no network, a gated or an unknown repository
            if bundled(model_id) is None:
                load_config(model_id)  # raises with the nearest names
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    config = load_config(model_id)
    dtype = checkpoint_dtype(model_id, config) if dtype == "auto" else dtype
    model = build_on_gpu(
        config, dtype, attention, peft, gpu, lora_rank, lora_targets, lora_dropout, double_quantization, rest_in_fp32,
        load_in_8bit, modules_to_save,
    )  # fmt: skip
    if gpu.is_virtual:
        line = tr(
            ko=f"{model_id}: 구조만 만들었다. 가중치는 내려받지 않는다 (가상 {gpu.name}).",
            en=f"{model_id}: the architecture alone; no weights are downloaded (virtual {gpu.name}).",
        )
    else:
        line = tr(
            ko=f"{model_id}: 허브에 닿지 않아({reason}) 같은 구조에 무작위 가중치를 썼다.",
            en=f"{model_id}: the hub did not answer ({reason}); same architecture with random weights.",
        )
    if not (quiet and gpu.is_virtual):  # that weights are random is always said
        print(line)
    return model, byte_tokenizer()


def adapted_on_card(model_id: str, rank: int) -> nn.Module:
    """A model to train as a program loads it: in bf16 onto the card, checkpointing on, with LoRA of this rank."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_id, dtype="bfloat16", device_map="cuda")
    model.gradient_checkpointing_enable()
    return get_peft_model(model, lora_config(rank)).train()


def byte_tokenizer() -> Any:
    """A tokenizer that needs no network: one token a byte, after a padding and an end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<|pad|>", "<|endoftext|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|endoftext|>")


def _load_from_hub(
    model_id: str,
    peft: str | None,
    dtype: Any,
    attention: str,
    gpu: GPU,
    lora_rank: int,
    lora_targets: str | Sequence[str],
    lora_dropout: float,
    double_quantization: bool,
    rest_in_fp32: bool,
    load_in_8bit: bool,
    modules_to_save: Sequence[str],
) -> tuple[nn.Module, Any]:
    from transformers import AutoTokenizer

    config = load_config(model_id)
    hub = hub_argument()
    arguments = {**hub, "trust_remote_code": False, **dtype_argument(dtype), **attention_argument(attention)}
    if peft == "qlora" or load_in_8bit or importlib.util.find_spec("accelerate"):
        arguments["device_map"] = {"": gpu.device}  # straight to the GPU; it takes accelerate
    if peft == "qlora":
        from transformers import BitsAndBytesConfig

        from virtual_gpu.models.quantized import check_kernels

        check_kernels(gpu.device)
        compute = checkpoint_dtype(model_id, config) if dtype == "auto" else dtype
        arguments["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=double_quantization,
            bnb_4bit_compute_dtype=compute,
        )
    if load_in_8bit:
        from transformers import BitsAndBytesConfig

        arguments["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    model = auto_class(config).from_pretrained(model_id, **arguments)
    model = model if "device_map" in arguments else gpu.place(model)
    tokenizer = AutoTokenizer.from_pretrained(model_id, trust_remote_code=False, **hub)
    if peft is not None:
        quantized = peft == "qlora" or load_in_8bit
        model = prepare_quantized(model) if quantized and rest_in_fp32 else model
        model = add_adapters(model, lora_rank, lora_targets, lora_dropout=lora_dropout, modules_to_save=modules_to_save)
    return model, tokenizer


def lora_config(rank: int = 16) -> Any:
    """peft's LoraConfig on all linear layers of a language model, for a trainer that makes the adapter itself."""
    from peft import LoraConfig

    return LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
