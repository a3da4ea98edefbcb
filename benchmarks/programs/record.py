"""python record.py [--steps 3] OUT.json.gz [-m] PROGRAM its arguments: a program, unchanged, on the GPU that is there.

Every request of its allocator is recorded (`torch.cuda.memory._record_memory_history`), and the program ends where
`virtual-gpu run` ends it: after so many optimizer steps of the optimizer that made the most. The record is the reduced
form that `virtual-gpu compare` reads, with what PyTorch says of the memory beside it ("measured"). Needs PyTorch alone;
nothing of it asks the GPU to wait, allocates there, or resets a peak.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import runpy
import sys
import time
import traceback

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

FRAMES = 4  # so many of the innermost Python frames are kept of an allocation
BATCHES = 64  # the shapes of so many batches are kept
# As virtual_gpu.trace.histories.ACTIONS, whose place in it is an event's code.
ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "oom", "snapshot",
)  # fmt: skip


class EndOfRun(BaseException):
    """Ends the program after its last step; not an Exception, so that programs do not catch it."""


class Recorder:
    """What is noted while the program runs: steps, shapes of batches, and the peaks that it resets itself."""

    def __init__(self, steps: int) -> None:
        self.most, self.count, self.rows, self.batches, self.peaks = steps, {}, [], [], []
        torch.cuda.init()
        self.start_us = self.now()
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
        register_optimizer_step_post_hook(self.stepped)
        reset, next_batch = torch.cuda.memory.reset_peak_memory_stats, _BaseDataLoaderIter.__next__

        def reset_peak_memory_stats(*args, **kwargs):
            self.peaks.append(self.peak())
            return reset(*args, **kwargs)

        def batch(iterator):
            given = next_batch(iterator)
            if len(self.batches) < BATCHES:
                self.batches.append(shapes(given))
            return given

        torch.cuda.memory.reset_peak_memory_stats = torch.cuda.reset_peak_memory_stats = reset_peak_memory_stats
        _BaseDataLoaderIter.__next__ = batch

    @staticmethod
    def now() -> int:
        """Microseconds on the clock of the events' time_us."""
        return time.time_ns() // 1000

    @staticmethod
    def peak() -> tuple[int, int]:
        """(bytes allocated, bytes reserved) at most, since the program last reset it."""
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def stepped(self, optimizer, *_) -> None:
        """After an optimizer's step."""
        key = id(optimizer)
        self.count[key] = self.count.get(key, 0) + 1
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        self.rows.append({
            "optimizer": sorted(self.count).index(key), "step": self.count[key], "time_us": self.now(),
            "allocated": allocated, "reserved": reserved, "peaks": self.peak(),
        })  # fmt: skip
        if max(self.count.values()) >= self.most:
            raise EndOfRun


def shapes(batch) -> object:
    """The shapes of the tensors in a batch, as JSON: dtype and sizes."""
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
    if hasattr(batch, "items"):
        return {str(key): shapes(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [shapes(value) for value in batch[:8]]
    return type(batch).__name__


def reduced(snapshot: dict, labels: dict[str, int], index: int = 0) -> dict:
    """One device of PyTorch's snapshot in the reduced form; labels: frames of an allocation → its number."""
    events = []
    for event in snapshot["device_traces"][index]:
        if event["action"] not in ACTIONS:
            continue
        code = ACTIONS.index(event["action"])
        row = [code, event.get("addr", event.get("device_free", 0)), event["size"], event["stream"]]
        if code == 0:
            row.append(labels.setdefault(frames(event.get("frames") or ()), len(labels)))
        events.append(row)
    segments = []
    for segment in snapshot["segments"]:
        if segment.get("device", index) != index:
            continue
        address, blocks = segment["address"], []
        for block in segment["blocks"]:
            blocks.append([address, block["size"], block.get("requested_size", block["size"]), block["state"]])
            address += block["size"]
        segments.append([segment["address"], segment["total_size"], segment["stream"], segment["segment_type"], blocks])
    return {
        "device": index, "initial_segments": [], "initial_blocks": [], "events": events, "final_segments": segments,
    }  # fmt: skip


def frames(stack) -> str:
    """The innermost frames of Python in one line, without those in which a module only calls another's forward."""
    told = []
    for frame in stack:
        file = str(frame["filename"]).replace("\\", "/")
        if file.endswith(".py") and not file.endswith(("nn/modules/module.py", "programs/record.py")):
            told.append(f"{file.rpartition('/')[2]}:{frame['line']} {frame['name']}")
        if len(told) == FRAMES:
            break
    return " < ".join(told)


def main() -> int:
    """Run the program; 0 where it came to its end, 1 where it failed (the record is written all the same)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("out")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    module = args.command[:1] == ["-m"]
    command = args.command[module:]
    if not command:
        parser.error("name a program (a file of Python, or -m and a module) after the record")
    out, program = os.path.abspath(args.out), command[0]
    sys.argv = list(command)
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(program))
    recorder, error = Recorder(args.steps), None
    began = time.perf_counter()
    try:
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except EndOfRun:
        pass
    except SystemExit as ended:
        error = None if ended.code in (None, 0) else f"exit {ended.code}"
    except Exception as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.perf_counter() - began
    peaks = [*recorder.peaks, recorder.peak()]
    labels: dict[str, int] = {}
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    device = reduced(snapshot, labels)
    stats = {name: value for name, value in torch.cuda.memory_stats().items() if not name.endswith(".freed")}
    name = torch.cuda.get_device_name()
    record = {
        "devices": [device], "labels": list(labels), "allocator_settings": snapshot.get("allocator_settings"),
        "measured": {
            "command": command, "gpu": name, "capability": torch.cuda.get_device_capability(),
            "versions": versions(), "error": error, "steps": max(recorder.count.values(), default=0),
            "peak": max(peak for peak, _ in peaks), "reserved": max(reserved for _, reserved in peaks),
            "seconds": seconds, "start_us": recorder.start_us, "rows": recorder.rows, "batches": recorder.batches,
            "times_us": step_times(snapshot, recorder.rows), "stats": stats, "free": free, "total": total,
            "outside": total - free - torch.cuda.memory_reserved(),  # the context; others' memory, where there are any
        },
    }  # fmt: skip
    with gzip.open(out + ".part", "wt", encoding="utf-8", compresslevel=9) as file:
        json.dump(record, file, separators=(",", ":"), default=str)
    os.replace(out + ".part", out)
    print(f"recorded {len(device['events'])} events", file=sys.stderr, flush=True)
    return int(error is not None)


def step_times(snapshot: dict, rows: list[dict]) -> list[int]:
    """How many events of the reduced form came before each row's time."""
    times = [event.get("time_us", 0) for event in snapshot["device_traces"][0] if event["action"] in ACTIONS]
    return [sum(time <= row["time_us"] for time in times) for row in rows]


def versions() -> dict[str, str]:
    """Of Python, and of the libraries that have a say in the bytes, as far as the program loaded them."""
    names = (
        "torch", "transformers", "accelerate", "peft", "trl", "bitsandbytes", "datasets", "lightning", "timm",
        "torchvision", "diffusers", "triton",
    )  # fmt: skip
    found = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in names}
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "python": sys.version.split()[0], **{name: version for name, version in found.items() if version},
        "cuda": str(torch.version.cuda), "cudnn": str(cudnn),
    }  # fmt: skip


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a program that is ended in its middle may have threads that wait for more
