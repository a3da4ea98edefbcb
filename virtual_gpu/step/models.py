"""Loading: a model from the hub, or its architecture alone where weights are not to be had; LoRA and QLoRA."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import logging
import re
import socket
import warnings
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

from ..counting.gpu import on_virtual_gpu
from ..gpus import GPU, current_gpu
from ..language import tr
from ..trace.depth import with_depth
from ..units import choose, positive_int

DEFAULT_MODEL = "EleutherAI/polyglot-ko-1.3b"
ATTENTION = ("sdpa", "eager")
PEFT = ("lora", "qlora")
# peft imports bitsandbytes, which on a machine without CUDA warns of optional CPU kernels that the course does not use.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# peft asks every model for `is_gradient_checkpointing`, which transformers renamed in 5.23.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
LORA_RANK = 8
LORA_TARGETS = ("attention", "all-linear")
_LORA = {"lora_alpha": 32, "lora_dropout": 0.05, "bias": "none"}


@functools.cache
def architectures() -> dict[str, dict]:
    """The bundled architectures: hub id → {"config", "dtype", "source", "published_parameters"}."""
    return json.loads(files("virtual_gpu.step").joinpath("architectures.json").read_text(encoding="utf-8"))


def resolve_model_id(model_id: str) -> str:
    """The full hub id of a bundled architecture ("gpt2" and any case work); other ids as they are."""
    known = {}
    for name in architectures():
        known |= {name.lower(): name, name.split("/")[-1].lower(): name}
    return known.get(str(model_id).lower(), model_id)


def load_config(model_id: str) -> Any:
    """A transformers config: bundled, from a local folder, or from the hub.

    ValueError names the nearest known ids, or says that the config is not a language model's.
    """
    from transformers import AutoConfig

    model_id = resolve_model_id(model_id)
    entry = architectures().get(model_id)
    if entry is not None:
        return AutoConfig.for_model(**entry["config"], name_or_path=model_id)
    try:
        if Path(str(model_id)).is_dir():
            config = AutoConfig.from_pretrained(model_id, local_files_only=True)
        else:
            config = copy.deepcopy(_config_from_hub(str(model_id)))
    except (OSError, ValueError) as error:
        short = [name.split("/")[-1] for name in architectures()]
        try:
            choose(model_id, [*architectures(), *short], tr(ko="모델", en="model"))
        except ValueError as choice:
            reason = tr(
                ko="허브에서도 찾지 못했다(네트워크가 없거나, 이름이 틀렸거나, 접근 권한이 필요하다).",
                en="The hub does not have it either (no network, a wrong name, or a gated model).",
            )
            raise ValueError(f"{choice} {reason}") from error
        raise
    _auto_class(config)
    return config


@functools.lru_cache(maxsize=64)
def _config_from_hub(model_id: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_id, **_hub_argument())


def _auto_class(config: Any) -> Any:
    """Who builds and loads it: an encoder-decoder learns sequence to sequence, every other model the next token."""
    import transformers

    pairs = getattr(config, "is_encoder_decoder", False)
    known = transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if pairs else transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in known:
        raise ValueError(
            tr(
                ko=f"{config.model_type}: 토큰을 읽고 토큰을 쓰는 모델이 아니라서 이 과정의 학습 루프로는 학습하지 "
                "못한다. 언어 모델의 이름을 쓴다.",
                en=f"{config.model_type} does not read tokens and write tokens, as the course's training loop needs: "
                "use a language model.",
            )
        )
    return transformers.AutoModelForSeq2SeqLM if pairs else transformers.AutoModelForCausalLM


def build_model(config: Any, dtype: torch.dtype, attention: str = "sdpa", device: Any = "meta") -> nn.Module:
    """A language model, causal or encoder-decoder, with random weights.

    On the meta device, the default, it has shapes alone: no values, no memory.
    """
    auto = _auto_class(config)
    _run_as_eager()
    config = copy.deepcopy(config)  # building writes into it
    with torch.device(device):
        model = auto.from_config(config, **_dtype_argument(dtype), **_attention_argument(attention))
        model.tie_weights()  # transformers 5.0 does not tie on the meta device
    _keep_in_fp32(model, dtype)
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # what transformers takes anyway for GPT-2, with a warning
    return model


def grows_evenly(config: Any, depths: Sequence[int], more: int) -> bool:
    """Whether the parameters `more` steps after the first two of these depths are what a straight line says.

    They are not where another kind of layer only comes later (experts after the first dense ones).
    """
    one, two = (_parameters_of(with_depth(config, layers)) for layers in depths[:2])
    return _parameters_of(config) == one + more * (two - one)


_parameters: dict[tuple[type, str], int] = {}  # of a config, all that it says


def _parameters_of(config: Any) -> int:
    key = type(config), config.to_json_string(use_diff=False)
    if key not in _parameters:
        _parameters[key] = count_parameters(build_model(config, torch.float16))
    return _parameters[key]


def _keep_in_fp32(model: nn.Module, dtype: torch.dtype) -> None:
    """The parts that transformers loads in fp32 even where the rest has 16 bits (routers, T5's `wo`), in place."""
    names = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    if dtype == torch.float16:
        names |= {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.dtype in (torch.float16, torch.bfloat16) and any(re.search(part, name) for part in names):
            tensor.data = tensor.data.float()


@functools.cache
def _run_as_eager() -> None:
    # transformers takes fake tensors for a trace (torch.export) and then makes attention masks that an eager run skips.
    from transformers.utils import import_utils

    is_fake_tensor = getattr(import_utils, "is_fake_tensor", None)
    if is_fake_tensor is not None:
        import_utils.is_fake_tensor = lambda x: is_fake_tensor(x) and not on_virtual_gpu(x)


def build_on_gpu(
    config: Any,
    dtype: torch.dtype,
    attention: str,
    peft: str | None,
    gpu: GPU,
    lora_rank: int = LORA_RANK,
    lora_targets: str | Sequence[str] = "attention",
) -> nn.Module:
    """The architecture on the GPU: without values on a virtual one, with random weights on a real one."""
    # bitsandbytes quantizes while it moves a layer to the GPU: until then the weights lie on the CPU.
    device = "meta" if gpu.is_virtual else "cpu" if peft == "qlora" else gpu.device
    model = build_model(config, dtype, attention, device)
    if peft == "qlora":
        _quantize(model, dtype, gpu)
    return gpu.place(model if peft is None else add_adapters(model, lora_rank, lora_targets))


def checkpoint_dtype(model_id: str, config: Any) -> torch.dtype:
    """The dtype that the hub's checkpoint is stored in; float32 where nothing says so."""
    entry = architectures().get(resolve_model_id(model_id))
    name = entry["dtype"] if entry else getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return name if isinstance(name, torch.dtype) else getattr(torch, str(name), torch.float32)


def load_model_and_tokenizer(
    model_id: str,
    peft: str | None = None,
    *,
    dtype: torch.dtype | str = "auto",
    attention: str = "sdpa",
    gpu: GPU | None = None,
    quiet: bool = False,
    lora_rank: int = LORA_RANK,
    lora_targets: str | Sequence[str] = "attention",
) -> tuple[nn.Module, Any]:
    """A language model (causal, or an encoder-decoder) on the GPU in use, and its tokenizer.

    On a real GPU: the hub's weights, or random ones in the bundled architecture when the hub does not answer. On a
    virtual GPU: the architecture alone, nothing is downloaded, with a byte-level tokenizer. One line says which.
    peft: None, "lora" (r=8, alpha=32, dropout 0.05) or "qlora" (the same on weights in NF4 with double quantization;
    `prepare_model_for_kbit_training` without its checkpointing). lora_rank, lora_targets: see `add_adapters`.
    dtype: "auto" is the checkpoint's. attention: "sdpa" is eager where an architecture has no other.
    ValueError for unknown names; ImportError where peft or bitsandbytes is missing.
    """
    gpu = gpu or current_gpu()
    attention = choose(attention, ATTENTION, tr(ko="어텐션", en="attention"))
    if peft is not None:
        peft = choose(peft, PEFT, "peft")
        require("peft", *(["bitsandbytes"] if peft == "qlora" else []))
    model_id = resolve_model_id(model_id)
    if not gpu.is_virtual:
        try:
            return _load_from_hub(model_id, peft, dtype, attention, gpu, lora_rank, lora_targets)
        except OSError as error:  # no network, a gated or an unknown repository
            if model_id not in architectures():
                load_config(model_id)  # raises with the nearest names
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    config = load_config(model_id)
    dtype = checkpoint_dtype(model_id, config) if dtype == "auto" else dtype
    model = build_on_gpu(config, dtype, attention, peft, gpu, lora_rank, lora_targets)
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


def count_parameters(model: nn.Module, trainable_only: bool = False) -> int:
    """The number of parameters, tied ones once; 4-bit weights count as the numbers they stand for."""
    return sum(
        parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1)
        for parameter in model.parameters()
        if parameter.requires_grad or not trainable_only
    )


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
) -> tuple[nn.Module, Any]:
    from transformers import AutoTokenizer

    config = load_config(model_id)
    hub = _hub_argument()
    arguments = {**hub, **_dtype_argument(dtype), **_attention_argument(attention)}
    if peft == "qlora" or importlib.util.find_spec("accelerate"):
        arguments["device_map"] = {"": gpu.device}  # straight to the GPU; it takes accelerate
    if peft == "qlora":
        from transformers import BitsAndBytesConfig

        from .four_bit import check_kernels

        check_kernels(gpu.device)
        compute = checkpoint_dtype(model_id, config) if dtype == "auto" else dtype
        arguments["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute,
        )
    model = _auto_class(config).from_pretrained(model_id, **arguments)
    model = model if "device_map" in arguments else gpu.place(model)
    tokenizer = AutoTokenizer.from_pretrained(model_id, **hub)
    if peft is not None:
        model = add_adapters(_prepare_4bit(model) if peft == "qlora" else model, lora_rank, lora_targets)
    return model, tokenizer


