"""bitsandbytes' paged optimizers: their states are beside PyTorch's allocator."""

import gc

import pytest
import torch

import virtual_gpu
from virtual_gpu.program.runner import run

SMALL, LARGE = 300 * 300, 500 * 500  # elements: bitsandbytes pages from 100,000 on
STEP = """\
import sys
import torch
import bitsandbytes as bnb

layers = torch.nn.Sequential(torch.nn.Linear(300, 300, bias=False), torch.nn.Linear(500, 500, bias=False)).cuda()
optimizer = getattr(bnb.optim, sys.argv[1])(layers.parameters())
for _ in range(3):
    sum(layer(torch.ones(1, layer.in_features, device="cuda")).sum() for layer in layers).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def held(name):
    """(bytes of the state on the card, in managed memory now, after the optimizer is gone)."""
    import bitsandbytes as bnb

    with virtual_gpu.cuda("T4") as card:
        parameters = [torch.nn.Parameter(torch.zeros(side, side, device="cuda")) for side in (300, 500)]
        optimizer = getattr(bnb.optim, name)(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        before = torch.cuda.memory_allocated()
        optimizer.step()
        on_card, managed = torch.cuda.memory_allocated() - before, card.managed_bytes
        del optimizer
        bnb.functional.GlobalPageManager._instance = None
        gc.collect()
        assert card.managed_peak_bytes == managed
        return on_card, managed, card.managed_bytes


@pytest.mark.parametrize(
    "whole, paged, states", [("AdamW32bit", "PagedAdamW32bit", 2), ("Lion32bit", "PagedLion32bit", 1)]
)
def test_what_is_paged_is_not_on_the_card(whole, paged, states):
    on_card, managed, after = held(paged)
    assert managed == states * LARGE * 4 and after == 0
    assert held(whole) == (on_card + states * LARGE * 4 + (-LARGE * 4) % 512 * states, 0, 0)


def test_the_scales_of_8_bits_stay_on_the_card():
    on_card, managed, _ = held("PagedAdamW8bit")
    assert managed == 2 * LARGE
    blocks = -(-LARGE // 256), -(-SMALL // 256)
    assert on_card >= 2 * 4 * sum(blocks) + 2 * SMALL


def test_the_report_says_what_it_leaves_out(tmp_path):
    program = tmp_path / "paged.py"
    program.write_text(STEP)
    report = run(str(program), ["PagedAdamW32bit"], gpu="T4")
    assert report.status == "fits" and report.steps == 3
    (note,) = (note for note in report.notes if "페이지" in note)
    assert "1.91 MiB" in note  # 2 × 500 × 500 × 4 bytes
    assert not any("페이지" in note for note in run(str(program), ["AdamW32bit"], gpu="T4").notes)
