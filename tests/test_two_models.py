"""Chapter 12: what DPO holds beside SFT to the byte, the phases of GRPO, the engine's block, the panel's floor."""

import os
import re
from functools import partial

import pytest
import torch

from helpers import grpo_panel
from helpers.chapters.c11_outside.tried import Outcome, attempt
from helpers.chapters.c12_two_models.floor import Grpo, share
from helpers.chapters.c12_two_models.made import QUIET, pairs, prompts, texts, tokenizer
from helpers.chapters.c12_two_models.moments import moments_of, parts_beside, parts_of_each
from helpers.chapters.c12_two_models.on_card import beside_h100, on_h100
from helpers.chapters.c12_two_models.phases import BACKWARD, LOSS, REFERENCE, ROLLOUT, STEP, Phase, Steps, steps_of
from helpers.chapters.c12_two_models.pictures import draw_blocks, draw_moments, draw_parts, draw_steps
from helpers.chapters.c12_two_models.trained import train_grpo, train_whole
from virtual_gpu.cards import card
from virtual_gpu.errors import WrongValue
from virtual_gpu.models.build import build_model, count_parameters
from virtual_gpu.models.configs import load_config
from virtual_gpu.units import human_bytes

GPU = "RTX 4090"


def test_the_data_have_the_lengths_that_are_asked_for():
    ids = tokenizer()
    assert len(ids(texts(40)[0]["text"])["input_ids"]) == 40
    assert ids(texts(40)[0]["text"])["input_ids"][-1] == ids.eos_token_id
    pair = pairs(7, 9)[0]
    assert len(ids(pair["prompt"] + pair["chosen"])["input_ids"]) == 16 and pair["chosen"] == pair["rejected"]
    assert len(ids(prompts(12)[0]["prompt"])["input_ids"]) == 12


def train_dpo(folder, before):
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(
        str(folder), per_device_train_batch_size=1, max_steps=2, fp16=True, precompute_ref_log_probs=before, **QUIET
    )
    data = {"train_dataset": pairs(256, 256), "processing_class": tokenizer()}
    DPOTrainer("meta-llama/Llama-3.2-1B", args=arguments, **data).train()


@pytest.mark.slow
def test_a_reference_model_is_its_weights_and_nothing_else(tmp_path):
    copy, before = (attempt(partial(train_dpo, tmp_path, first), "A100-80GB") for first in (False, True))
    weights = 4 * count_parameters(build_model(load_config("meta-llama/Llama-3.2-1B"), torch.float32))
    assert copy.gpu - before.gpu == weights
    assert attempt(partial(train_dpo, tmp_path, False), GPU).died == "gpu"


@pytest.mark.slow
def test_logits_that_are_kept_make_a_pair_more_than_two_sequences():
    small, large = ({way: attempt(partial(train_whole, way, n, 1024), "A100-80GB").gpu for way in ("sft", "dpo")}
                    for n in (1, 2))  # fmt: skip
    copy = 1024 * load_config("Qwen/Qwen3-4B").vocab_size * 4  # the logits of a sequence in fp32
    assert 3 * copy < large["sft"] - small["sft"] < 3.5 * copy
    assert 5 * 2 * copy < large["dpo"] - small["dpo"] < 5.5 * 2 * copy
    for wrong in ({"way": "kto"}, {"batch": 0}, {"length": 40961}, {"batch": 10**6, "length": 4096}):
        with pytest.raises(WrongValue):
            train_whole(**wrong)


def make_scores(early=False, dense=False, words=2**18):
    """The policy's and the reference's log probabilities of two sequences, as chapter 12 makes them, and backward."""
    policy, reference = (torch.nn.Linear(8, words).cuda() for _ in range(2))
    inputs, ids = torch.ones(2, 64, 8).cuda(), torch.ones(2, 63, 1, dtype=torch.int64).cuda()

    def scores(model):
        logits = model(inputs)
        rows = logits.log_softmax(-1)[:, :-1] if dense else logits[:, :-1].log_softmax(-1)
        return logits, rows.gather(-1, ids)

    kept, ours = scores(policy)
    kept = None if early else kept
    with torch.no_grad():
        theirs = scores(reference)[1]
    kept = None
    (ours - theirs).sum().backward()


