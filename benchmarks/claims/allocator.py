"""The caching allocator, request by request: the same sequence on a card and on the virtual one.

What is held is a list of tensors of bytes; nothing is computed, so that every request is the program's own. A row of
each mark has the counters and every segment with its blocks.
"""

from __future__ import annotations

import os
import random
from typing import Any

import torch

from .side import counters, error_of, keep_trace, measure, say, segments, settle

MIB = 2**20


def take(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def mark(name: str, **more: Any) -> None:
    say(name, **counters(), segments=segments(), **more)


def _record() -> None:
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=400_000)


def _sizes(dice: random.Random) -> int:
    """Bytes of a request: small, around every border of the rules, large."""
    kind = dice.random()
    if kind < 0.35:
        return dice.randint(1, MIB)
    if kind < 0.5:
        return dice.choice((512, 513, MIB, MIB + 1, 10 * MIB, 10 * MIB - 1, 10 * MIB + 1, 20 * MIB, 2 * MIB))
    if kind < 0.8:
        return dice.randint(MIB, 10 * MIB)
    return dice.randint(10 * MIB, 260 * MIB)


def sequence() -> None:
    """Random requests and releases in a share of the card, with what is asked of the allocator by environment."""
    share = float(os.environ.get("CLAIMS_SHARE", "0.06"))
    if "per_process_memory_fraction" not in (os.environ.get("PYTORCH_ALLOC_CONF") or ""):
        torch.cuda.set_per_process_memory_fraction(share)
    for seed in range(3):
        _record()
        dice, held, log = random.Random(seed), [], []
        for number in range(600):
            choice = dice.random()
            if held and (choice < 0.42 or len(held) > 120):
                held.pop(dice.randrange(len(held)))
            elif choice < 0.425:
                torch.cuda.empty_cache()
            else:
                nbytes = _sizes(dice)
                try:
                    held.append(take(nbytes))
                except torch.OutOfMemoryError as error:
                    log.append([number, nbytes, str(error)])
                    del held[: len(held) // 2]
            if number % 100 == 99:
                mark(f"seed {seed}, {number + 1}", died=len(log))
        say(f"seed {seed}, deaths", log=[[n, b, t if i < 2 else ""] for i, (n, b, t) in enumerate(log)],
            trace=keep_trace(f"seed{seed}"))  # fmt: skip
        held.clear()
        mark(f"seed {seed}, released")
        torch.cuda.empty_cache()
        mark(f"seed {seed}, emptied")


def borders() -> None:
    """One request of each size around the rules' borders from an empty cache, and a second one after it."""
    sizes = [0, 1, 512, 513, MIB - 1, MIB, MIB + 1, 2 * MIB, 5 * MIB, 10 * MIB - 512, 10 * MIB - 1, 10 * MIB,
             10 * MIB + 1, 12 * MIB, 19 * MIB, 20 * MIB, 20 * MIB + 1, 100 * MIB + 3, 1024 * MIB + 1]  # fmt: skip
    for size in sizes:
        settle()
        x = take(size)
        one = counters()
        y = take(size)
        say(f"{size}", first=one, second=counters(), segments=segments())
        del x, y


def streams() -> None:
    """Pools by stream, record_stream, a side stream's release."""
    _record()
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    a = take(30 * MIB)
    with torch.cuda.stream(side):
        b = take(30 * MIB)
    mark("a on the default stream, b on another")
    del a
    with torch.cuda.stream(side):
        c = take(30 * MIB)
    mark("what the default stream freed serves no other")
    d = take(25 * MIB)
    mark("but itself")
    c.record_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    del c
    mark("freed after record_stream, all done")
    with torch.cuda.stream(side):
        e = take(29 * MIB)
    mark("after an event has passed")
    with torch.cuda.stream(other):
        small = [take(1000 * (n + 1)) for n in range(10)]
    mark("small ones of a third")
    torch.cuda.empty_cache()
    mark("emptied")
    del b, d, e, small
    mark("all released")
    torch.cuda.empty_cache()
    mark("all emptied")
    # a pending use: the block stays out of the pool until the stream is through
    x = take(64 * MIB)
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.record_stream(side)
    del x
    y = take(64 * MIB)
    mark("while the side stream still runs")
    torch.cuda.synchronize()
    z = take(64 * MIB)
    mark("when it is through")
    del y, z
    say("trace", trace=keep_trace("streams"))


def pools() -> None:
    """MemPool, raw allocations, graphs' private pools."""
    _record()

    def tried(name: str, program: Any) -> Any:
        try:
            found = program()
            mark(name)
            return found
        except Exception as error:
            mark(name, error=error_of(error))
            return None

    pointer = tried("caching_allocator_alloc 1000", lambda: torch.cuda.caching_allocator_alloc(1000))
    large = tried("caching_allocator_alloc 33 MiB", lambda: torch.cuda.caching_allocator_alloc(33 * MIB))
    if pointer is not None:
        tried("delete", lambda: torch.cuda.caching_allocator_delete(pointer))
    if large is not None:
        tried("delete large", lambda: torch.cuda.caching_allocator_delete(large))

    def pooled() -> Any:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            inside = [take(30 * MIB), take(1000)]
        mark("in a pool of its own")
        outside = take(30 * MIB)
        mark("outside")
        inside.clear()
        again = take(30 * MIB)
        mark("the pool's block serves nobody outside")
        torch.cuda.empty_cache()
        mark("emptied while the pool lives")
        del outside, again
        return pool

    pool = tried("MemPool", pooled)
    del pool
    settle()
    mark("pool gone")

    def captured() -> Any:
        net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
        x = torch.zeros(4096, 1024, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                net(x).sum().backward()
        torch.cuda.current_stream().wait_stream(side)
        mark("warmed up")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = net(x).sum()
            loss.backward()
        mark("captured")
        graph.replay()
        torch.cuda.synchronize()
        mark("replayed")
        net(x).sum().backward()
        mark("eager after it")
        torch.cuda.empty_cache()
        mark("emptied")
        graph.reset()
        del graph, loss
        settle()
        mark("graph gone")
        return None

    tried("graph", captured)
    say("trace", trace=keep_trace("pools"))


def clinic() -> None:
    """Chapter 10's batches of varied lengths (10.5), without a limit and in a small share, and its cures."""
    from helpers.chapters.c10_clinic.growth import small_gpt

    def varied(multiple: int = 1, empty: bool = False, steps: int = 16, share: float = 1.0) -> Any:
        torch.cuda.set_per_process_memory_fraction(share)
        lengths, allocated, reserved = random.Random(0), [], []
        model = small_gpt().cuda()
        try:
            for _ in range(steps):
                length = -(-lengths.randint(32, 512) // multiple) * multiple
                tokens = torch.zeros(16, length, dtype=torch.long, device="cuda")
                model(input_ids=tokens, labels=tokens).loss.backward()
                model.zero_grad()
                if empty:
                    torch.cuda.empty_cache()
                allocated.append(torch.cuda.max_memory_allocated())
                reserved.append(torch.cuda.memory_reserved())
        finally:
            say(f"varied multiple={multiple} empty={empty} share={share}", allocated=allocated, reserved=reserved)
        return [allocated[-1], reserved[-1]]

    measure("varied", varied, trace=True)
    measure("varied, multiples of 64", lambda: varied(multiple=64))
    measure("varied, emptied", lambda: varied(empty=True))
    for share in (0.08, 0.07, 0.06, 0.05):
        measure(f"varied, {share} of the card", lambda share=share: varied(share=share))
    torch.cuda.set_per_process_memory_fraction(1.0)

    def epoch_of(keep: Any, backward: bool = True) -> list[int]:
        kept, after = [], []
        model = small_gpt().cuda()
        for _ in range(8):
            tokens = torch.zeros(4, 256, dtype=torch.long, device="cuda")
            output = model(input_ids=tokens, labels=tokens)
            if backward:
                output.loss.backward()
                model.zero_grad()
            kept.append(keep(output))
            after.append(torch.cuda.memory_allocated())
        return after

    measure("kept: loss after backward", lambda: epoch_of(lambda output: output.loss))
    measure("kept: loss without backward", lambda: epoch_of(lambda output: output.loss, backward=False))
    measure("kept: logits", lambda: epoch_of(lambda output: output.logits))
    measure("kept: item", lambda: epoch_of(lambda output: output.loss.item()))
