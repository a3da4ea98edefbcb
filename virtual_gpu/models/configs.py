"""Configurations of models: bundled, given, from a folder, or from the hub. They are data: no code of theirs runs."""

from __future__ import annotations

import copy
import functools
import hashlib
import heapq
import json
import logging
import math
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch

from ..errors import BadConfiguration, NotSupported, UnknownName, VirtualGPUError, WrongValue
from ..frames import clear_frames
from ..language import tr
from ..remembered import remembered
from .bundled import architectures, variants

DEFAULT_MODEL = "EleutherAI/polyglot-ko-1.3b"
MOST_LAYERS = 1024  # the deepest published language models have fewer than 200
MOST_LABELS = 2**15  # of a classifier, which no language model is: transformers makes names of them, again and again
MOST = 2**24  # of any size: the largest vocabularies and positions are below
LARGEST_FILE = 10 * 2**20  # bytes of a config.json
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_given: dict[str, Any] = {}  # name -> configuration


def bundled(model_id: str) -> dict | None:
    """What comes with the package for this hub id (see `bundled.py`); None where nothing does."""
    return architectures().get(model_id) or variants().get(model_id)


def resolve_model_id(model_id: Any) -> str:
    """The full hub id of a bundled architecture ("gpt2" and any case work); other ids and paths as they are."""
    known: dict[str, str] = {}
    for name in (*architectures(), *variants()):
        for said in (name, name.split("/")[-1]):
            known.setdefault(said.lower(), name)  # of a short name the first has it, whose copies come later
    model_id = str(model_id)
    return known.get(model_id.lower(), model_id)


def model_name(model: Any) -> str:
    """The name under which `load_config` finds `model`: an id, a folder's path, or a transformers configuration.

    A configuration keeps its name until Python ends. WrongValue for anything else.
    """
    if isinstance(model, (str, os.PathLike)):
        return resolve_model_id(os.fspath(model))
    config = getattr(model, "config", model)  # a model brings its own
    if not hasattr(config, "to_json_string") or not hasattr(config, "model_type"):
        raise WrongValue(
            tr(
                ko=f"model={model!r}: 모델의 이름이나 언어 모델의 transformers 설정(config)이어야 한다.",
                en=f"model={model!r}: must be a model's name or a transformers configuration of a language model.",
            )
        )
    text = config.to_json_string(use_diff=False)
    name = f"{config.model_type}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    _given[name] = copy.deepcopy(config)
    return name


def is_given(name: str) -> bool:
    """Whether `name` stands for a configuration that was given, and for nothing that another process could load."""
    return name in _given


def load_config(model_id: Any) -> Any:
    """A transformers config: bundled, given, from a local folder (read anew each time), or from the hub.

    UnknownName lists the nearest known ids; BadConfiguration says what is wrong in the file; NotSupported names what is
    no language model, or is stored quantized.
    """
    from transformers import AutoConfig

    model_id = resolve_model_id(model_id)
    entry = bundled(model_id)
    if entry is not None:
        return AutoConfig.for_model(**entry["config"], name_or_path=model_id)
    if model_id in _given:
        config = copy.deepcopy(_given[model_id])
    elif model_id and os.path.isdir(model_id):  # no error for a name that can be no path
        config = _config_of_folder(model_id)
    else:
        try:
            config = copy.deepcopy(_config_from_hub(model_id))
        except (OSError, ValueError) as error:
            raise _unknown(model_id) from error
    auto_class(config)
    _check(model_id, config)
    return config


