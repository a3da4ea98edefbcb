"""Chapter 13: pictures to tokens, the towers' bytes, and a tower beside what others measured."""

from functools import partial

import pytest
import torch

from helpers import images_panel
from helpers.chapters.c11_outside.tried import attempt
from helpers.chapters.c13_images.loss import both_losses
from helpers.chapters.c13_images.others import measured_tower
from helpers.chapters.c13_images.tokens import FEWEST, MOST, TEXT, config, conversation, grid_of
from helpers.chapters.c13_images.towers import draw_towers, towers_of_each
from helpers.chapters.c13_images.trained import train
from virtual_gpu.models.build import count_parameters

HALF = {"dtype": torch.bfloat16}
SIDE = 256  # 64 tokens


@pytest.fixture(scope="module")
def towers():
    return towers_of_each(
        {
            "language": partial(train, SIDE, SIDE, **HALF),
            "all": partial(train, SIDE, SIDE, adapters="all", **HALF),
            "two pictures": partial(train, SIDE, SIDE, 2, **HALF),
        },
        "L4",
    )


def test_a_picture_keeps_its_shape_and_stays_below_its_most_pixels():
    assert grid_of(4032, 3024) == (188, 252) and grid_of(4032, 3024).tokens == 11_844
    for most in (FEWEST, 300_000, 1_310_720, MOST):
        grid = grid_of(4032, 3024, most)
        assert grid.patches * 16**2 <= most and grid.tokens * 4 == grid.patches
    assert grid_of(10, 10).patches * 16**2 >= FEWEST  # too small a picture is made larger


@pytest.mark.parametrize(
    "size, said",
    [((0, 10), "가로"), ((10, -1), "세로"), (("a", 10), "가로"), ((10, 10, 64), "65,536"), ((10_000, 10), "200배")],
)
def test_a_size_that_is_none_is_refused_in_a_sentence(size, said):
    with pytest.raises(ValueError, match=said):
        grid_of(*size)


def test_a_sample_has_a_token_for_each_that_the_grid_counts():
    grid = grid_of(512, 256)
    sample = conversation(grid, images=3)
    assert sample["input_ids"].shape == (1, 3 * (grid.tokens + 2) + TEXT)
    assert int((sample["input_ids"] == config().image_token_id).sum()) == 3 * grid.tokens
    assert sample["pixel_values"].shape == (3 * grid.patches, 3 * 2 * 16 * 16)
    assert int((sample["labels"] != -100).sum()) == TEXT


def test_the_model_has_the_parameters_that_its_name_says():
    from transformers import Qwen3VLForConditionalGeneration

    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(config())
    assert 2.1e9 < count_parameters(model) < 2.2e9
    assert 0.40e9 < count_parameters(model.model.visual) < 0.41e9


def test_what_the_towers_hold_adds_up_to_the_peak(towers):
    for one in towers.values():
        assert one.outcome.died is None
        assert sum(one.held.values()) == one.total == one.outcome.gpu


def test_a_tower_without_adapters_keeps_nothing_for_backward(towers):
    assert "vision activations" not in towers["language"].held
    assert towers["all"].held["vision activations"] > towers["all"].held["language activations"] / 2
    assert towers["two pictures"].held["language activations"] > 1.2 * towers["language"].held["language activations"]


def test_where_the_memory_ran_out_the_bar_is_what_lay_there_and_the_request():
    died = towers_of_each({"photo": partial(train, 4032, 3024)}, "T4")["photo"]
    assert died.outcome.died == "gpu" and died.held["request"] == died.outcome.asked
    lay_there = died.total - died.outcome.asked
    assert lay_there < died.outcome.gpu and lay_there + died.outcome.asked > died.room * 0.9


def test_the_bars_tell_their_parts(towers):
    told = str(draw_towers(towers))
    assert "비전 인코더의 순전파" in told and all(name in told for name in towers)


def test_logits_of_the_text_alone_give_the_same_loss_and_less_memory():
    whole, alone = both_losses()
    assert whole == pytest.approx(alone, rel=1e-6) and whole > 1
    assert attempt(partial(train, SIDE, SIDE, answer_only=True)).gpu < attempt(partial(train, SIDE, SIDE)).gpu


@pytest.mark.parametrize("wrong", [{"adapters": "vision"}, {"max_pixels": 1}, {"images": 0}])
def test_a_wrong_setting_leaves_nothing_behind(wrong):
    with pytest.raises(ValueError, match=str(next(iter(wrong)))):
        train(SIDE, SIDE, **wrong)


def test_the_measured_tower_is_the_benchs():
    rows = {row[0]: row[1:] for row in measured_tower()}
    assert len(rows) == 5 and float(rows["sdpa"][2].rstrip("%")) < 0.01
    assert rows["flash"][1:] == ["실행하지 않음", ""]


def test_the_panel_waits_for_its_button_and_says_what_it_counted():
    panel = images_panel()
    assert "1,024토큰" in panel.status.value and "T4: 11.5" in panel.status.value
    shown = panel.picture.value
    panel.controls["picture"].value = (512, 512)
    assert "실행" in panel.status.value and "course-old" in panel._dom_classes and panel.picture.value == shown
    panel.run.click()
    assert "256토큰" in panel.status.value and "course-old" not in panel._dom_classes
    panel.controls["images"].value = 8
    panel.controls["picture"].value = (4032, 3024)
    panel.run.click()
    assert "OOM" in panel.status.value
    assert "들어주지 못한 요청" in panel.picture.value
