"""Chapter 13: pictures to tokens, the towers' bytes, and a tower beside what others measured."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from helpers import images_panel
from helpers.chapters.c11_outside.tried import attempt
from helpers.chapters.c13_images.loss import both_losses, small_config
from helpers.chapters.c13_images.others import measured_tower
from helpers.chapters.c13_images.tokens import FEWEST, MOST, TEXT, config, conversation, grid_of
from helpers.chapters.c13_images.towers import draw_towers, towers_of_each
from helpers.chapters.c13_images.trained import train
from helpers.models import byte_tokenizer
from virtual_gpu.models.build import count_parameters

TEXT_OF_THE_CHAPTER = Path(__file__).parent.parent / "notebooks" / "src" / "13_images.py"
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


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def processor():
    """transformers' own processor with a token a byte. It wants torchvision for films, of which there are none here."""
    from transformers import PreTrainedTokenizerFast, Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    marks = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token="<|im_end|>", additional_special_tokens=marks
    )
    size = {"shortest_edge": FEWEST, "longest_edge": MOST}
    made = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3VLProcessor, "check_argument_for_proper_class", lambda *_: None)
        films = type("NoFilms", (), {"merge_size": 2})()
        made.__init__(Qwen2VLImageProcessorPil(patch_size=16, size=size), tokenizer, films, chat_template=TEMPLATE)
    return made


@pytest.fixture(scope="module")
def readers_model(processor, tmp_path_factory):
    """A small model with weights in a folder, whose tokens are the processor's."""
    from transformers import Qwen3VLForConditionalGeneration

    small = small_config()
    for name in ("image", "video"):
        setattr(small, f"{name}_token_id", processor.tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>"))
    for name in ("start", "end"):
        setattr(small, f"vision_{name}_token_id", processor.tokenizer.convert_tokens_to_ids(f"<|vision_{name}|>"))
    folder = tmp_path_factory.mktemp("vision")
    Qwen3VLForConditionalGeneration(small).save_pretrained(folder)
    return folder


def readers_program(text, processor, folder, dataset):
    """The chapter's program as it stands there, but for where the model lies."""
    from transformers import AutoProcessor
    from transformers.integrations import sdpa_attention

    given = {"dataset": dataset}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoProcessor, "from_pretrained", lambda name, max_pixels: processor)
        patch.setattr(sdpa_attention, "use_gqa_in_sdpa", sdpa_attention.use_gqa_in_sdpa)  # put back afterwards
        exec(text.replace('"Qwen/Qwen3-VL-2B-Instruct"', repr(str(folder))), given)
    return given


def test_the_program_to_copy_runs_and_checkpoints(processor, readers_model):
    from PIL import Image

    blocks = re.findall(r"# ```python\n(.*?)# ```\n", TEXT_OF_THE_CHAPTER.read_text(), re.S)
    (text,) = [block for block in blocks if "def collate" in block]
    text = re.sub(r"^# ?", "", text, flags=re.M)
    dataset = [{"image": Image.new("RGB", (1000, 800)), "question": "무엇인가?", "answer": "고양이"}] * 2
    seen = {}

    def program(text):
        given = readers_program(text, processor, readers_model, dataset)
        seen.update(sample=given["collate"](dataset[:1]), kept=given["kept"])
        layer = given["model"].get_submodule("base_model.model.model.language_model.layers.0")
        assert layer.training == ("model.train()" in text)

    one = attempt(partial(program, text), "T4")
    assert one.died is None, one.message
    labels = seen["sample"]["labels"][0]
    assert processor.tokenizer.decode(labels[labels != -100]) == "고양이<|im_end|>\n"
    assert seen["kept"] == int((labels != -100).sum()) + 1 and not (labels[-seen["kept"] + 1 :] == -100).any()
    without = attempt(partial(program, text.replace("model.train()\n", "")), "T4")  # as `from_pretrained` gives it
    assert without.gpu > one.gpu
