"""Layers spread over the cards of one process: what each takes from shallow runs, and the files that train so."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from transformers import Gemma3Config

from helpers.models import byte_tokenizer
from virtual_gpu.errors import NotSupported, WrongValue
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.depth import with_depth
from virtual_gpu.models.spread import device_map
from virtual_gpu.plan import spread
from virtual_gpu.plan.alternatives import CHANGED, Change, _lean, anything_that_fits
from virtual_gpu.plan.candidates import recipes_of
from virtual_gpu.plan.host import host_need
from virtual_gpu.plan.keeping import curve_of
from virtual_gpu.plan.measure import measure, setting_of
from virtual_gpu.plan.plans import Plan
from virtual_gpu.plan.recipes import Recipe
from virtual_gpu.plan.request import make_request
from virtual_gpu.plan.search import plan_training
from virtual_gpu.program.runner import run

MODEL = "Qwen/Qwen2.5-0.5B"  # tied: the head lies beside the embedding, on the first card
LORA = Recipe("lora", "mixed_fp16", "adamw_fused", spread=True)


def request(model=MODEL, gpus=2, **more):
    return make_request(model, "T4", gpus, length=128, batch=4, methods=("lora", "qlora"), device_map=True, **more)


@pytest.mark.parametrize(
    "model, last",
    [(MODEL, "model.norm"), ("meta-llama/Llama-3.1-8B", "lm_head"), ("EleutherAI/polyglot-ko-1.3b", "lm_head")],
)
def test_every_part_has_a_card(model, last):
    config = load_config(model)
    number = config.num_hidden_layers
    places = device_map(config, (5, number - 5))
    blocks = [name for name in places if name.rpartition(".")[2].isdigit()]
    assert [places[name] for name in blocks] == [0] * 5 + [1] * (number - 5)
    assert places[last] == 1 and next(iter(places.values())) == 0
    with pytest.raises(NotSupported, match="device_map"):
        device_map(config, (5, 5))


@pytest.mark.slow
def test_a_card_s_trace_is_that_of_a_run_with_all_its_layers():
    recipe = replace(LORA, checkpointing=True)
    setting, config = setting_of(request(), recipe, 2, 2), with_depth(load_config(MODEL), 11)
    short, long, whole = (spread._run(setting, config, dealt, (7, 5)) for dealt in ((2, 2), (4, 4), (4, 7)))
    for one, other, full, more in zip(short.traces, long.traces, whole.traces, (2, 5), strict=True):
        deep = spread._deepened(one, other, more)
        for name in ("born", "nbytes", "category", "span"):
            assert np.array_equal(getattr(deep, name), getattr(full, name)), name
    sent = [a + (b - a) * more // 2 for a, b, more in zip(short.sent, long.sent, (2, 5), strict=True)]
    assert sent == whole.sent
    assert min(sent) > 2 * 2 * setting.sequence_length * config.hidden_size  # of two samples, in 16 bits at least


@pytest.mark.slow
def test_what_is_not_proven_is_run():
    """Without checkpointing the first card's releases have no order that two shallow runs show."""
    setting, config = setting_of(request(), LORA, 2, 2), with_depth(load_config(MODEL), 11)
    short, long = (spread._run(setting, config, dealt, (7, 5)) for dealt in ((2, 2), (4, 4)))
    assert spread._deepened(short.traces[0], long.traces[0], 2) is None


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_the_files_take_what_is_planned(method, tmp_path):
    """The Trainer's script on two virtual cards: each card's tensors."""
    asked = make_request(MODEL, "T4", 2, length=128, batch=4, methods=(method,), device_map=True)
    recipe = Recipe(method, "mixed_fp16", "adamw_fused", spread=True, checkpointing=method == "qlora")
    plan = measure(asked, recipe, 2, 2)
    need = spread.spread_need(setting_of(plan.request, recipe, 2, 2), 2, (7, 5))
    assert sum(plan.layers) == 24 and min(plan.layers) >= 2 and f"{plan.layers[0]} + {plan.layers[1]}" in plan.title
    assert plan.needed_bytes == max(card.card for card in need.cards) and host_need(plan).processes == 1
    plan.save(tmp_path / "plan")
    places = json.loads((tmp_path / "plan" / "device_map.json").read_text())
    assert sum(card == 0 for name, card in places.items() if "layers" in name) == plan.layers[0]
    assert not (tmp_path / "plan" / "accelerate.yaml").exists()
    byte_tokenizer().save_pretrained(tmp_path / "model")
    load_config(MODEL).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("가나다라 " * 1000)
    words = ("--text", tmp_path / "text.txt", "--model", tmp_path / "model", "--output", tmp_path / "out")
    report = run(str(tmp_path / "plan" / "train.py"), [*map(str, words)], gpu="T4", visible_gpus=2)
    assert report.status == "fits", report.error
    taken = [report.allocated, report.other_cards[0]["allocated"]]
    assert taken == pytest.approx([card.tensors for card in need.cards], rel=0.02)
    with pytest.raises(NotSupported, match="trainer"):
        plan.files("torch")


