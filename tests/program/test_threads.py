"""A program's threads on one virtual GPU: each finds it, no request is lost, none is counted twice."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from virtual_gpu.program.context import cuda
from virtual_gpu.program.runner import run

# As kohya's sd-scripts swap blocks between RAM and the card while others compute (library/custom_offloading_utils.py).
SWAPS = """
import sys
import torch
from concurrent.futures import Future, ThreadPoolExecutor

class Inline:
    def submit(self, function, *args):
        done = Future()
        done.set_result(function(*args))
        return done

def block():
    return torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))

swapped, pool = 4, ThreadPoolExecutor(1) if sys.argv[1] == "threads" else Inline()
blocks = torch.nn.ModuleList(block() for _ in range(2 * swapped)).requires_grad_(False).cuda()
for one in blocks[swapped:]:
    for part in (one[0], one[2]):
        part.weight.data = part.weight.data.cpu()
head = torch.nn.Linear(512, 512).cuda()
optimizer, moves, stream = torch.optim.AdamW(head.parameters()), {}, torch.cuda.Stream()

def swap(leaves, comes):
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        for out, into in ((leaves[0], comes[0]), (leaves[2], comes[2])):
            place, values = out.weight.data, into.weight.data
            assert place.device.type == "cuda" and values.device.type == "cpu"
            place.record_stream(stream)
            out.weight.data = place.to("cpu", non_blocking=True)
            into.weight.data = place.copy_(values, non_blocking=True)

for _ in range(3):
    x = torch.ones(64, 512, device="cuda")
    for number, one in enumerate(blocks):
        if number in moves:
            moves.pop(number).result()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        x = x + one(x)
        if number < swapped:
            moves[number + swapped] = pool.submit(swap, one, blocks[number + swapped])
    head(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    for move in [pool.submit(swap, blocks[number + swapped], blocks[number]) for number in range(swapped)]:
        move.result()
"""


def test_a_thread_that_swaps_is_the_same_swap_inline(tmp_path):
    (tmp_path / "swap.py").write_text(SWAPS)
    found = {how: run(str(tmp_path / "swap.py"), [how]) for how in ("inline", "threads")}
    assert [report.error for report in found.values()] == [None, None] and found["threads"].steps == 3
    assert found["threads"].phases == found["inline"].phases


def test_many_threads_lose_nothing():
    """What each holds while all wait is counted, to the byte; and gone when they have let go."""
    threads, rounds = 8, 40
    with cuda("T4"):
        met, go_on = threading.Barrier(threads + 1, timeout=60), threading.Barrier(threads + 1, timeout=60)

        def work(number: int) -> None:
            x = torch.ones(128, 128 * (number + 1), device="cuda", requires_grad=True)
            for _ in range(rounds):
                y = (x * 2).relu() + x.cpu().to("cuda")
                assert y.device.type == "cuda" and y.is_cuda and torch.ones(3).device.type == "cpu"
                y.sum().backward()
                x.grad = None
                del y
            met.wait()
            go_on.wait()

        before = threading.Thread.start
        with ThreadPoolExecutor(threads) as pool:
            done = [pool.submit(work, number) for number in range(threads)]
            met.wait()
            held = torch.cuda.memory_allocated()
            go_on.wait()
            assert [one.result() for one in done] == [None] * threads
        assert held == sum(4 * 128 * 128 * (number + 1) for number in range(threads))
        assert torch.cuda.memory_allocated() == 0
    assert threading.Thread.start is not before


def test_each_thread_that_multiplies_has_a_workspace_of_its_own():
    """cuBLAS has a handle for each thread, and a workspace for each handle and stream."""
    with cuda("T4"):
        x = torch.ones(64, 64, device="cuda")

        def multiply() -> None:
            x @ x

        multiply()
        one = torch.cuda.memory_allocated() - x.nbytes
        with ThreadPoolExecutor(1) as pool:
            pool.submit(multiply).result()
        assert torch.cuda.memory_allocated() == x.nbytes + 2 * one > x.nbytes
        with torch.cuda.stream(torch.cuda.Stream()):
            multiply()
        assert torch.cuda.memory_allocated() == x.nbytes + 3 * one


def test_an_error_in_a_thread_is_the_program_s():
    with cuda("T4"), ThreadPoolExecutor(1) as pool:
        with pytest.raises(torch.OutOfMemoryError):
            pool.submit(torch.empty, 2**40, device="cuda").result()
        assert pool.submit(lambda: torch.ones(4, device="cuda").device.type).result() == "cuda"
        assert torch.cuda.memory_allocated() == 0
