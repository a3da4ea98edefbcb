"""An activation budget: each choice is the run that keeps it, to the entry; no choice lies below the bound."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from transformers import GPT2Config, GPTNeoXConfig, Lfm2Config, LlamaConfig

from helpers.models import byte_tokenizer
from virtual_gpu import activation_budget
from virtual_gpu.cards import CATALOG
from virtual_gpu.errors import NotSupported, WrongValue
from virtual_gpu.language import set_language
from virtual_gpu.models.configs import load_config, model_name
from virtual_gpu.models.kept import moves
from virtual_gpu.plan import Recipe
from virtual_gpu.plan.command import main
from virtual_gpu.plan.keeping import curve_of, keep_what_fits
from virtual_gpu.plan.measure import measure
from virtual_gpu.plan.plans import Plan
from virtual_gpu.plan.request import make_request
from virtual_gpu.plan.search import Plans
from virtual_gpu.step.budget import budget_of, flops_while_moving
from virtual_gpu.step.predict import predicted_run
from virtual_gpu.step.setting import Setting

SIZES = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 512}
LLAMA = LlamaConfig(vocab_size=300, num_key_value_heads=2, max_position_embeddings=16384, **SIZES)
NEOX = GPTNeoXConfig(vocab_size=300, max_position_embeddings=512, **SIZES)
GPT2 = GPT2Config(vocab_size=300, n_embd=128, n_layer=6, n_head=4, n_positions=512)
LFM2 = Lfm2Config(vocab_size=300, num_key_value_heads=2, max_position_embeddings=512, full_attn_idxs=[1, 4], **SIZES)


def setting(config=LLAMA, **more):
    given = {"peft": "lora", "precision": "autocast_bf16", "optimizer": "adamw_fused", "sequence_length": 512}
    return Setting(**{"batch_size": 2, "model_id": model_name(config)} | given | more)


# -- an edit is a run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, more, choices",
    [
        (LLAMA, {}, [(), ("attention:2", "128x512"), ("attention@cpu", "128x512@cpu:5", "128x512:3")]),
        (LLAMA, {"peft": None, "precision": "mixed_bf16"}, [("attention", "128x64", "128x128", "128x512")]),
        (LLAMA, {"peft": "qlora", "gradient_accumulation_steps": 6}, [("128x512:2", "attention@cpu")]),
        (
            LLAMA,
            {"offload_checkpoints": True, "gradient_checkpointing": True},
            [("attention:2", "attention@cpu", "128x128")],
        ),
        (NEOX, {"peft": None, "precision": "bf16"}, [("attention:4", "128x384:1", "128x128@cpu")]),
        (GPT2, {"fused_lm_head": True}, [("128x384", "128x512:2")]),  # with dropout; attention is computed again
        (LFM2, {}, [("attention",), ("attention@cpu", "128x512")]),  # two of six blocks have it
    ],
    ids=["LoRA", "full", "QLoRA", "offloaded", "NeoX", "GPT-2", "LFM2"],
)
def test_a_choice_is_the_run_that_keeps_it(config, more, choices):
    """Every allocation and release, in their order."""
    one, spec = setting(config, **more), CATALOG["L4"]
    budget = budget_of(one, spec)
    for kept in choices:
        run = predicted_run(
            replace(one, gradient_checkpointing=True, kept_results=kept), load_config(one.model_id), spec
        )
        found, trace = budget.trace(kept), run.trace
        for column in ("born", "nbytes", "category", "span", "stream"):
            assert np.array_equal(getattr(found, column), getattr(trace, column)), (kept, column)


def test_what_a_block_does_not_compute_again_is_not_to_be_kept():
    """Its last product, and here every other has its sizes: a name would keep it too."""
    budget = budget_of(setting(replace_sizes(LLAMA, intermediate_size=128)), CATALOG["L4"])
    assert {result.name for result in budget.results} == {"attention", "128x64"}


def test_so_it_is_under_ddp():
    budget = budget_of(setting(peft=None, precision="bf16"), CATALOG["L4"], ddp=True)
    alone = budget_of(setting(peft=None, precision="bf16"), CATALOG["L4"])
    for kept in ((), ("attention:4", "128x512:2")):
        run = budget.measure(kept)
        assert budget.trace(kept).peak_bytes == run.peak_bytes > alone.trace(kept).peak_bytes
        assert budget.needed(kept) == run.needed_bytes


@pytest.mark.parametrize(
    "config, recipe, accumulation",
    [
        (LLAMA, Recipe("full", "mixed_bf16", "adamw_fused", 3, True), 1),
        (NEOX, Recipe("full", "bf16", "adamw_fused", 2, True, fused_lm_head=True), 2),
        (LLAMA, Recipe("full", "mixed_bf16", "adamw_fused", 3, True, replicas=2), 1),
        (LLAMA, Recipe("qlora", "mixed_bf16", "adamw_fused", 3, True, offload=True), 2),
    ],
    ids=["ZeRO-3", "ZeRO-2", "HSDP", "QLoRA"],
)
def test_so_it_is_of_shards(config, recipe, accumulation):
    """Every allocation and release of a rank, FSDP2's own between them."""
    gpus = 2 * recipe.replicas
    request = make_request(config, "L4", gpus, length=512, batch=2 * gpus * accumulation, methods=(recipe.method,))
    plan = Plan(request, recipe, 2, accumulation, 0, {}, 0, 0, 0, None)
    budget = curve_of(plan, measured=2)
    *_, last = [result.name for result in budget.results]
    for kept in (("attention:4", last), ("attention@cpu", f"{last}:2", f"{last}@cpu")):
        found, run = budget.trace(kept), budget.measure(kept)
        assert (found.peak_bytes, budget.needed(kept)) == (run.peak_bytes, run.needed_bytes), kept
    assert budget.distance_bytes == 0 and len(budget.measured) == 4
    assert measure(request, replace(recipe, kept=(last,)), 2, accumulation).needed_bytes == budget.needed((last,))