@pytest.mark.slow
def test_the_search_spreads_what_does_not_fit_whole():
    found = plan_training(MODEL, "1.6GiB, 7.5", 2, length=128, batch=4, methods=("lora",), device_map=True)
    spreads = [plan for plan in found.plans if plan.recipe.spread]
    assert spreads and all(plan.micro_batch * plan.accumulation == 4 for plan in spreads)
    assert all("device_map" in plan.title and "DDP" not in plan.title for plan in spreads)
    assert spreads[0].to_dict()["layers"] == list(spreads[0].layers)
    again = asdict(spreads[0].request)
    only = plan_training(again.pop("model"), again.pop("gpu"), again.pop("gpus"), **again)
    assert [plan.title for plan in only.plans] == [plan.title for plan in spreads]
    whole = plan_training(MODEL, "T4", 2, length=128, batch=4, methods=("lora",), device_map=True)
    assert not any(plan.recipe.spread for plan in whole.plans)
    assert any("device_map" in what for what, _ in whole.skipped)
    without = plan_training(MODEL, "1.6GiB, 7.5", 2, length=128, batch=4, methods=("lora",))
    assert [plan.title for plan in without.plans] == [plan.title for plan in found.plans if not plan.recipe.spread]


@pytest.mark.slow
def test_what_could_be_changed_goes_by_the_cards_own_room():
    """One process needs no room for NCCL, which is more than this card has."""
    asked = make_request(MODEL, "1.6GiB, 7.5", 2, length=128, batch=4, methods=("lora",), device_map=True)
    assert asked.limit_bytes < 0 < asked.of(LORA).limit_bytes
    found = anything_that_fits(asked)
    assert found.recipe.spread and not found.recipe.offload
    back = asked.of(LORA).of(replace(LORA, spread=False))
    assert asked.of(LORA).device_map == "only" and back.device_map is True
    assert (back.per_gpu, back.limit_bytes) == (asked.per_gpu, asked.limit_bytes) and asked.of(LORA).per_gpu == 4
    with pytest.raises(NotSupported):
        measure(asked, replace(LORA, checkpointing=True, offload=True), 1, 4)
    with pytest.raises(NotSupported):
        curve_of(found)


def test_files_name_the_parts_of_the_model_that_is_loaded():
    """google/gemma-3-4b-pt on the hub sees images too: its layers are in another place than the text model's."""
    asked = make_request("google/gemma-3-4b-pt", "T4", 2, length=128, batch=4, methods=("lora",), device_map=True)
    plan = Plan(asked.of(LORA), LORA, 1, 4, 1, {}, 1, 1, 0, None, layers=(17, 17))
    with pytest.raises(NotSupported, match=r"device_map\.json"):
        plan.files("trainer")


def test_the_layers_are_the_list_of_so_many():
    """A tower of images may be deeper."""
    config = Gemma3Config(
        text_config={"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2},
        vision_config={"num_hidden_layers": 6, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2},
    )
    places = device_map(config.text_config, (2, 2))
    assert [places[f"model.layers.{number}"] for number in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"gpus": 1}, "2"),
        ({"gpus": 16}, "16"),
        ({"objective": "dpo"}, "DPO"),
        ({"optimizer": "adafactor"}, "adamw_8bit"),
        ({"device_map": 1}, "device_map"),
        ({"replicas": 2}, "device_map"),
    ],
    ids=str,
)
def test_what_is_not_spread_is_refused(wrong, said):
    given = {"gpus": 2, "length": 128, "batch": 16, "device_map": True} | wrong
    with pytest.raises(WrongValue, match=said):
        make_request(MODEL, "T4", **given)


def test_spread_layers_are_proposed_where_nothing_fits():
    """Shards do not, beside NCCL's buffers, which cards of one process have not."""
    asked = make_request("meta-llama/Llama-3.2-1B", "3GiB, 7.5", 2, methods="lora", length=128, batch=2)
    assert not any(_lean(asked, replace(one, checkpointing=True)) for one in recipes_of(asked) if one.stage)
    (changed,) = CHANGED["device_map"](asked)
    assert changed.device_map is True
    plan = anything_that_fits(replace(changed, device_map="only"))
    assert plan.recipe.spread and plan.fits
    assert "--device-map" in str(Change("device_map", True, plan))
    assert not [*CHANGED["device_map"](replace(asked, gpus=1))]
