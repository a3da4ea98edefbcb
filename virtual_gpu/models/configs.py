"""Configurations of models: bundled, from a folder, or from the hub."""

from __future__ import annotations

import copy
import functools
import json
import socket
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch

from ..language import tr
from ..units import choose

DEFAULT_MODEL = "EleutherAI/polyglot-ko-1.3b"


@functools.cache
def architectures() -> dict[str, dict]:
    """The bundled architectures: hub id → {"config", "dtype", "source", "published_parameters"}."""
    return json.loads(files("virtual_gpu.models").joinpath("architectures.json").read_text(encoding="utf-8"))


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
    auto_class(config)
    return config


@functools.lru_cache(maxsize=64)
def _config_from_hub(model_id: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_id, **hub_argument())


def auto_class(config: Any) -> Any:
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


def checkpoint_dtype(model_id: str, config: Any) -> torch.dtype:
    """The dtype that the hub's checkpoint is stored in; float32 where nothing says so."""
    entry = architectures().get(resolve_model_id(model_id))
    name = entry["dtype"] if entry else getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return name if isinstance(name, torch.dtype) else getattr(torch, str(name), torch.float32)


def hub_argument() -> dict:
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