def test_the_points_are_what_is_measured():
    """Bytes of the peak and of the card, FLOPs, and what goes to the CPU."""
    config = replace_sizes(LLAMA, hidden_size=256)
    budget = activation_budget(config, gpu="L4", peft="lora", precision="autocast_bf16", sequence_length=8192,
                               optimizer="adamw_fused", measured=3)  # fmt: skip
    assert len(budget.measured) == 3 and budget.distance_bytes == 0
    peaks, works = ([getattr(one, name) for one in budget.points] for name in ("peak_bytes", "extra_work"))
    assert peaks == sorted(set(peaks)) and works == sorted(set(works), reverse=True)
    for point in budget.points:
        if run := budget.measured.get(point.kept):
            assert (run.peak_bytes, run.extra_flops) == (point.peak_bytes, point.extra_flops)
            assert run.needed_bytes == budget.needed(point.kept) >= run.peak_bytes
    first = budget.points[0]
    sent = predicted_run(
        replace(budget.setting, kept_results=first.kept), load_config(budget.setting.model_id), budget.spec
    ).offloaded.nbytes(8192)
    # Two numbers of a generator, 512 bytes each for the allocator, go with each attention.
    assert moves(first.kept) and 0 <= first.sent_bytes - sent <= 6 * 2 * 512


def replace_sizes(config, **sizes):
    return type(config)(**config.to_dict() | {"layer_types": None} | sizes)


# -- no choice lies below --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peft, length", [("lora", 8192), (None, 512)])
def test_no_choice_lies_below_the_bound(peft, length):
    """Choices at random, of any blocks, on the card or on the CPU."""
    precision = "autocast_bf16" if peft else "mixed_bf16"
    spec = CATALOG["L4"]
    one = setting(sequence_length=length, peft=peft, precision=precision, batch_size=1)
    moving = flops_while_moving(spec, one.precision)
    budget, drawn = budget_of(one, spec, moving), np.random.default_rng(0)
    twice, live, places, close = budget.twice, budget.twice.live(), 0, math.inf
    for _ in range(400):
        kept = np.zeros(len(twice.name), dtype=bool)
        moved, work = kept.copy(), float(budget.points[-1].extra_work)  # what no choice saves
        share = drawn.random(len(budget.results))
        for result, part in zip(budget.results, share, strict=True):
            for block in range(6):
                rows = (twice.name == twice.names.index(result.name)) & (twice.block == block)
                if drawn.random() < part:
                    kept |= rows
                elif drawn.random() < part:
                    moved |= rows
                    work += result.moving / 6
                else:
                    work += result.flops / 6
        peak = int((live + twice.change(kept, moved)).max())
        assert work >= budget.bound(peak) * (1 - 1e-9)
        close = min(close, work - budget.bound(peak))
        places += kept.any()
    assert places > 300
    assert max(map(budget.beyond_best, budget.points)) < 0.02  # the curve lies beside it
    assert budget.bound(budget.points[0].peak_bytes - 1) >= budget.points[0].bound
    assert budget.bound(0) == math.inf


# -- the CPU ---------------------------------------------------------------------------------------------------------


def test_a_result_goes_to_the_cpu_where_that_takes_less():
    """By the rates: of a long text attention, whose FLOPs for a byte are twice the length; of a short one nothing."""
    spec = CATALOG["A100-80GB"]
    even = flops_while_moving(spec, "autocast_fp16")
    assert even == pytest.approx(2 * spec.fp16_tflops * 1e12 / spec.link_bytes_per_s)
    for length, goes in ((1024, False), (16384, True)):
        one = setting(sequence_length=length, precision="autocast_fp16", batch_size=1)
        budget = budget_of(one, spec, even)
        assert ("attention@cpu" in {name for point in budget.points for name in point.kept}) == goes
        (attention,) = (result for result in budget.results if result.name == "attention")
        assert (attention.flops / attention.nbytes > even) == goes
        alone = budget_of(one, spec)
        assert not any(moves(point.kept) for point in alone.points)
        assert all(point.sent_bytes == 0 or moves(point.kept) for point in budget.points)


