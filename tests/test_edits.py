"""Edits of a trace: DDP's buckets, an accumulation, what is held besides; and the streams of FSDP2."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from versions import keeps_workspaces

from virtual_gpu.allocator import MIB
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.depth import with_depth
from virtual_gpu.shards.fake_rank import run_rank
from virtual_gpu.shards.layout import CONVENTIONS, Layout
from virtual_gpu.shards.nccl import nccl_bytes
from virtual_gpu.shards.rank_step import rank_step
from virtual_gpu.trace.edits import accumulating, bucket_sizes, held_from_the_start, with_ddp
from virtual_gpu.trace.recorder import TimelineRecorder
from virtual_gpu.trace.timeline import CATEGORIES

SIZES = (4096, 2048, 512)  # of the gradients, in the order in which backward makes them


def step_trace(steps):
    """Training steps with a gradient for each of SIZES, dropped after the optimizer."""
    recorder = TimelineRecorder({1: (8192, 8192, "parameters")})
    block = 1
    for _ in range(steps):
        gradients = []
        for name in ("forward", "backward", "step"):
            recorder.enter(name)
            for size in SIZES if name == "backward" else ():
                block += 2
                recorder.allocated(block - 1, 1024, 1024, "activations")
                recorder.allocated(block, size, size, "gradients")
                recorder.freed(block - 1)
                gradients.append(block)
            recorder.leave()
        for gradient in gradients:
            recorder.freed(gradient)
    return recorder.trace()


def live(trace, category):
    """phase → bytes of a category at its end."""
    return [phase.live[-1][CATEGORIES.index(category)] for phase in trace.timeline().phases]


def sound(trace):
    """Every release is of a block that is there, of its size and stream, and the spans rise."""
    gone = np.flatnonzero(~trace.allocates)
    assert trace.allocates[trace.born[gone]].all() and (trace.born[gone] < gone).all()
    assert len(set(trace.born[gone].tolist())) == len(gone)
    for name in ("nbytes", "category", "stream"):
        assert np.array_equal(getattr(trace, name)[gone], getattr(trace, name)[trace.born[gone]]), name
    assert (np.diff(trace.span) >= 0).all()


def test_buckets_are_a_second_copy_of_the_gradients():
    plain, ddp = step_trace(2), with_ddp(step_trace(2))
    sound(ddp)
    assert live(ddp, "gradients") == live(plain, "gradients")
    assert live(ddp, "other") == [sum(SIZES)] * 6
    first = np.flatnonzero(ddp.category == CATEGORIES.index("other"))
    # One bucket until the first optimizer step; then those of the order in which the gradients came.
    assert ddp.nbytes[first].tolist() == [sum(SIZES), sum(SIZES), *bucket_sizes(SIZES)]
    assert ddp.span[first].tolist() == [0, 6, *[6] * len(bucket_sizes(SIZES))]


def test_gradients_that_are_views_of_their_buckets():
    ddp = with_ddp(step_trace(2), gradient_as_bucket_view=True)
    sound(ddp)
    assert live(ddp, "gradients") == [sum(SIZES)] * 6 and live(ddp, "other") == [0] * 6
    assert ddp.peak_bytes < with_ddp(step_trace(2)).peak_bytes


def test_an_accumulation_holds_its_gradients_from_the_start():
    plain, held = step_trace(1), accumulating(step_trace(1))
    sound(held)
    assert live(held, "gradients") == [sum(SIZES)] * 3
    assert plain.peak_bytes + max(SIZES) <= held.peak_bytes + 1024 <= plain.peak_bytes + sum(SIZES) + 1024


def test_what_is_held_from_the_start():
    trace = held_from_the_start(step_trace(2), [1000, 512], "optimizer")
    sound(trace)
    assert live(trace, "optimizer") == [1536] * 6


@pytest.mark.parametrize("seed", range(20))
def test_buckets_are_those_that_pytorch_makes(seed):
    chance = np.random.default_rng(seed)
    elements = chance.choice([1, 700, 524_288, 7_000_000, 13_107_200, 20_000_000], 40).tolist()
    tensors = [torch.empty(n, dtype=torch.bfloat16, device="meta") for n in elements]
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * MIB]
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(tensors))
    assert bucket_sizes([2 * n for n in elements]) == [sum(2 * elements[i] for i in bucket) for bucket in indices]


# -- ranks ---------------------------------------------------------------------------------------------------------


def rank_trace(stage, layers=4, **setting):
    config = with_depth(load_config("meta-llama/Llama-3.2-1B"), layers)
    return run_rank(config, Layout(8, stage), CONVENTIONS["bf16"], batch_size=1, sequence_length=64, **setting).trace


def test_nothing_stays_gathered_between_the_blocks_at_stage_3():
    """What a block gathered is gone when the next but one is gathered: never more than three groups are there."""
    trace, gathered = rank_trace(3, layers=8), CATEGORIES.index("parameters")
    shards = int(trace.nbytes[(trace.span == 0) & (trace.category == gathered)].sum())
    change = np.where(trace.category == gathered, np.where(trace.allocates, trace.nbytes, -trace.nbytes), 0).cumsum()
    whole = 8 * shards  # FSDP2's padding aside
    assert change.max() - shards < whole / 2
    assert change[-1] == shards
    kept = rank_trace(2, layers=8)
    change = np.where(kept.category == gathered, np.where(kept.allocates, kept.nbytes, -kept.nbytes), 0).cumsum()
    assert change.max() - shards > 0.9 * whole


def test_fsdp_s_buffers_lie_in_pools_of_their_own():
    trace = rank_trace(3)
    kinds = {stream: set(trace.category[trace.allocates & (trace.stream == stream)].tolist()) for stream in range(3)}
    assert kinds[1] == {CATEGORIES.index("other")}  # what is gathered
    assert kinds[2] == {CATEGORIES.index("gradients")}  # what is left of them after the reduce-scatter
    assert set(trace.stream.tolist()) == {0, 1, 2}
    assert trace.reserved_peak() > replace(trace, stream=None).reserved_peak()


def test_ddp_counts_its_buckets_unless_it_is_told_not_to():
    setting = {"precision": "bf16", "sequence_length": 64}
    plain, ddp = (rank_step("gpt2", ranks, 0, **setting) for ranks in (1, 4))
    view = rank_step("gpt2", 4, 0, **setting, gradient_as_bucket_view=True)
    gradients = ddp.memory.gradients
    assert ddp.memory.buckets == gradients and not view.memory.buckets and not plain.memory.buckets
    assert ddp.total == pytest.approx(plain.total + gradients, rel=0.01)
    assert ddp.total - view.total > gradients / 2


@keeps_workspaces
@pytest.mark.parametrize("gpu, workspace", [("H100", 32 * MIB), ("A100-40GB", 8_519_680)])
def test_a_rank_has_the_workspaces_of_its_card(gpu, workspace):
    trace = rank_step("gpt2", 4, sequence_length=64, gpu=gpu).trace
    other = trace.nbytes[trace.allocates & (trace.category == CATEGORIES.index("other"))]
    assert [(other == size).sum() for size in (workspace, 32 * MIB + 8_519_680 - workspace)] == [2, 0]


def test_what_a_card_needs_lies_between_tensors_and_reserved():
    step = rank_step("meta-llama/Llama-3.2-1B", 8, sequence_length=512)
    assert step.total <= step.card_bytes <= step.reserved_bytes + step.total // 128
    assert step.trace.reserved_peak(step.card_bytes) <= step.card_bytes
    assert step.nccl == nccl_bytes(Layout(8))


def test_nccl_has_buffers_for_every_group():
    assert nccl_bytes(Layout(1)) == (0, 0, 0)
    two, many, both = (nccl_bytes(Layout(*layout)) for layout in ((2,), (8,), (8, 3, 2)))
    assert (two.likely, many.likely) == (544 * MIB, 688 * MIB)
    assert both.likely == two.likely + many.likely
    for each in (two, many, both):
        assert each.low < each.likely < each.high