@pytest.mark.parametrize(("ways", "copies"), [({}, 5), ({"early": True}, 4), ({"early": True, "dense": True}, 3)])
def test_the_moments_of_a_step_with_whole_logits(ways, copies):
    found = moments_of(partial(make_scores, **ways))
    names = ["logits", "log_softmax", "reference logits", "reference log_softmax", "gradients"]
    assert [one.made for one in found.rows] == names
    highest = max(found.rows, key=lambda one: one.total)
    assert highest.total == found.outcome.gpu and len(highest.held) - 1 == copies
    assert ("copy" in dict(found.rows[3].held)) == ("dense" not in ways)
    one = 2 * 64 * 2**18 * 4  # the logits, nearly what each of the others takes
    assert all(0.98 * one <= nbytes <= one for _, nbytes in highest.held[1:])
    assert human_bytes(highest.total) in draw_moments({"DPO": found}).alt


def test_a_step_that_dies_has_the_moments_so_far():
    found = moments_of(partial(make_scores, words=2**20), "2GiB, 7.5")
    assert found.outcome.died == "gpu" and 0 < len(found.rows) < 5
    assert "OOM" in draw_moments({"DPO": found}).svg()
    assert moments_of(lambda: None).rows == ()


def forget_the_peak():
    make_scores()
    torch.cuda.reset_peak_memory_stats()


def test_the_parts_of_peaks_are_the_peaks():
    found = parts_of_each({"wide": make_scores, "narrow": partial(make_scores, words=2**17)})
    assert all(sum(one.held.values()) == one.outcome.gpu for one in found.values())
    assert parts_of_each({"reset": forget_the_peak})["reset"].held == found["wide"].held
    rows = parts_beside(found)
    assert rows.heads == ["", "wide", "narrow"] and {"임시 텐서", "파라미터"} < {row[0] for row in rows}
    assert rows[-1] == ["모두", *(human_bytes(one.outcome.gpu) for one in found.values())]
    assert human_bytes(found["narrow"].held["temporaries"]) in draw_parts(found).alt


def test_a_phases_number_stands_beside_its_bar_or_beyond_the_line():
    drawn = draw_blocks({ROLLOUT: {"weights": 2**30}, BACKWARD: {"weights": 10 * 2**30}}, 10 * 2**30).svg()
    edge = float(re.search(r'x1="([\d.]+)"[^>]*stroke-width="2"', drawn)[1])
    beside, beyond = (float(re.search(rf'x="([\d.]+)"[^>]*>{text}<', drawn)[1]) for text in ("1.00 GiB", "10.00 GiB"))
    assert beside < edge - 100 and beyond > edge


def test_the_numbers_stand_clear_of_the_cards_line():
    room = 1000
    phases = [Phase(ROLLOUT, 0, peak, 0, peak) for peak in (400, 940, 960, 990)]
    drawn = draw_steps(Steps(phases, Outcome(990, 0), room)).svg()
    line = float(re.search(r'y1="([\d.]+)" x2="[\d.]+" y2="\1"[^>]*stroke-width="2"', drawn)[1])
    numbers = [float(y) for y in re.findall(r'y="([\d.]+)" font-size="11"', drawn)]
    assert len(numbers) == 4 and all(y <= line - 4 or y - 11 >= line for y in numbers)


def test_the_phase_in_which_a_step_died_is_marked():
    phases = [Phase(ROLLOUT, 0, peak, 0, peak) for peak in (400, 990)]
    assert ">OOM</text>" in draw_steps(Steps(phases, Outcome(990, 0, died="gpu"), 1000)).svg()
    assert "OOM" not in draw_steps(Steps(phases, Outcome(990, 0), 1000)).svg()


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{}, {"sleeps": True}])
def test_the_phases_come_in_their_order_and_above_the_floor(engine):
    steps = steps_of(partial(train_grpo, fraction=0.2, **engine), GPU)
    assert [one.name for one in steps.phases] == [ROLLOUT, REFERENCE, LOSS, BACKWARD, STEP] * 2
    assert all(one.peak >= max(one.start, one.end) for one in steps.phases)
    assert steps.outcome.died is None and steps.result == steps.outcome.result
    setting = Grpo("Qwen/Qwen3-0.6B", engine="asleep" if engine else "copy", fraction=0.2)
    floor = setting.floor(card(GPU).memory_bytes)
    for name, peak in steps.peaks().items():
        if name in floor:
            assert 1 <= peak / sum(floor[name].values()) < 1.15
    assert "GiB" in draw_steps(steps).alt


@pytest.mark.slow
def test_a_batch_that_is_accumulated_is_above_the_floor_with_the_gradients_of_the_one_before():
    steps = steps_of(partial(train_grpo, fraction=0.2, batch=4), GPU)
    setting = Grpo("Qwen/Qwen3-0.6B", batch=4, engine="copy", fraction=0.2)
    floor = setting.floor(card(GPU).memory_bytes)
    weights = floor[ROLLOUT]["weights"]
    assert floor[LOSS]["gradients"] == floor[BACKWARD]["gradients"] == weights
    assert floor[BACKWARD]["activations"] and "gradients" not in floor[ROLLOUT]
    for name in (LOSS, BACKWARD):
        assert 1 <= steps.peaks()[name] / sum(floor[name].values()) < 1.15