@pytest.mark.slow
def test_the_planner_sends_what_has_no_room():
    """Many blocks of a long text: attention's results are as many bytes as the checkpoints, and some fit."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=1024, num_hidden_layers=48, num_attention_heads=8, num_key_value_heads=2,
        intermediate_size=2048, max_position_embeddings=65536,
    )  # fmt: skip
    request = make_request(config, "RTX 4070", length=65536, batch=1, methods=("lora",))
    recipe = Recipe("lora", "mixed_bf16", "adamw_fused", checkpointing=True)
    bare, kept = measure(request, recipe, 1, 1), keep_what_fits(request, recipe)
    assert kept.fits and moves(kept.recipe.kept) and kept.offloaded_bytes > 2**30
    assert bare.needed_bytes < kept.needed_bytes and kept.seconds < bare.seconds and kept.beyond_best < 0.02


# -- asked and shown -------------------------------------------------------------------------------------------------


def test_it_is_shown():
    budget = activation_budget(LLAMA, gpu="L4", sequence_length=256, peft="lora", precision="autocast_bf16", measured=2)
    rows = budget.to_frame()
    assert len(rows) == len(budget.points) and rows["measured_peak_bytes"].notna().sum() == 2
    assert json.loads(json.dumps(budget.to_dict()))["points"][-1]["kept"] == list(budget.points[-1].kept)
    names = [point.kept for point in budget.corners]
    assert names[0] == budget.points[0].kept and names[-1] == budget.points[-1].kept and len(names) == len(set(names))
    svg = budget.chart().svg()
    assert svg.count("<circle") == 2 + len(names) and "attention" in svg
    assert "선형 완화" in repr(budget) and "실행해 잰 최대" in budget._repr_html_()
    budget.measure([budget.results[-1].name])  # on no point of the curve, where what saves most is kept first
    assert len(budget.measured) == 3 and budget.distance_bytes == 0 and "예측과 꼭 같다" in repr(budget)
    set_language("en")
    assert "linear relaxation" in repr(budget) and "peak of a run" in budget._repr_html_()
    assert "exactly as predicted" in repr(budget)
    kept, run = next(iter(budget.measured.items()))
    budget.measured[kept] = replace(run, peak_bytes=run.peak_bytes + 5)
    assert "off the prediction by 5 bytes" in repr(budget)


@pytest.mark.slow
def test_the_command_draws_it(tmp_path, capsys):
    LLAMA.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    asked = ["--model", str(tmp_path), "--length", "32", "--batch", "2", "--methods", "lora", "--language", "en"]
    assert main([*asked, "--budget", str(tmp_path / "curve.svg")]) == 0
    assert "<svg" in (tmp_path / "curve.svg").read_text(encoding="utf-8")
    assert "linear relaxation" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["--objective dpo", "--objective grpo", "--optimizer rmsprop"])
def test_what_no_curve_is_of_is_said_before_the_search(wrong, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("virtual_gpu.plan.command.plan_training", lambda *_, **__: pytest.fail("searched"))
    assert main(["--model", "gpt2", "--budget", str(tmp_path / "curve.svg"), *wrong.split()]) == 2
    assert f"{wrong.split()[1]!r}: 블록이" in capsys.readouterr().err


def test_a_plan_without_a_curve_is_saved_all_the_same(tmp_path, capsys, monkeypatch):
    request = make_request("gpt2", "2 x L4", length=16, batch=2, methods=("full",), cpu_offload=True)
    split = measure(request, Recipe("full", "bf16", "adamw_fused", stage=3, cpu_offload=True), 1, 1)
    monkeypatch.setattr("virtual_gpu.plan.command.plan_training", lambda *_, **__: Plans(request, [split], [], {}))
    folder, curve = tmp_path / "plan", tmp_path / "curve.svg"
    assert main(["--model", "gpt2", "--save", str(folder), "--budget", str(curve)]) == 2
    assert "--budget: 들어가는 계획이 모두" in capsys.readouterr().err
    assert (folder / "train.py").is_file() and not curve.exists()


def test_what_is_kept_fits_the_ram_too():
    recipe = Recipe("lora", "mixed_bf16", "adamw_fused", checkpointing=True, offload=True)
    for host, kept in ((None, True), ("256MiB", False)):  # less than a process and the checkpoints take
        request = make_request(LLAMA, "L4", length=8192, batch=1, methods=("lora",), host=host)
        assert bool(keep_what_fits(request, recipe)) == kept


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(NotSupported, match="dpo"):
        activation_budget(LLAMA, objective="dpo", peft="lora")
    with pytest.raises(WrongValue, match="measured"):
        activation_budget(LLAMA, measured=0)
    with pytest.raises(WrongValue, match="moves"):
        activation_budget(LLAMA, moves="yes")
    request = make_request(LLAMA, "2 x L4", length=32, batch=2, methods=("full",), cpu_offload=True)
    for more in ({"tensor_parallel": 2}, {"cpu_offload": True}, {"context_parallel": 2}):
        recipe = Recipe("full", "bf16", "adamw_fused", 3, True, **more)
        with pytest.raises(NotSupported, match="함께 실행해 보지 않았다"):
            curve_of(Plan(request, recipe, 1, 1, 0, {}, 0, 0, 0, None))