def _quantize(model: nn.Module, dtype: torch.dtype, gpu: GPU) -> None:
    """Make the model's linear layers 4-bit ones and prepare it for training, in place."""
    from .four_bit import check_kernels, quantize_linears

    if not gpu.is_virtual:
        check_kernels(gpu.device)
    quantize_linears(model, dtype, gpu)
    if not gpu.is_virtual:
        gpu.place(model)
    model.is_loaded_in_4bit = True
    _prepare_4bit(model)


def _prepare_4bit(model: nn.Module) -> nn.Module:
    from peft import prepare_model_for_kbit_training

    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def add_adapters(
    model: nn.Module, rank: int = LORA_RANK, targets: str | Sequence[str] = "attention", **more: Any
) -> nn.Module:
    """The model with LoRA adapters from peft; everything else is frozen.

    targets: "attention" (the projections that peft takes by default: query and value, as in the LoRA paper),
    "all-linear" (every linear layer but the output head) or ends of layers' names. more: LoraConfig's other arguments.
    ValueError for a rank below 1 or above a layer's smaller side, and for targets that no linear layer has.
    """
    from peft import LoraConfig, get_peft_model

    rank = positive_int(rank, "lora_rank")
    linears = linear_layers(model)
    ends = _ends(model, targets, linears)
    chosen = {name: layer for name, layer in linears.items() if any(_fits(name, end) for end in ends)}
    for name, layer in chosen.items():
        sides = layer.weight.shape if not hasattr(layer, "in_features") else (layer.in_features, layer.out_features)
        if rank > min(sides):
            raise ValueError(
                tr(
                    ko=f"lora_rank={rank}: {name}은(는) {sides[0]} × {sides[1]} 층이라 rank가 {min(sides)}을(를) "
                    "넘을 수 없다.",
                    en=f"lora_rank={rank}: {name} is {sides[0]} × {sides[1]}; its rank is at most {min(sides)}.",
                )
            )
    transposed = any(type(layer).__name__ == "Conv1D" for layer in chosen.values())  # GPT-2's
    pairs = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    task = {"task_type": "SEQ_2_SEQ_LM" if pairs else "CAUSAL_LM"}
    config = LoraConfig(**{"r": rank, **_LORA, **task, "fan_in_fan_out": transposed, "target_modules": ends, **more})
    # Beside weights without values the adapters have none either: to draw them would take half of a prediction's time.
    without_values = all(parameter.is_meta for parameter in model.parameters())
    return get_peft_model(model, config, low_cpu_mem_usage=without_values)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """name → linear layer, without the output head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and module is not head
    }


def _ends(model: nn.Module, targets: str | Sequence[str], linears: dict[str, nn.Module]) -> list[str]:
    """The ends of names that `targets` stands for in this model."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    there = sorted({name.split(".")[-1] for name in linears})
    ends = [targets] if isinstance(targets, str) else list(targets)
    if ends == ["all-linear"]:
        ends = there
    elif ends == ["attention"]:
        ends = DEFAULTS.get(getattr(getattr(model, "config", None), "model_type", None)) or ["q_proj", "v_proj"]
    missing = [str(end) for end in ends if not any(_fits(name, end) for name in linears)]
    if missing or not ends:
        what = ", ".join(missing) or "-"
        raise ValueError(
            tr(
                ko=f"LoRA를 붙일 층을 찾지 못했다: {what}. 이 모델의 선형층: {', '.join(there)}. "
                "'attention'이나 'all-linear'를 써도 된다.",
                en=f"No layer to put LoRA on: {what}. Linear layers of this model: {', '.join(there)}. "
                "'attention' and 'all-linear' work as well.",
            )
        )
    return list(ends)


def _fits(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def require(*modules: str) -> None:
    """ImportError, with what to install, for the first of these modules that is missing."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ImportError(
                tr(
                    ko=f"{module}이(가) 없다. 'pip install {module}'로 설치한 뒤 커널을 다시 시작한다.",
                    en=f"{module} is missing: 'pip install {module}', then restart the kernel.",
                )
            )


def _hub_argument() -> dict:
    """Only the cache where the hub does not answer: huggingface_hub itself would try again for half a minute."""
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    if not offline and not getproxies():
        hub = urlsplit(constants.ENDPOINT)
        try:
            socket.create_connection((hub.hostname, hub.port or {"http": 80}.get(hub.scheme, 443)), timeout=5).close()
        except OSError:
            offline = True
    return {"local_files_only": True} if offline else {}


def _attention_argument(attention: str) -> dict:
    """Nothing for "sdpa": transformers takes it by itself, and eager attention in models that do not have it."""
    return {} if attention == "sdpa" else {"attn_implementation": attention}


def _dtype_argument(dtype: Any) -> dict:
    """`dtype=` since transformers 4.56, `torch_dtype=` before."""
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    return {"dtype" if version >= (4, 56) else "torch_dtype": dtype}
