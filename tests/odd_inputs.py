"""Odd inputs, drawn by hypothesis: values, names, configurations, command lines, traces, snapshots and logs."""

from __future__ import annotations

import copy
import gzip
import json
import linecache
import os
import pickle
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from virtual_gpu.errors import VirtualGPUError
from virtual_gpu.trace.saved import Saved
from virtual_gpu.trace.snapshot import snapshot
from virtual_gpu.trace.trace import Trace

# Shown anywhere as it stands, this would load a picture or run a script.
MARK = "<img src=x onerror=alert(1)>"
DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).resolve().parent.parent
OURS = (str(ROOT / "virtual_gpu") + os.sep, str(ROOT / "helpers") + os.sep)


def is_clear(error: BaseException) -> bool:
    """Whether it is an error of ours, or one of our lines raised it on purpose."""
    if isinstance(error, VirtualGPUError):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno or 0)
    ours = last.filename.startswith(OURS) and line.lstrip().startswith("raise")
    return ours and isinstance(error, (ValueError, RuntimeError, ImportError)) and "\n" not in str(error)[:1]


class Opaque:
    """A value that nobody can have meant."""

    def __repr__(self) -> str:
        return "<opaque>"


NAMES = st.one_of(
    st.sampled_from([
        "", " ", ".", "..", "/", "../../etc", "~", "-", "--", "--help", "con", "nul\0", "a" * 300, "a" * 100_000, MARK,
        'x"""\nraise SystemExit(7)\n"""', "{dtype}", "%s%n", "C:\\Users\\new\\x41", "\x1b[2J\x1b]0;title\x07", "\udcff",
        "모델", "‮txet", "gpt2\n", "GPT2", "gpt-2", "meta-llama", "T4 ", "RTX4090", "24GiB", "24GiB, 8.6", "-1GiB, 8.6",
        "1e400GiB, 8.6", "24GiB, 99.9", "nan", "inf", "1_000", "٣", "0x10", "1e3", "None", "True", "mixed_fp16", "fp8",
    ]),
    st.text(max_size=12),
)  # fmt: skip
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 3, 2**31, 2**63, 10**18, -(10**30), True, False, 0.0, -0.0, 0.5, 1.0, 1e308]),
    st.sampled_from([float("nan"), float("inf"), np.int64(2), np.float32(2), np.int8(-1), np.bool_(True), 1 + 2j]),
    st.integers(-5, 70),
)
THINGS = st.sampled_from([
    None, (), [], {}, set(), b"", b"\xff", [1, [2]], [[]], {"a": 1}, range(3), ["q_proj"], ["nothing"], ("lora",), int,
    len, Opaque(), Path("/nonexistent"), Path(), torch.tensor(2), torch.ones(2, 2), torch.float16, torch.device("meta"),
    np.zeros(2), "attention", "all-linear", [None], [""], [["x"]], ...,
])  # fmt: skip
ODD = st.one_of(NAMES, NUMBERS, THINGS)
JSON_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 80), st.sampled_from([10**6, 10**18, 2**40, 0.5, -1.5, 1e308, "64", "x"]),
    st.sampled_from([[], {}, [64], [[[]]], {"rope_type": "x"}, ["x"] * 3, MARK, "load", "float7", "float16", "gelu"]),
)  # fmt: skip

LLAMA = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 16,
    "hidden_act": "silu", "dtype": "float16", "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "use_cache": True,
    "attention_bias": False, "attention_dropout": 0.0, "pad_token_id": None, "rope_parameters": None,
}  # fmt: skip
_MORE = (
    "quantization_config", "text_config", "layer_types", "architectures", "auto_map", "is_encoder_decoder", "id2label",
    "num_labels", "torch_dtype", "sliding_window", "num_experts", "transformers_version", "_name_or_path", MARK,
)  # fmt: skip
_TYPES = ("llama", "gpt2", "gpt_neox", "t5", "bert", "phi3", "qwen3", "mistral", "gemma2", "vit", "clip", "x", 5, None)


