"""A program's threads on one virtual GPU: each finds it, no request is lost, none is counted twice."""

import multiprocessing
import os
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
        for _ in range(3):  # the handle of a thread that has ended is the next one's
            thread = threading.Thread(target=multiply)
            thread.start()
            thread.join()
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


def test_who_reads_meanwhile_reads_a_whole_state():
    """`memory_allocated`, statistics and snapshots, while others allocate and release."""
    with cuda("T4"):
        go_on = threading.Event()

        def work() -> None:
            while not go_on.is_set():
                torch.ones(512, 512, device="cuda").relu_().sum()

        with ThreadPoolExecutor(3) as pool:
            done = [pool.submit(work) for _ in range(3)]
            for _ in range(100):
                stats = torch.cuda.memory_stats()
                assert stats["allocated_bytes.all.current"] <= stats["reserved_bytes.all.current"]
                torch.cuda.memory.memory_snapshot()
            go_on.set()
            assert [one.result() for one in done] == [None] * 3
        assert torch.cuda.memory_allocated() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_fork_while_another_thread_is_in_an_operation():
    """As loaders are begun while a thread pins batches: the child, which has one thread, computes on its CPU."""
    with cuda("T4") as gpu:
        inside, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            with gpu.mode.turn:
                inside.set()
                go_on.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        inside.wait(60)
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.apply_async(in_a_fork).get(60) == 6
            go_on.set()
        thread.join()


def in_a_fork() -> float:
    return float(torch.ones(2, 3).sum())


@pytest.mark.parametrize(
    "ending", ["thread.start()", "thread.start()\nthread.join()", "thread.start()\nqueue.Queue().get()"]
)
def test_a_run_ends_where_a_thread_makes_its_steps(tmp_path, ending):
    """Whether the program waits for it, for something that never comes, or leaves that to Python."""
    (tmp_path / "train.py").write_text(
        "import queue, threading, time, torch\n"
        "def train():\n"
        "    time.sleep(0.2)\n"
        "    model = torch.nn.Linear(256, 256).cuda()\n"
        "    optimizer = torch.optim.AdamW(model.parameters())\n"
        "    while True:\n"
        "        model(torch.ones(4, 256, device='cuda')).sum().backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        f"thread = threading.Thread(target=train)\n{ending}\n"
    )
    report = run(str(tmp_path / "train.py"), [])
    assert report.error is None and report.status == "fits" and report.steps == 3


def test_a_thread_that_goes_on_works_on_the_cpu():
    with cuda("T4"):
        begun, over = threading.Event(), threading.Event()
        found = []

        def work() -> None:
            torch.ones(4, device="cuda")
            begun.set()
            over.wait(60)
            found.append(type(torch.ones(4) + 1))

        thread = threading.Thread(target=work)
        thread.start()
        begun.wait(60)
    over.set()
    thread.join()
    assert found == [torch.Tensor] and "run" not in vars(thread)
