"""Constants of rules at the places where they decide (tests/test_mutants.py changes them)."""

import pytest
import torch

from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.rules.attention import Request, attention_kernel
from virtual_gpu.rules.attention_memory import flash_backward
from virtual_gpu.rules.reductions import reduction_buffers

HALF = torch.float16


@pytest.mark.parametrize(("rows", "buffers"), [(255, (0, 0)), (256, (4 * 16, 4))])
def test_a_sum_is_shared_from_256_values_a_thread_on(rows, buffers):
    """512 threads; 16 blocks of at least 16 values a thread (max_values_per_thread, min_values_per_thread)."""
    assert reduction_buffers(1, 512 * rows, fastest=True, vectors=4, resident=108 * 2048) == buffers


def test_flash_rounds_lengths_to_128():
    query = torch.empty(1, 2, 400, 64, dtype=HALF, device="meta")
    assert flash_backward(query, query)[:2] == (2 * 512 * 4, 512 * 2 * 64 * 4)


@pytest.mark.parametrize(("dim", "kernel"), [(128, "cudnn"), (136, "flash")])
def test_cudnn_takes_heads_up_to_128(dim, kernel):
    assert attention_kernel((9, 0), Request(HALF, dim, dim, 512, 512), rules=["cudnn_attention"]) == kernel


def test_rows_that_lie_upon_each_other_are_copied():
    """A row repeated by `expand` is dense in itself, but not far enough from the next (stride 0)."""
    gpu = VirtualGPU(CATALOG["T4"])
    with gpu:
        weight, row = torch.empty(64, 64), torch.empty(1, 64)
        weight @ weight  # the workspace
        gpu.reset_peak_memory_stats()
        before = gpu.memory_allocated()
        row.expand(64, 64) @ weight
        assert gpu.max_memory_allocated() - before == 2 * 64 * 64 * 4  # the product, and the operand's copy


def test_arguments_are_cast_from_the_last_to_the_first():
    """cdist's second matrix, of another size, before its first."""
    from benchmarks.request_by_request import Requests

    gpu = VirtualGPU(CATALOG["A100-40GB"])
    with gpu, torch.inference_mode(), gpu.autocast(HALF):
        one, other = torch.empty(1024, 64, dtype=HALF), torch.empty(2048, 64, dtype=HALF)
        recorder = gpu.meter.recorder = Requests(gpu)
        torch.cdist(one, other)
        gpu.meter.recorder = None
    assert recorder.made[:2] == [("alloc", 2048 * 64 * 4), ("alloc", 1024 * 64 * 4)]
