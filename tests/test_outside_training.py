"""Chapter 11: the KV cache's formula against caches that models made, and what a tried program tells."""

import os
from functools import partial

import pytest
import torch

from helpers import cache_panel
from helpers.chapters.c11_outside.cache import MODELS, cache_bytes
from helpers.chapters.c11_outside.job import NAMES, job
from helpers.chapters.c11_outside.pictures import draw_gathering, draw_job
from helpers.chapters.c11_outside.resume import resumed, saved
from helpers.chapters.c11_outside.tried import attempt, compare
from virtual_gpu.models import offloaded
from virtual_gpu.models.build import build_model
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.kv_cache import kv_bytes
from virtual_gpu.step.run import enable_checkpointing


def filled_cache(config, tokens):
    """The bytes of a model's cache after `tokens` tokens, the last of which was generated: first layers alone."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    model.to_empty(device="cuda")
    ids = torch.ones(2, tokens - 1, dtype=torch.int64).cuda()
    with torch.no_grad():
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
        model(ids[:, :1], past_key_values=cache, use_cache=True)
    return cache_bytes(cache)


def test_a_row_that_wants_a_newer_library_says_so_and_the_others_are_shown(monkeypatch):
    """transformers before 5.17 moves no checkpoints to the CPU."""
    monkeypatch.setattr(offloaded, "can_offload", lambda stage=0: False)

    def program(offload):
        model = build_model(load_config("gpt2"), torch.float16).to_empty(device="cuda")
        enable_checkpointing(model, offload=offload)

    rows = compare({"with": partial(program, True), "without": partial(program, False)})
    assert rows[0][1:3] == ["–", "–"] and "transformers>=5.17" in rows[0][3]
    assert rows[1][1].endswith("MiB")


@pytest.mark.parametrize("name", MODELS)
def test_the_formula_is_what_a_cache_holds(name):
    config = load_config(name)
    config.num_hidden_layers = 7 if getattr(config, "layer_types", None) and "gemma" in name else 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    found = attempt(partial(filled_cache, config, 600), "H200")
    assert found.returned == kv_bytes(config, 600, 2)


def test_what_a_program_that_dies_tells():
    def asks_too_much():
        return torch.empty(20 * 2**30, dtype=torch.uint8, device="cuda")

    def fills_ram():
        return [torch.empty(2**30, dtype=torch.uint8) for _ in range(3)]

    on_gpu, in_ram = attempt(asks_too_much), attempt(fills_ram, host="2GiB")
    assert (on_gpu.died, on_gpu.asked, on_gpu.where) == ("gpu", 20 * 2**30, "asks_too_much")
    assert (in_ram.died, in_ram.asked) == ("ram", 2**30)
    assert "Tried to allocate 20.00 GiB" in on_gpu.message and attempt(lambda: None).message == ""
    rows = compare({"small": lambda: 2**20, "large": asks_too_much})
    assert [row[3] for row in rows] == ["1.00 MiB", "–"] and "20.00 GiB · asks_too_much" in rows[1][4]


def test_the_allocators_settings_hold_for_one_attempt(monkeypatch):
    """A segment of which a third is in use goes back to nobody, but where it is made of pages."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)

    def mebibytes(number):
        return torch.empty(number * 2**20, dtype=torch.uint8, device="cuda")

    def leaves_a_hole():
        large = mebibytes(600)
        del large
        return mebibytes(200), mebibytes(500)

    hole, pages = (attempt(leaves_a_hole, "1GiB", settings=how) for how in (None, "expandable_segments:True"))
    assert (hole.died, pages.died) == ("gpu", None) and "PYTORCH_ALLOC_CONF" not in os.environ


def test_a_checkpoint_stays_where_it_was_read(tmp_path):
    path = tmp_path / "checkpoint.pt"
    attempt(saved(path), writes=True)
    kept, dropped, on_cpu, mapped = (
        attempt(resumed(path, **options))
        for options in ({}, {"model": "drop"}, {"map_location": "cpu"}, {"map_location": "cpu", "mmap": True})
    )
    assert [one.died for one in (kept, dropped, on_cpu, mapped)] == ["gpu", None, None, None]
    assert attempt(resumed(path, optimizer="drop")).died == "gpu"  # the optimizer has taken those very tensors
    assert dropped.gpu == on_cpu.gpu == mapped.gpu and on_cpu.ram > 2 * mapped.ram


def test_the_cache_panel_follows_its_controls():
    panel = cache_panel()
    assert "2.00 GiB" in panel.status.value and "들어간다" in panel.status.value
    panel.controls["context"].value = 131072
    assert "16.00 GiB" in panel.status.value and "넘친다" in panel.status.value
    panel.controls["cache"].value = "4 bit"
    assert "4.00 GiB" in panel.status.value and "들어간다" in panel.status.value


def test_the_picture_of_gathering_adds_what_joining_asks_for():
    """Two batches of 1 GiB and weights of 1 GiB: the first is not joined, the second asks for both once more."""
    one = 2**30
    drawn = draw_gathering([(2 * one, one), (3 * one, one), (4 * one, one)], "T4")
    assert drawn.alt.startswith("2.00 GiB, 5.00 GiB, 7.00 GiB; ")


def test_with_the_cures_no_phase_takes_more_than_the_training():
    usual, careful = job(), job(careful=True)
    assert [one.name for one in usual] == [one.name for one in careful] == list(NAMES)
    for phases, above in ((usual, {"evaluate", "resume"}), (careful, set())):
        training = phases[1].gpu
        assert {one.name for one in phases if one.gpu > training} == above
    assert usual[1].gpu == pytest.approx(careful[1].gpu, rel=0.01)
    assert draw_job(careful, usual).alt.startswith("GPU: ")