@st.composite
def configurations(draw: Any) -> bytes:
    """A config.json: one of a small Llama with a few fields changed, dropped or added, or no JSON at all."""
    if draw(st.integers(0, 5)) == 0:
        return draw(
            st.one_of(
                st.binary(max_size=40),
                st.sampled_from(
                    [
                        b"",
                        b"null",
                        b"42",
                        b"[]",
                        b"{",
                        b"\xef\xbb\xbf{}",
                        b"[" * 100_000,
                        b'{"a":' * 50_000,
                        b"\0" * 99,
                        b'{"model_type":"llama","hidden_size":' + b"9" * 5000 + b"}",
                        b'{"model_type":NaN}',
                        b"\xff\xfe{",
                        b'{"model_type":"llama","vocab_size":1e400}',
                        b'{"model_type":"llama"}',
                        b'{"model_type":["llama"]}',
                    ]
                ),
            )
        )
    found: dict[str, Any] = dict(LLAMA)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*LLAMA, *_MORE]))
        if name == "model_type":
            found[name] = draw(st.sampled_from(_TYPES))
        elif draw(st.integers(0, 4)) == 0:
            found.pop(name, None)
        else:
            found[name] = draw(JSON_VALUES)
    return json.dumps(found).encode()


# -- traces, snapshots, logs ------------------------------------------------------------------------------------------


