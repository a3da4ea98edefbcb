"""What a case needs on either side: rows, counters, recorded requests, models. The programs themselves are one text.

A case runs in a process of its own, on the card or inside `virtual_gpu.cuda`. Rows go to the file that CLAIMS_ROWS
names, one JSON object a line; recorded requests to the folder CLAIMS_TRACES.
"""

from __future__ import annotations

import gc
import gzip
import json
import os
import re
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ON_CARD = os.environ.get("CLAIMS_SIDE") == "card"
MODELS = Path(tempfile.gettempdir()) / "claims_models"
FRAMES = 14  # innermost ones that are kept of a request
KINDS = {
    "alloc": "a", "free_requested": "r", "free_completed": "c", "segment_alloc": "A", "segment_free": "F",
    "segment_map": "M", "segment_unmap": "U", "snapshot": "s", "oom": "o",
}  # fmt: skip


def say(row: str, **found: Any) -> None:
    """A row of this case."""
    line = json.dumps({"case": os.environ.get("CLAIMS_CASE"), "row": row, **found}, default=str)
    path = os.environ.get("CLAIMS_ROWS")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
    else:
        print(line, flush=True)


def counters() -> dict[str, int]:
    """Bytes that the allocator counts now and at most, and what it counted of retries and errors."""
    stats = torch.cuda.memory_stats()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "retries": stats.get("num_alloc_retries", -1),
        "ooms": stats.get("num_ooms", -1),
        "segment_count": stats.get("segment.all.current", -1),
        "inactive_split": stats.get("inactive_split_bytes.all.current", -1),
    }


def free_bytes() -> tuple[int, int]:
    """(free, total) as the driver says."""
    return torch.cuda.mem_get_info()


def settle() -> None:
    """Nothing is held that no program names: garbage, cuBLAS workspaces, the cache."""
    gc.collect()
    torch.cuda.synchronize()
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
    torch.cuda.empty_cache()


def error_of(error: BaseException) -> dict[str, Any]:
    """An exception as a row keeps it: its type, its text, its traceback."""
    told = "".join(traceback.format_exception(error))
    return {"type": type(error).__name__, "text": str(error)[:3000], "traceback": told[-6000:]}


def measure(name: str, program: Callable[[], Any], *, trace: bool = False, **more: Any) -> Any:
    """Run a program from a settled card; a row says what it held at most, what it returned or how it died."""
    settle()
    torch.cuda.reset_peak_memory_stats()
    before = counters()
    row: dict[str, Any] = {"before": before["allocated"], "before_reserved": before["reserved"], **more}
    returned = None
    started = time.perf_counter()
    if trace:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=400_000)
    try:
        returned = program()
        torch.cuda.synchronize()
    except Exception as error:
        row["error"] = error_of(error)
        error.__traceback__ = None
        del error
    row["seconds"] = round(time.perf_counter() - started, 3)
    row |= counters()
    if trace:
        row["trace"] = keep_trace(name)
    row["returned"] = returned if _plain(returned) else type(returned).__name__
    returned_plain = returned if _plain(returned) else None
    del returned
    gc.collect()
    row["left"] = torch.cuda.memory_allocated()
    settle()
    row["left_settled"], row["left_reserved"] = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    say(name, **row)
    return returned_plain


def _plain(value: Any) -> bool:
    if value is None or isinstance(value, int | float | str | bool):
        return True
    if isinstance(value, dict):
        return all(_plain(v) for v in value.values())
    return isinstance(value, list | tuple) and all(map(_plain, value))


def keep_trace(name: str, snapshot: Any = None, stop: bool = True) -> str | None:
    """Write what was recorded since `_record_memory_history`, small; the file's name."""
    folder = os.environ.get("CLAIMS_TRACES")
    snapshot = snapshot or torch.cuda.memory._snapshot()
    if stop:
        torch.cuda.memory._record_memory_history(enabled=None)
    if not folder:
        return None
    frames: dict[tuple[str, ...], int] = {}
    events = []
    for event in snapshot["device_traces"][0] if snapshot["device_traces"] else ():
        where = tuple(_frame(frame) for frame in event.get("frames", ())[:FRAMES])
        number = frames.setdefault(where, len(frames))
        kind = KINDS.get(event["action"], event["action"])
        address = event.get("addr", event.get("device_free", 0))
        events.append([kind, address, event["size"], event.get("stream", 0), number])
    found = {
        "frames": list(frames), "events": events, "segments": segments(snapshot),
        "settings": snapshot.get("allocator_settings"),
    }  # fmt: skip
    file = re.sub(r"\W+", "_", f"{os.environ.get('CLAIMS_CASE')}-{name}") + ".json.gz"
    path = Path(folder) / file
    unfinished = path.with_suffix(".part")
    with gzip.open(unfinished, "wt", encoding="utf-8") as out:
        json.dump(found, out, default=str, separators=(",", ":"))
    unfinished.rename(path)
    return file