def _unknown(model_id: str) -> UnknownName:
    near, names = ", ".join(_near(model_id)), [*architectures(), *variants()]
    ko = f" 혹시 {near}? 구조가 같다면 메모리도 같다." if near else ""
    en = f" Did you mean {near}? Where the architecture is the same, so is the memory." if near else ""
    return UnknownName(
        tr(
            ko=f"{model_id!r:.200}: 모르는 모델 이름이다.{ko} 허브에서도 찾지 못했다(네트워크가 없거나, 이름이 "
            "틀렸거나, 접근 권한이 필요하다). config.json이 든 폴더도 된다.",
            en=f"{model_id!r:.200}: unknown model.{en} The hub does not have it either (no network, a wrong name, or a "
            "gated model). A folder with its config.json does as well.",
        ),
        tr(ko="허브 없이 아는 것: ", en="Known without the hub: ") + ", ".join(names),
        tr(
            ko=f"허브 없이 아는 모델 {len(names)}개의 이름은 `python -m virtual_gpu.models`가 출력한다.",
            en=f"The {len(names)} models that are known without the hub: `python -m virtual_gpu.models`.",
        ),
    )


_SAY_LITTLE = re.compile(r"\b(meta|instruct|chat|it|pt|hf|base|bnb|[48]bit|awq|gptq|fp8)\b")


def _near(model_id: str) -> list[str]:
    """The bundled models whose names are most like this one, by their words, and of whose words without numbers too.

    Of the same size before others, and of names that are equally like it the nearest in size.
    """

    def words(name: str) -> tuple[str, list[str]]:
        said = _SAY_LITTLE.sub("", name.lower()[-200:].split("/")[-1])
        parts = re.findall(r"\d+(?:\.\d+)?[bm]\b|[a-z]+|\d+(?:\.\d+)?", said)
        size = next((part for part in parts if re.fullmatch(r"[\d.]+[bm]", part)), "")
        return size, [part for part in parts if part != size]

    wanted, asked = words(model_id)

    def likeness(name: str) -> tuple[float, float, float, float]:
        size, parts = words(name)
        alike = SequenceMatcher(None, " ".join(parts), " ".join(asked)).ratio()
        like = SequenceMatcher(None, name, model_id[-200:]).ratio()
        kin = SequenceMatcher(None, *(" ".join(filter(str.isalpha, said)) for said in (parts, asked))).ratio()
        return alike + 0.2 * (size == wanted != ""), _as_large(size, wanted), like, min(alike, kin)

    found = {name: likeness(name) for name in (*architectures(), *variants())}
    return [name for name in heapq.nlargest(3, found, key=found.get) if found[name][-1] > 0.6]


def _as_large(size: str, wanted: str) -> float:
    """How near "32b" is to "2.4b": 0 for the same, less the more they differ; the least where only one is said.

    "13b" may be "1.3b" without its point, and comes to the same.
    """

    def parameters(said: str) -> float:
        return float(said[:-1]) * (1e9 if said.endswith("b") else 1e6)

    if size.replace(".", "") == wanted.replace(".", ""):
        return 0.0
    if not (size and wanted):
        return -math.inf
    given = sorted((parameters(size), parameters(wanted)))
    return -given[1] / given[0] if given[0] else -math.inf


def _config_of_folder(folder: str) -> Any:
    from transformers import AutoConfig

    said = _said(folder)
    if "model_type" not in said:
        raise BadConfiguration(
            tr(
                ko=f"{folder}: config.json에 model_type이 없다. 언어 모델의 폴더가 맞는지 본다.",
                en=f"{folder}: its config.json names no model_type. Is it the folder of a language model?",
            )
        )
    for part in (said, *(one for one in said.values() if isinstance(one, dict))):
        _check_labels(folder, part)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any kind: transformers checks a configuration with whatever its class does
        raise bad_configuration(folder, error) from error


def _check_labels(folder: str, said: dict[str, Any]) -> None:
    """Refuse what transformers would be busy with for minutes, before it begins."""
    names, number = said.get("id2label"), said.get("num_labels")
    count = max(len(names) if isinstance(names, dict) else 0, number if isinstance(number, (int, float)) else 0)
    if count > MOST_LABELS:
        raise BadConfiguration(
            tr(
                ko=f"{folder}: num_labels={count}: {MOST_LABELS:,}까지다. 언어 모델에는 필요 없으니 지운다.",
                en=f"{folder}: num_labels={count}: at most {MOST_LABELS:,}. A language model needs none: delete it.",
            )
        )