@cache
def _trace() -> Trace:
    chance = np.random.default_rng(0)
    born = [*range(12), *chance.permutation(12)[:6].tolist()]
    sizes = (chance.choice([512, 40_960, 2**20, 3 * 2**20], 12) // 512 * 512).tolist()
    nbytes = sizes + [sizes[i] for i in born[12:]]
    zeros = np.zeros(18, dtype=np.int64)
    return Trace(np.array(born), np.array(nbytes), zeros, zeros + 1, ("forward",)).through()[0]


@cache
def _documents() -> dict[str, Any]:
    """Whole files of each form, as Python's values."""
    one = np.zeros(18, dtype=np.int64)
    saved = Saved(_trace(), ("activations", MARK), one, ("train.py:1", "\x1b[2J"), one)
    reduced = json.loads(gzip.decompress(sorted((DATA / "traces").glob("*.json.gz"))[0].read_bytes()))
    for device in reduced["devices"]:
        device["events"] = device["events"][:200]
    return {"snapshot": snapshot(_trace()), "saved": {"trace": saved.json()}, "reduced": reduced}


class _Runs:
    """A pickle that would run a program."""

    def __reduce__(self) -> tuple:
        import os

        return os.system, ("touch /tmp/this-must-not-be",)


HOSTILE_PICKLES = {
    "a class": pickle.dumps({"segments": [_Runs()], "device_traces": []}),
    "a table of 64 GiB": b"\x80\x02}r\xff\xff\xff\x7f.",
    "a string of 2**62 bytes": b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b"x.",
    "an array of 2**40 bytes": b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b"x.",
    "lists in lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "a number of 200,000 digits": b"I" + b"9" * 200_000 + b"\n.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent name": b"\x80\x02Pname\n.",
    "itself": b"\x80\x02]q\x00h\x00a.",
}


def _replaced(draw: Any, document: Any) -> Any:
    """A copy with one value, somewhere in it, that is another one, gone, or there twice."""
    document = place = copy.deepcopy(document)
    for _ in range(draw(st.integers(0, 7))):
        keys = list(place) if isinstance(place, dict) else range(len(place))
        if not keys:
            break
        key = draw(st.sampled_from(keys))
        if isinstance(place[key], (dict, list)) and place[key] and draw(st.integers(0, 3)):
            place = place[key]
            continue
        how = draw(st.sampled_from(["other", "other", "other", "gone", "twice"]))
        if how == "gone" and not isinstance(place, tuple):
            del place[key]
        elif how == "twice" and isinstance(place, list):
            place.append(copy.deepcopy(place[key]))
        elif not isinstance(place, tuple):
            place[key] = draw(st.one_of(JSON_VALUES, st.sampled_from([2**70, -1, float("nan"), float("inf")])))
        break
    return document


@st.composite
def records(draw: Any) -> tuple[str, bytes]:
    """(a file's ending, its bytes): a saved run, a snapshot or a reduced trace, changed or cut, or neither."""
    kind = draw(st.sampled_from(["snapshot", "saved", "reduced", "hostile", "noise"]))
    if kind == "hostile":
        return ".pickle", HOSTILE_PICKLES[draw(st.sampled_from(sorted(HOSTILE_PICKLES)))]
    if kind == "noise":
        return draw(st.sampled_from([".json", ".pickle", ".json.gz", ""])), draw(
            st.one_of(st.binary(max_size=60), st.sampled_from([b"", b"[", b"[" * 100_000, b"\x1f\x8b", b"\x80\x04."]))
        )
    document = _documents()[kind]
    for _ in range(draw(st.integers(0, 2))):
        document = _replaced(draw, document)
    data = pickle.dumps(document) if kind == "snapshot" else json.dumps(document).encode()
    if draw(st.integers(0, 4)) == 0:
        data = data[: draw(st.integers(0, len(data)))]
    if zipped := kind == "reduced" and draw(st.booleans()):
        data = gzip.compress(data, mtime=0)
        if draw(st.booleans()):
            data = data[: draw(st.integers(2, len(data)))]
    return {"snapshot": ".pickle", "saved": ".json", "reduced": ".json.gz" if zipped else ".trace"}[kind], data


_LINES = (
    "Traceback (most recent call last):", '  File "/home/me/train.py", line 12, in main', "    loss.backward()",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.74 GiB "
    "of which 1.06 GiB is free. Including non-PyTorch memory, this process has 13.67 GiB memory in use. Of the "
    "allocated memory 12.00 GiB is allocated by PyTorch, and 1.50 GiB is reserved by PyTorch but unallocated.",
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.78 GiB total capacity; 14.5 GiB "
    "already allocated; 3.44 MiB free; 14.6 GiB reserved in total by PyTorch)", "[rank3]: ",
    "Killed", "\x1b[31m", "\x9b2J",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "99999999999999999999.99 GiB is free", "│ ❱ 12 │   loss", MARK, "\0",
    "\r",
    "In [99999999999999999999], line 1", "Process 1 has 17179869184.00 GiB memory in use.",
    "\\n  File \\\"x\\\", line 1",
)  # fmt: skip


@st.composite
def logs(draw: Any) -> bytes:
    """A log: pieces of messages and tracebacks in any order, repeated, cut, in any encoding, or noise."""
    parts = draw(st.lists(st.one_of(st.sampled_from(_LINES), st.text(max_size=20)), max_size=8))
    text = draw(st.sampled_from(["\n", " ", "", "\r\n", "a" * 3000])).join(parts) * draw(st.sampled_from([1, 1, 1, 40]))
    data = text.encode(draw(st.sampled_from(["utf-8", "utf-16", "latin-1"])), errors="replace")
    return data[: draw(st.integers(0, 40_000))]


def starts(model: str) -> st.SearchStrategy[bytes]:
    """A configuration of another tool as JSON, which is YAML too: keys of theirs, values that nobody meant."""
    keys = [
        "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "optim", "deepspeed", "fsdp",
        "fsdp_config", "gradient_checkpointing", "eval_strategy", "max_length", "use_peft", "load_in_4bit", "lora_r",
        "lora_target_modules", "dtype", "stage", "finetuning_type", "cutoff_len", "lora_rank", "lora_target",
        "quantization_bit", "pure_bf16", "adapter", "micro_batch_size", "sequence_len", "lora_target_linear",
        "optimizer", "tokenizer", "loss", "enable_activation_checkpointing", "lora_dropout", "batch_size", "x",
    ]  # fmt: skip
    known = st.sampled_from(["adamw_torch", "paged_adamw_8bit", "lora", "full", "qlora", "auto", "sft", "all", True, 4])
    first = st.sampled_from([
        {"model_name_or_path": model}, {"model_name_or_path": model, "stage": "sft"}, {"base_model": model}, {},
        {"model": {"_component_": "torchtune.models.llama3_2.lora_llama3_2_1b", "lora_attn_modules": ["q_proj"]}},
    ])  # fmt: skip
    values = JSON_VALUES.filter(lambda value: value != 10**6)  # a batch of so many is counted, and takes minutes
    more = st.dictionaries(st.sampled_from(keys), st.one_of(known, values), max_size=5)
    whole = st.builds(lambda one, other: json.dumps(one | other, indent=1).encode(), first, more)
    cut = st.builds(lambda data, end: data[:end], whole, st.integers(0, 90))
    return st.one_of(whole, whole, cut, st.binary(max_size=40))