def _frame(frame: dict[str, Any]) -> str:
    path = re.sub(r".*(site-packages|dist-packages|python3\.\d+)/", "", frame["filename"])
    return f"{path}:{frame['line']}:{frame['name']}"


def segments(snapshot: Any = None) -> list[list[Any]]:
    """Every segment by address: [address, bytes, stream, kind, pool, expandable, [[bytes, state], …]]."""
    found = (snapshot or torch.cuda.memory._snapshot())["segments"]
    return [
        [
            one["address"], one["total_size"], one["stream"], one["segment_type"],
            list(one.get("segment_pool_id", (0, 0))), bool(one.get("is_expandable")),
            [[block["size"], block["state"], block.get("requested_size", 0)] for block in one["blocks"]],
        ]
        for one in sorted(found, key=lambda one: one["address"])
    ]  # fmt: skip


def alive(least: int = 2**20, most: int = 40) -> list[list[Any]]:
    """What is alive of `least` bytes or more: [bytes, innermost frames], largest first (while history is recorded)."""
    found = [
        [block["requested_size"], [_frame(frame) for frame in block.get("frames", ())[:FRAMES]]]
        for segment in torch.cuda.memory._snapshot()["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and block["size"] >= least
    ]
    return sorted(found, key=lambda one: -one[0])[:most]


# -- models -----------------------------------------------------------------------------------------------------------

# What the cases load by name, as (name, type of the weights in its files); random weights, no network.
CHECKPOINTS = {
    "openai-community/gpt2": "float32",
    "Qwen/Qwen2.5-0.5B": "bfloat16",
    "Qwen/Qwen3-0.6B": "bfloat16",
    "meta-llama/Llama-3.2-1B": "bfloat16",
    "EleutherAI/polyglot-ko-1.3b": "float16",
    "google/gemma-3-1b-pt": "bfloat16",
}


def path_of(name: str) -> str:
    """What `from_pretrained` gets: the name on the virtual side, a folder of random weights on the card."""
    folder = MODELS / name.replace("/", "--")
    return str(folder) if ON_CARD and folder.exists() else name


def load(name: str, **options: Any) -> Any:
    """transformers' own loading of a causal model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path_of(name), **options)


def write_checkpoint(name: str, dtype: str, device: str) -> dict[str, Any]:
    """Random weights of an architecture, saved as transformers saves them."""
    from virtual_gpu.models.build import build_model
    from virtual_gpu.models.configs import load_config

    started = time.perf_counter()
    torch.manual_seed(0)
    config = load_config(name)
    config.architectures = [type(build_model(config, torch.bfloat16)).__name__]
    model = build_model(config, getattr(torch, dtype), device=device)
    model.config.architectures = config.architectures
    folder = MODELS / name.replace("/", "--")
    model.save_pretrained(folder)
    nbytes = sum(file.stat().st_size for file in folder.iterdir())
    return {"folder": str(folder), "file_bytes": nbytes, "seconds": round(time.perf_counter() - started, 2)}


def write_checkpoints() -> None:
    """Random weights on disk, as transformers saves them, of all that the cases load by name."""
    for name, dtype in CHECKPOINTS.items():
        try:
            say(name, **write_checkpoint(name, dtype, "cuda"))
        except Exception as error:
            say(name, error=error_of(error))
        settle()


def built(name: str, dtype: torch.dtype, attention: str = "sdpa", **changes: Any) -> Any:
    """An architecture with random weights, made on the card itself; changes: of its configuration."""
    from virtual_gpu.models.build import build_model
    from virtual_gpu.models.configs import load_config

    config = load_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    if ON_CARD:
        torch.manual_seed(0)
        model = build_model(config, dtype, attention, "cuda")
    else:
        from benchmarks.recipes.loading import loaded

        model = loaded(config, dtype, **({} if attention == "sdpa" else {"attention": attention}))
    settle()
    return model
