"""The requests that a program makes of the allocator on the virtual GPU, beside those that a real card recorded.

The program is a transformer of Stanford's CS336 (assignment 2), written here from its sizes; the traces are PyTorch's
memory snapshots of it, published by students under the MIT licence, reduced to their events. A request is compared by
whether it allocates or frees, and by its bytes; tensors of a card are not rounded in such a trace, so both are rounded
to blocks of 512.

    python benchmarks/request_by_request.py medium_forward.json.gz --length 128
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.recipes.cs336 import AdamW, Model, attention_by_hand, cross_entropy
from virtual_gpu.allocator import round_size
from virtual_gpu.cards import card
from virtual_gpu.counting.gpu import VirtualGPU, virtual
from virtual_gpu.trace.compare import explained_by, first_difference

Request = tuple[str, int]  # "alloc" or "free", and bytes in blocks of 512


# -- requests ---------------------------------------------------------------------------------------------------------


def recorded(path: str | Path) -> tuple[list[Request], list[str]]:
    """The requests of a card's trace, and beside each what made it ("operator | file:line"; "" if not said)."""
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    labels = trace.get("labels", ())
    events = [event for event in trace["devices"][0]["events"] if event[0] in (0, 1)]
    requests = [("free" if event[0] else "alloc", round_size(event[2])) for event in events]
    return requests, [labels[event[4]] if event[0] == 0 and labels else "" for event in events]


class Requests:
    """A recorder for the meter: every request in order, in blocks of 512 bytes."""

    def __init__(self, gpu: VirtualGPU) -> None:
        self.made: list[Request] = []
        self.operations: list[str] = []  # beside each request, "" where none runs
        self._mode = gpu.mode
        self._sizes = {block: size for block, (size, *_) in gpu.meter.live_blocks().items()}

    def allocated(self, block: int, size: int, *_: Any) -> None:
        """Called by the meter."""
        self._request("alloc", size)
        self._sizes[block] = size

    def freed(self, block: int) -> None:
        """Called by the meter."""
        self._request("free", self._sizes.pop(block))

    def label(self, block: int, category: str) -> None:
        """Called by the meter; of no interest here."""

    def _request(self, action: str, size: int) -> None:
        self.made.append((action, size))
        self.operations.append("" if self._mode.operation is None else self._mode.operation._opname)


def predicted(gpu: VirtualGPU, length: int, training: bool, half: bool, batch: int = 4, **sizes: int) -> list[Request]:
    """The requests of one forward pass, or one training step, after another one."""
    return watched(gpu, length, training, half, batch, **sizes).made


def watched(gpu: VirtualGPU, length: int, training: bool, half: bool, batch: int = 4, **sizes: int) -> Requests:
    """`predicted`, and the operations that made them."""
    with torch.device("meta"):
        model = Model(length, **sizes)
    gpu.place(model)
    optimizer = AdamW(model.parameters())
    ids, targets = (gpu.place(torch.zeros(batch, length, dtype=torch.int64)) for _ in range(2))
    with gpu:
        for recorded_one in (False, True):
            recorder = gpu.meter.recorder = Requests(gpu) if recorded_one else None
            if training:
                with gpu.autocast(torch.bfloat16 if half else None):
                    output = model(ids)
                    loss = cross_entropy(output, targets)
                loss.backward()
                optimizer.step()
                if not recorded_one:
                    optimizer.zero_grad()
                    del output, loss
            else:
                with torch.inference_mode(), gpu.autocast(torch.bfloat16) if half else nullcontext():
                    model(ids)
    gpu.meter.recorder = None
    return recorder


def attention_step(gpu: VirtualGPU) -> list[Request]:
    """The requests of attention by hand, 8 × 4,096 × 16 in fp32, forward and backward, from an empty allocator."""
    recorder = gpu.meter.recorder = Requests(gpu)
    with gpu:
        query, key, value = (torch.randn(8, 4096, 16, requires_grad=True) for _ in range(3))
        out = attention_by_hand(query, key, value)
        loss = out.sum()
        loss.backward()
        gpu.meter.recorder = None
    return recorder.made


def explained(run: Callable[[VirtualGPU], list[Request]], name: str, theirs: list[Request]) -> dict[str, int | None]:
    """`explained_by`, of a program: rule → where the first difference is without it (None: nowhere)."""
    gpu = VirtualGPU(card(name))
    at = first_difference(run(gpu), theirs)
    return explained_by(lambda rule: run(VirtualGPU(card(name), without=[rule])), gpu.rules.acted(), theirs, at)


def main() -> None:
    """Compare and print the first difference with its surroundings, and how many requests differ in all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--half", action="store_true", help="under bf16 autocast")
    parser.add_argument("--gpu", default="A100-80GB")
    parser.add_argument("--show", type=int, default=8)
    parser.add_argument("--rules", action="store_true", help="also say which rule, switched off, explains it")
    args = parser.parse_args()
    theirs, labels = recorded(args.trace)
    made = watched(virtual(args.gpu), args.length, args.training, args.half)
    ours = made.made
    print(f"{len(ours):,} requests on the virtual GPU, {len(theirs):,} on the card")
    at = first_difference(ours, theirs)
    if at is None:
        print("all the same, in the same order")
        return
    print(f"first difference: {at:,}")
    for index in range(max(0, at - args.show), at + args.show):
        a, b = (side[index] if index < len(side) else ("", 0) for side in (ours, theirs))
        label, operation = (side[index] if index < len(side) else "" for side in (labels, made.operations))
        print(f"{index:>7} {a[0]:<6}{a[1]:>12,} {operation:<32} {b[0]:<6}{b[1]:>12,} {'' if a == b else '≠'} {label}")
    for whose, rest in (("here", Counter(ours) - Counter(theirs)), ("on the card", Counter(theirs) - Counter(ours))):
        most = ", ".join(f"{count} × {action} {size:,}" for (action, size), count in rest.most_common(6))
        print(f"{rest.total():,} only {whose}: {most}")
    if args.rules:
        found = explained(lambda gpu: predicted(gpu, args.length, args.training, args.half), args.gpu, theirs)
        for rule, other in found.items():
            print(f"without the rule {rule}: {'all the same' if other is None else f'first difference {other:,}'}")
        if not found:
            print("no rule explains it")


if __name__ == "__main__":
    main()