def _said(folder: str) -> dict[str, Any]:
    """What the folder's config.json says; BadConfiguration where it is none."""
    path = Path(folder) / "config.json"
    try:
        if not path.is_file():
            raise ValueError(tr(ko="파일이 없다", en="there is no such file"))
        if path.stat().st_size > LARGEST_FILE:
            raise ValueError(tr(ko=f"{LARGEST_FILE:,}바이트보다 크다", en=f"more than {LARGEST_FILE:,} bytes"))
        said = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(said, dict):
            raise ValueError(tr(ko="객체({...})가 아니다", en="it is no object ({...})"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadConfiguration(
            tr(ko=f"{path}을(를) 읽을 수 없다: {error}", en=f"{path} cannot be read: {error}")
        ) from error
    return said


# Whose kernels transformers calls instead of its own code, where they are installed (integrations/hub_kernels.py).
_KERNELS = ("fla", "causal_conv1d", "mamba_ssm")


@contextmanager
def running(name: str) -> Iterator[None]:
    """BadConfiguration where a model's own code fails in this block; what we say, and a lack of memory, passes.

    transformers does not say here that its own code is slower than a library's kernels: it says that once, and nothing
    is computed.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")  # prints its traceback for what is raised here anyway
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with _nothing_said_of_kernels():
            yield
    except (VirtualGPUError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of any kind: sizes that do not go together show in the middle of a step
        clear_frames(error)
        raise bad_configuration(name, error, _kernels_called()) from error
    finally:
        log.setLevel(level)


_muting, _muted = threading.Lock(), 0


@contextmanager
def _nothing_said_of_kernels() -> Iterator[None]:
    """Until the last block of all threads has ended."""
    global _muted
    said = vars(logging.getLogger("transformers.integrations.hub_kernels"))
    with _muting:
        _muted += 1
        said["warning_once"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        with _muting:
            _muted -= 1
            if not _muted:
                del said["warning_once"]


def _kernels_called() -> str:
    """What a model's failure may be due to: the kernels of a package that has been imported; empty without one."""
    there = ", ".join(package for package in _KERNELS if sys.modules.get(package) is not None)
    if not there:
        return ""
    return tr(
        ko=f" ({there}이(가) 설치되어 있어 transformers가 그 커널을 불렀을 수 있다. 여기서는 PyTorch 구현만 실행한다. "
        "그 패키지가 없는 환경에서 다시 하거나, 프로그램을 virtual-gpu run으로 센다.)",
        en=f" (transformers may have called kernels of {there}, which is installed; only PyTorch code runs here: try "
        "where it is not, or have your program counted by virtual-gpu run)",
    )


def bad_configuration(name: str, error: Exception, more: str = "") -> BadConfiguration:
    """The error to raise where the libraries could not make a configuration, or make and run a model of it."""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    reason = f"{type(error).__name__}: {reason[:300]}{more}"
    return BadConfiguration(
        tr(
            ko=f"{name}: 이 설정(config)의 모델을 만들어 실행할 수 없다. {reason}",
            en=f"{name}: no model of this configuration can be made and run. {reason}",
        )
    )


def _check(name: str, config: Any) -> None:
    """Sizes that no model has are refused before anything is built."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not hasattr(text, "model_type"):
        raise BadConfiguration(
            tr(
                ko=f"{name}: 언어 모델의 부분이 설정(config)이 아니라 {text!r}이다.",
                en=f"{name}: its language model's part is no configuration but {text!r}.",
            )
        )
    for what, most in {"num_hidden_layers": MOST_LAYERS, **dict.fromkeys(_SIZES, MOST)}.items():
        value = getattr(text, what, None)
        for number in value if isinstance(value, (list, tuple)) else [value]:
            whole = isinstance(number, int) and not isinstance(number, bool)
            if number is not None and not (whole and 1 <= number <= most):
                raise BadConfiguration(
                    tr(
                        ko=f"{name}: {what}={number!r}: 1에서 {most:,} 사이의 정수여야 한다.",
                        en=f"{name}: {what}={number!r} must be an integer from 1 to {most:,}.",
                    )
                )
    stored = getattr(config, "quantization_config", None)
    if stored:
        said = stored if isinstance(stored, dict) else vars(stored)
        how = said.get("quant_method", "?")
        raise NotSupported(
            tr(
                ko=f"{name}: 가중치를 양자화해 저장한 모델이다(quantization_config: {how}). 이런 가중치는 흉내 내지 "
                "않는다. 양자화하지 않은 모델을 쓰거나, 4비트로 학습하려면 거기에 peft='qlora'를 쓴다.",
                en=f"{name} is stored quantized (quantization_config: {how}), which is not simulated. Use the model "
                "that is not; to train it in 4 bits, with peft='qlora'.",
            )
        )


@functools.lru_cache(maxsize=64)
def _config_from_hub(model_id: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_id, trust_remote_code=False, **hub_argument())


def cached_by_model(function: Callable) -> Callable:
    """`remembered` for functions whose first argument is a model's name, or has it as `model_id`.

    A folder counts as another model as soon as its config.json says something else.
    """

    @functools.wraps(function)
    def of_state(_: bytes, *arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    kept = remembered(of_state, maxsize=1024)

    @functools.wraps(function)
    def call(model: Any, *arguments: Any, **named: Any) -> Any:
        return kept(_state(getattr(model, "model_id", model)), model, *arguments, **named)

    call.cache_clear, call.cache_info = kept.cache_clear, kept.cache_info
    return call


def _state(model_id: str) -> bytes:
    """What a folder's configuration says now, or the hub's has said; nothing for names of which it is known here."""
    path = Path(model_id) / "config.json"
    if bundled(model_id) is not None or model_id in _given:
        return b""
    return hashlib.sha256(path.read_bytes()).digest() if os.path.isfile(path) else _state_on_hub(model_id)


@functools.lru_cache(maxsize=64)  # as `_config_from_hub`: a name stands for the same as long as Python runs
def _state_on_hub(model_id: str) -> bytes:
    return hashlib.sha256(load_config(model_id).to_json_string(use_diff=False).encode()).digest()


def auto_class(config: Any) -> Any:
    """Who builds and loads it: an encoder-decoder learns sequence to sequence, every other model the next token."""
    import transformers

    pairs = getattr(config, "is_encoder_decoder", False)
    known = transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if pairs else transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in known:
        raise NotSupported(
            tr(
                ko=f"{config.model_type}: 토큰을 읽고 토큰을 쓰는 모델이 아니라서 이 과정의 학습 루프로는 학습하지 "
                "못한다. 언어 모델의 이름을 쓴다.",
                en=f"{config.model_type} does not read tokens and write tokens, as the training loop here needs: "
                "use a language model.",
            )
        )
    return transformers.AutoModelForSeq2SeqLM if pairs else transformers.AutoModelForCausalLM


def checkpoint_dtype(model_id: str, config: Any) -> torch.dtype:
    """The dtype that the hub's checkpoint is stored in; float32 where nothing says so."""
    entry = bundled(resolve_model_id(model_id))
    name = entry["dtype"] if entry else getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    dtype = (
        torch.float32 if name is None else name if isinstance(name, torch.dtype) else getattr(torch, str(name), None)
    )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise BadConfiguration(
            tr(
                ko=f"{model_id}: dtype={name!r}: 모르는 자료형이다.",
                en=f"{model_id}: dtype={name!r} is no dtype of weights.",
            )
        )
    return dtype


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