@pytest.mark.slow
def test_an_engine_that_stays_is_there_in_every_phase():
    small, large = (steps_of(partial(train_grpo, fraction=part, batch=4), GPU).phases for part in (0.1, 0.2))
    total = card(GPU).memory_bytes
    more = int(total * 0.2) - int(total * 0.1)
    assert all(abs(two.peak - one.peak - more) < 2**22 for one, two in zip(small, large, strict=True))
    died = steps_of(partial(train_grpo, fraction=0.8, sleeps=True), GPU)
    assert died.outcome.died == "gpu" and died.phases[-1].name == ROLLOUT and "스텝 2" in died.result


def test_a_share_is_a_part_of_a_card():
    for wrong in (0, -1, 1.5, "half", True, float("nan"), None):
        with pytest.raises(WrongValue):
            share(wrong)


def test_what_cannot_be_is_refused():
    for wrong in (
        {"reference": "adapter off"}, {"engine": "vllm"}, {"fraction": 0}, {"generations": 0}, {"batch": 1.5},
        {"prompt": -1}, {"reference": "copies"}, {"model": ["Qwen/Qwen3-0.6B"]},
    ):  # fmt: skip
        with pytest.raises(ValueError):
            Grpo(**{"model": "Qwen/Qwen3-0.6B"} | wrong)
    with pytest.raises(WrongValue, match="card_bytes"):
        Grpo("Qwen/Qwen3-0.6B").floor("24GiB")


def test_the_floor_of_a_reference_and_of_an_adapter():
    total = card("T4").memory_bytes
    full = Grpo("Qwen/Qwen3-0.6B").floor(total)
    count = full[ROLLOUT]["weights"]
    assert Grpo("Qwen/Qwen3-0.6B", reference="copy").floor(total)[LOSS]["reference"] == count
    off = Grpo("Qwen/Qwen3-0.6B", lora=True, reference="adapter off").floor(total)
    assert REFERENCE not in off[LOSS] and off[ROLLOUT]["optimizer"] < full[ROLLOUT]["optimizer"] / 20


def test_what_is_not_accumulated_leaves_no_gradients():
    whole, parts = (Grpo("Qwen/Qwen3-0.6B", batch=n).floor(card("T4").memory_bytes) for n in (8, 4))
    assert "gradients" not in whole[LOSS] and "activations" not in whole[BACKWARD]
    fewer = whole[LOSS]["activations"] - parts[LOSS]["activations"]
    assert sum(parts[LOSS].values()) == sum(whole[LOSS].values()) + whole[BACKWARD]["gradients"] - fewer


def test_the_bars_of_trl_are_off_for_every_program(monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    for make in (texts, partial(pairs, 4), prompts):
        assert attempt(lambda make=make: make(4) and int(os.environ["TQDM_DISABLE"])).returned == 1


def test_the_grpo_panel_follows_its_controls():
    panel = grpo_panel()
    assert "역전파" in panel.status.value and "들어간다" in panel.status.value
    panel.controls["engine"].value = "copy"
    panel.controls["fraction"].value = 0.9
    assert "넘친다" in panel.status.value
    panel.controls["engine"].value = "shared"
    assert panel.controls["fraction"].disabled and "들어간다" in panel.status.value
    panel.controls["reference"].value = "adapter off"
    assert 'role="alert"' in panel.status.value and "어댑터가 없다" in panel.status.value
    panel.controls["lora"].value = True
    assert "롤아웃" in panel.status.value and "<svg" in panel.picture.value


def test_what_the_card_counted_is_what_the_record_says():
    runs, rows = on_h100(), beside_h100()
    assert [row[0] for row in rows] == list(runs) == ["DPO 4", "DPO 4, lora", "DPO 4, precomputed", "SFT 4", "SFT 8"]
    weights = 4 * count_parameters(build_model(load_config("meta-llama/Llama-3.2-1B"), torch.float32))
    assert runs["DPO 4"].peak[0] - runs["DPO 4, precomputed"].peak[0] == weights
    for row, one in zip(rows, runs.values(), strict=True):
        assert row[1] == f"{one.peak[0]:,}" and int(row[2].replace(",", "")) == one.peak[1] - one.peak[0]
