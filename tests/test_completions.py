"""GRPO: its loss is TRL's, its bytes those of TRL's own trainer in each phase, its text goes on as it began."""

import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked import run_forked
from safetensors.torch import load_file
from test_plan_files import WIDTH, llama
from test_plan_files import small as small  # a fixture
from transformers import LlamaConfig

from helpers.chapters.c12_two_models.made import QUIET, length_of, prompts, tokenizer
from helpers.chapters.c12_two_models.phases import BACKWARD, LOSS, REFERENCE, ROLLOUT, steps_of
from helpers.chapters.c12_two_models.phases import phases_of as watched
from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.errors import NotSupported, WrongValue
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.depth import with_depth
from virtual_gpu.plan import Recipe, plan_training
from virtual_gpu.plan.alternatives import _longest, _on_gpus
from virtual_gpu.plan.candidates import recipes_of
from virtual_gpu.plan.command import main
from virtual_gpu.plan.files import KINDS
from virtual_gpu.plan.files.settings import lora_config
from virtual_gpu.plan.measure import measure, setting_of
from virtual_gpu.plan.request import make_request
from virtual_gpu.program.runner import run
from virtual_gpu.step import predict, rollout
from virtual_gpu.step.flops import training_flops
from virtual_gpu.step.predict import predict_memory
from virtual_gpu.step.run import train
from virtual_gpu.step.setting import Setting
from virtual_gpu.step.states import states_of
from virtual_gpu.trace.edits import with_phase
from virtual_gpu.trace.timeline import CATEGORIES
from virtual_gpu.trace.tokens import BEFORE, TURN, first_tokens, with_tokens
from virtual_gpu.trace.trace import Trace

SHALLOW = {"model_id": "Qwen/Qwen3-0.6B", "objective": "grpo", "fused_lm_head": True, "padded": True}


def grpo(tokens=60, prompt=100, rows=8, **more):
    """A setting of Qwen3-0.6B."""
    given = {"precision": "autocast_bf16", "peft": "lora"} | SHALLOW | more
    return Setting(2, 2, sequence_length=prompt + tokens, completion_length=tokens, rollout=rows, **given)


# -- the text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens, more", [
    (50, {}),
    (45, {"precision": "mixed_bf16", "peft": None}),
    pytest.param(45, {"peft": "qlora", "rest_in_fp32": False}, marks=pytest.mark.slow),
    pytest.param(61, {"padded": False, "rows": 32}, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_text_goes_on_as_all_of_it_would(tokens, more):
    """To the byte: what is held at most, of what kind, what the allocator reserves, the least card that holds it."""
    config, spec = with_depth(load_config("Qwen/Qwen3-0.6B"), 2), CATALOG["A100-80GB"]
    setting = grpo(tokens, prompt=12, **more)  # the longest cache is the most, not the reading of the prompts
    few = rollout._generated(setting, config, spec, first_tokens(tokens))
    assert few.names.count("token") == first_tokens(tokens) < tokens
    found, full = with_tokens(few, tokens), rollout._generated(setting, config, spec, tokens)
    assert len(few) < len(found) < len(full)
    assert found.timeline().peak_bytes == full.timeline().peak_bytes > few.timeline().peak_bytes
    assert found.timeline().at_peak() == full.timeline().at_peak()
    assert found.reserved_peak() == full.reserved_peak()
    assert found.smallest_capacity(2**20) == full.smallest_capacity(2**20)
    released = found.born[~found.allocates]
    assert len(np.unique(released)) == len(released) and (released < np.flatnonzero(~found.allocates)).all()
    assert np.array_equal(found.nbytes[released], found.nbytes[~found.allocates])


def test_what_was_learned_from_lies_there_until_there_is_more():
    """As TRL keeps `_buffered_inputs` while it generates and scores; and what is zoomed into is a run without these."""
    config, length = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2), 64
    given = {"objective": "grpo", "sequence_length": length, "precision": "mixed_bf16", "fused_lm_head": True}
    setting = Setting(8, model_id=config, rollout=64, padded=True, **given)
    report = predict_memory(setting, gpu="L4")
    phases = report.timeline.phases
    generation, scoring = phases[4:6]
    assert [one.name for one in phases[3:6]] == ["step", "generation", "scoring"]
    ids_and_masks = 64 * length * 2 * 8
    kept = [one.live[0][CATEGORIES.index("activations")] for one in (generation, scoring)]
    assert min(kept) >= ids_and_masks and scoring.total[-1] - scoring.total[0] < 0.1 * ids_and_masks
    for number in (), (5,), (9,):
        with pytest.raises(WrongValue, match="grpo"):
            report.zoom(*number)
    # The highest moment of the training alone is the same one, in a phase of another number.
    report.run_again = partial(predict._detailed, setting, CATALOG["L4"], False, False, ())
    assert report.run_again().trace.timeline().at_peak() == report.at_peak
    with pytest.raises(WrongValue, match="predict_memory"):
        _ = report.zoom(5).details


def test_how_many_tokens_are_run():
    assert [first_tokens(n) for n in (1, 20, 21, 28, 29)] == [1, 20, 21, 20, 21]
    for tokens in range(1, 200):
        few = first_tokens(tokens)
        assert few == tokens or ((tokens - few) % TURN == 0 and 0 <= few - BEFORE - 2 * TURN < TURN)


def test_a_text_that_goes_on_otherwise_is_not_continued():
    config, spec = with_depth(load_config("Qwen/Qwen3-0.6B"), 2), CATALOG["A100-80GB"]
    few = rollout._generated(grpo(52), config, spec, 20)
    assert with_tokens(few, 20) is few and with_tokens(few, 52) is not None
    assert with_tokens(few, 19) is None and with_tokens(few, 25) is None  # not by turns
    assert with_tokens(replace(few, category=np.where(few.span == 2 * 19 + 1, 4, few.category)), 52) is None
    torn = few.born.copy()
    last = np.searchsorted(few.span, 2 * 19 + 1)
    release = last + int(np.flatnonzero(torn[last:] < last)[0])
    torn[release] = 0  # it would give back a parameter
    assert with_tokens(replace(few, born=torn), 52) is None


def test_a_phase_is_put_into_a_trace():
    """Between those that are there, with what lay there before it as it lay; not where it would release any of that."""
    a = Trace(*np.array([[0, 1, 0, 3], [512, 1024, 512, 2048], [0] * 4, [0, 1, 3, 3]]), ("forward", "step"))
    b = Trace(*np.array([[0, 1, 1], [512, 4096, 4096], [3] * 3, [0, 1, 1]]), ("token",))
    both = with_phase(a, 1, "generation", b)
    assert both.names == ("forward", "generation", "step")
    assert both.born.tolist() == [0, 1, 2, 2, 0, 5] and both.span.tolist() == [0, 1, 3, 3, 5, 5]
    assert [phase.peak_bytes for phase in both.timeline().phases] == [1536, 5632, 3072]
    with pytest.raises(ValueError, match="generation"):
        with_phase(a, 1, "generation", replace(b, born=np.array([0, 1, 0])))


def test_a_mask_picks_as_much_as_is_known_of_it():
    gpu = VirtualGPU("T4")
    gpu.answers.chosen = {6: 4}
    with gpu:
        values, mask = torch.ones(2, 3, 8), torch.ones(2, 3, dtype=torch.bool)
        assert values[mask].shape == (4, 8) and torch.ones(2, 3).masked_select(mask).shape == (4,)
        with pytest.raises(NotSupported):
            torch.ones(2, 4)[torch.ones(2, 4, dtype=torch.bool)]


# -- the bytes of TRL's trainer ---------------------------------------------------------------------------------------

PROMPT, COMPLETION = 96, 32
WAYS = [
    (Recipe("lora", "mixed_bf16", "adamw_fused", checkpointing=True), {}),
    (Recipe("full", "mixed_bf16", "adamw_fused"), {}),
    (Recipe("full", "mixed_bf16", "adamw_fused", checkpointing=True), {"beta": 0.1}),
    (Recipe("lora", "mixed_bf16", "adamw_fused"), {"beta": 0.1, "iterations": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("recipe, more", WAYS, ids=["lora", "full", "beta", "iterations"])
def test_each_phase_takes_what_trl_s_takes(recipe, more, tmp_path):
    """GRPOTrainer on the virtual card, phase by phase, by what `torch.cuda` counts there."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    llama(tmp_path / "model")
    request = make_request(
        str(tmp_path / "model"), "L4", length=PROMPT + COMPLETION, completion_length=COMPLETION, batch=16,
        objective="grpo", generations=4, **more,
    )  # fmt: skip
    recipe = replace(recipe, fused_lm_head=True)
    report = predict_memory(setting_of(request, recipe, 2, 8), gpu="L4")
    planned = {}
    for phase in report.timeline.phases:
        planned[phase.name] = max(planned.get(phase.name, 0), phase.peak_bytes)

    def program(found):
        from trl import GRPOConfig, GRPOTrainer

        arguments = GRPOConfig(
            str(tmp_path / "out"), per_device_train_batch_size=2, gradient_accumulation_steps=8, num_generations=4,
            max_completion_length=COMPLETION, max_steps=3, bf16=True, optim="adamw_torch_fused", beta=request.beta,
            num_iterations=request.iterations, gradient_checkpointing=recipe.checkpointing, **QUIET,
        )  # fmt: skip
        lora = recipe.method == "lora"
        dtype = torch.bfloat16 if lora else torch.float32
        model = AutoModelForCausalLM.from_pretrained(request.model, dtype=dtype, device_map={"": 0})
        adapters = LoraConfig(**lora_config(SimpleNamespace(request=request))) if lora else None
        trainer = GRPOTrainer(
            model, length_of, args=arguments, train_dataset=prompts(PROMPT), processing_class=tokenizer(),
            peft_config=adapters,
        )  # fmt: skip
        with watched(trainer, found):
            trainer.train()

    found = steps_of(program, "L4")
    assert found.outcome.died is None
    names = {ROLLOUT: "generation", LOSS: "forward", BACKWARD: "backward"} | ({REFERENCE: "scoring"} if more else {})
    for theirs, ours in names.items():
        assert abs(planned[ours] / found.peaks()[theirs] - 1) < 0.015, theirs


RECIPES = [
    Recipe("full", "mixed_bf16", "adamw_fused"),
    Recipe("full", "mixed_fp16", "adamw_8bit", checkpointing=True),
    Recipe("lora", "mixed_bf16", "adamw_fused", checkpointing=True),
    Recipe("qlora", "mixed_fp16", "adamw_fused", rest_in_fp32=False),
]


def planned(model, recipe, gpu="L4", way=(4, 2), length=128, **more):
    """That recipe as a plan of completions, measured; GRPOTrainer's head is always fused."""
    given = {"completion_length": length // 4, "generations": 4} | more
    request = make_request(str(model), gpu, length=length, batch=way[0] * way[1], objective="grpo", **given)
    return measure(request, replace(recipe, fused_lm_head=True), *way)


def words(folder, prompt, *more):
    """The script's arguments, and its prompts beside it: the longest that it takes, others, and one that is longer."""
    rows = [{"prompt": "b" * n, "answer": "b"} for n in [prompt, prompt - 3, prompt - 5] * 4 + [prompt + 1]]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return ["--prompts", str(folder / "prompts.jsonl"), "--output", str(folder / "out"), *more]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)
def test_the_files_hold_what_the_plan_counted(recipe, tmp_path):
    """Within what DPO's are: on a card TRL's head copies hidden states. Shorter prompts make it a little less."""
    old = "fp16" in recipe.precision  # and grouped heads, which the script repeats there
    llama(tmp_path / "model", **({"num_key_value_heads": 2} if old else {}))
    plan = planned(tmp_path / "model", recipe, "T4" if old else "L4")
    assert plan.request.repeats_kv == old
    plan.save(tmp_path / "plan")
    given = words(tmp_path, 96, "--max-steps", "4")
    report = run(str(tmp_path / "plan" / "train.py"), given, gpu=plan.request.gpu)
    assert report.status == "fits", report.text()
    assert -0.004 < 1 - report.allocated / plan.tensors_bytes < 0.01
    assert max(plan.generation_bytes, plan.training_bytes) == plan.tensors_bytes


@pytest.mark.slow
def test_checkpoints_stay_on_the_cpu_after_the_reference(tmp_path):
    """TRL switches checkpointing off for it, and on again: no checkpoint of what follows lies on the card either."""
    llama(tmp_path / "model", num_hidden_layers=16)
    recipe, held = Recipe("lora", "mixed_bf16", "adamw_fused", checkpointing=True), {}
    for offload in (False, True):
        folder = tmp_path / str(offload)
        planned(tmp_path / "model", replace(recipe, offload=offload), beta=0.1).save(folder)
        report = run(str(folder / "train.py"), words(folder, 96, "--max-steps", "4"), gpu="L4")
        assert report.status == "fits", report.text()
        held[offload] = report.phases["backward"][0]
    assert held[False] - held[True] == 15 * 4 * 128 * WIDTH * 2  # the last block's is there when backward begins


@pytest.mark.slow
@pytest.mark.parametrize("method, more", [("full", {"beta": 0.1}), ("lora", {"iterations": 2})])
def test_the_files_learn_on_a_cpu(method, more, small, tmp_path):
    """Rehearsed, with rewards that differ: the adapters or the weights that are saved moved."""
    recipe = Recipe(method, "fp32" if method == "full" else "mixed_bf16", "adamw_fused", checkpointing=method == "lora")
    planned(small, recipe, length=32, way=(4, 1), **more).save(tmp_path / "plan")
    path = tmp_path / "plan" / "train.py"
    script = path.read_text(encoding="utf-8")
    line = "    return [float(right in text) for text, right in zip(completions, answer)]"
    assert line in script
    path.write_text(script.replace(line, "    return [float(place) for place, _ in enumerate(completions)]"), "utf-8")
    given = words(tmp_path, 24, "--cpu", "--max-steps", "3")
    status, _, err = run_forked([str(path), *given], folder=tmp_path / "plan")
    assert status == 0, err[-2000:]
    [saved] = (tmp_path / "out").glob("*model.safetensors")
    learned = load_file(saved)
    if method == "lora":
        assert any(value.abs().max() > 0 for name, value in learned.items() if "lora_B" in name)
        return
    before = load_file(small / "model.safetensors")
    assert max(float((learned[name] - value).abs().max()) for name, value in before.items()) > 0


# -- settings and numbers ---------------------------------------------------------------------------------------------


def test_what_a_setting_says_of_completions():
    setting = Setting(4, 2, model_id="gpt2", sequence_length=64, objective="grpo", beta=0.04)
    assert (setting.completion_length, setting.rollout, setting.rows) == (32, 8, 4)
    assert {"objective": "grpo", "beta": 0.04, "rollout": 8}.items() <= setting.to_dict().items()
    assert "GRPO" in setting.title and "0.04" in setting.title
    sft = Setting(4, model_id="gpt2", completion_length=7, beta=0.5)
    assert (sft.completion_length, sft.beta, sft.completions) == (0, 0.0, None) and "beta" not in sft.to_dict()
    for wrong, said in (
        ({"completion_length": 64}, "completion_length=64"),
        ({"rollout": 4}, "rollout=4"),
        ({"rollout": 10}, "rollout=10"),
        ({"beta": -1}, "beta"),
        ({"beta": math.nan}, "beta"),
        ({"iterations": 0}, "iterations"),
        ({"holds_outputs": True}, "holds_outputs"),
    ):
        with pytest.raises(WrongValue, match=said):
            Setting(4, 2, model_id="gpt2", sequence_length=64, objective="grpo", **wrong)


def test_a_reference_and_what_was_said_before_are_forwards():
    settings = {"model_id": "meta-llama/Llama-3.2-1B", "sequence_length": 64, "precision": "mixed_bf16"}
    settings |= {"objective": "grpo", "fused_lm_head": True}
    sft, one = states_of(Setting(1, **settings | {"objective": "sft"})), states_of(Setting(1, **settings))
    assert sft == one
    assert states_of(Setting(1, **settings, beta=0.1)) == one | {"parameters": 2 * one["parameters"]}
    once, both = training_flops(Setting(1, **settings)), training_flops(Setting(1, **settings, beta=0.1, iterations=2))
    # Both are made once, for the two steps that learn from them.
    assert both.forward == 2 * once.forward and both.backward == once.backward
    assert training_flops(Setting(1, **settings, beta=0.1)).forward == 2 * once.forward
    whole = training_flops(Setting(1, **settings | {"fused_lm_head": False}))
    assert whole.forward == pytest.approx(once.forward, rel=1e-3) and whole.backward < once.backward
    lengths = [training_flops(Setting(1, **settings, completion_length=n)).forward for n in (8, 16, 24)]
    config = load_config("meta-llama/Llama-3.2-1B")
    head = 2 * 8 * config.hidden_size * config.vocab_size
    assert lengths[1] - lengths[0] == lengths[2] - lengths[1] == head  # the prompt has no logits


def test_a_grpo_config_is_read_from_the_object(tmp_path):
    from trl import GRPOConfig

    given = {"use_cpu": True, "bf16": False, "max_completion_length": 24, "beta": 0.1, "num_iterations": 2}
    arguments = GRPOConfig(str(tmp_path), per_device_train_batch_size=4, steps_per_generation=4, **given)
    setting = Setting.from_training_arguments(arguments, model="gpt2", sequence_length=64)
    assert (setting.objective, setting.completion_length, setting.rollout) == ("grpo", 24, 16)
    assert (setting.beta, setting.iterations, setting.fused_lm_head, setting.padded) == (0.1, 2, True, True)
    arguments.use_vllm = True
    with pytest.raises(NotSupported, match="use_vllm"):
        Setting.from_training_arguments(arguments, model="gpt2", sequence_length=64)
    # On the same completions for several steps, but once each: TRL scores them with the model that made them.
    for steps in (1, 4):
        apart = GRPOConfig(
            str(tmp_path), per_device_train_batch_size=8, gradient_accumulation_steps=2, steps_per_generation=steps,
            **given | {"num_iterations": 1},
        )  # fmt: skip
        with pytest.raises(NotSupported, match=f"steps_per_generation={steps}"):
            Setting.from_training_arguments(apart, model="gpt2", sequence_length=64)


def test_a_real_gpu_is_left_to_trl():
    setting = Setting(2, model_id="gpt2", sequence_length=16, objective="grpo")
    real = SimpleNamespace(is_virtual=False)
    arguments = SimpleNamespace(per_device_train_batch_size=2, max_steps=1, completions=setting.completions)
    sample = dict.fromkeys(("input_ids", "labels"), torch.zeros(16, dtype=torch.int64))
    from virtual_gpu.models.build import build_model

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = build_model(LlamaConfig(vocab_size=32, **sizes), torch.float32, device="cpu")
    with pytest.raises(NotSupported, match="GRPOTrainer"):
        train(model, [sample] * 2, arguments, gpu=real)


# -- the planner ------------------------------------------------------------------------------------------------------


def test_the_planner_searches_completions():
    plans = plan_training(
        "meta-llama/Llama-3.2-1B", "RTX 3090", length=256, batch=16, methods=("full", "lora"), objective="grpo",
        completion_length=64, generations=8, optimizer="adamw_8bit",
    )  # fmt: skip
    assert plans.best and "GRPO" in plans.verdict and "completions" not in plans.request.title
    for plan in plans.plans:
        assert plan.recipe.fused_lm_head and not plan.recipe.stage
        assert setting_of(plan.request, plan.recipe, plan.micro_batch, plan.accumulation).rollout == 16
        # What is generated is generated at once, whatever the micro-batch; what is trained on is not.
        assert max(plan.generation_bytes, plan.training_bytes) == plan.tensors_bytes
    said = dict(plans.skipped)
    assert "use_vllm=True" in said and "steps_per_generation" in said
    found = json.loads(json.dumps(plans.to_dict()))
    assert found["request"] | {"objective": "grpo", "completion_length": 64, "generations": 8} == found["request"]
    assert found["plans"][0]["generation_bytes"] == plans.best.generation_bytes > 0
    lora = next(plan for plan in plans.plans if plan.recipe.method == "lora")
    longer = replace(plans.request, completion_length=128)
    more = measure(longer, lora.recipe, lora.micro_batch, lora.accumulation)
    assert more.seconds > lora.seconds  # a forward for each token
    reference = measure(replace(plans.request, beta=0.1), lora.recipe, lora.micro_batch, lora.accumulation)
    assert reference.flops > 1.2 * lora.flops and reference.seconds > lora.seconds
    # A generation, and what it is scored for, serve all the steps that learn from it: no step takes longer for more.
    twice, often = (
        measure(replace(plans.request, beta=0.1, iterations=n), lora.recipe, lora.micro_batch, lora.accumulation)
        for n in (2, 64)
    )
    assert often.flops < twice.flops == reference.flops and often.seconds < twice.seconds < reference.seconds


def test_several_gpus_generate_each_its_own(tmp_path):
    """Under DDP each GPU its share of the completions, beside the buckets."""
    llama(tmp_path / "model")
    settings = {"length": 64, "objective": "grpo", "generations": 4}
    one, two = (
        make_request(str(tmp_path / "model"), "L4", gpus, batch=8 * gpus, **settings) for gpus in (1, 2)
    )  # fmt: skip
    recipe = Recipe("full", "mixed_bf16", "adamw_fused", fused_lm_head=True)
    alone, beside = (measure(request, recipe, 4, 2) for request in (one, two))
    gradients = alone.at_peak["gradients"]
    assert beside.generation_bytes - alone.generation_bytes == pytest.approx(gradients, rel=0.01)
    assert {recipe.stage for recipe in recipes_of(two)} == {0}
    assert {*beside.files()} == {"train.py", "accelerate.yaml"}


def test_what_could_be_changed_leaves_completions_whole(monkeypatch):
    """More GPUs take a batch in which no prompt's completions part; a shorter length leaves a prompt."""
    given = {"length": 448, "batch": 12, "objective": "grpo", "completion_length": 256, "generations": 6}
    request, asked = make_request("Qwen/Qwen3-0.6B", "T4", **given), []
    assert _on_gpus(request, 8).batch == 24 and _on_gpus(replace(request, generations=0), 8).batch == 16

    def fits(most, one):
        asked.append(setting_of(one, Recipe("lora", "mixed_fp16", "adamw_fused"), 1, 12).sequence_length)
        return one.length <= most

    for most, found in ((330, 320), (300, 0)):
        monkeypatch.setattr("virtual_gpu.plan.alternatives.anything_that_fits", partial(fits, most))
        assert _longest(request) == found
    assert min(asked) == 320


def test_completions_that_cannot_be_planned_get_a_reason(tmp_path):
    llama(tmp_path / "model")
    model = str(tmp_path / "model")
    for wrong, said in (
        ({"batch": 12}, "8, 16"),
        ({"batch": 4}, ": 8$"),
        ({"batch": 12, "generations": 5}, "10, 15"),
        ({"generations": 1}, "generations=1"),
        ({"length": 64, "completion_length": 64}, "completion_length=64"),
        ({"beta": -0.5}, "beta"),
        ({"iterations": 0}, "iterations"),
        ({"objective": "sft", "beta": 0.1}, "beta"),
        ({"objective": "dpo", "generations": 8}, "generations"),
        ({"tensor_parallel": 2, "gpus": 2, "gpu": "L4"}, "GRPO"),
    ):
        with pytest.raises(WrongValue, match=said):
            make_request(model, **{"length": 64, "batch": 16, "objective": "grpo"} | wrong)
    plan = planned(model, Recipe("lora", "mixed_bf16", "adamw_fused"), way=(2, 2), length=32)
    for kind in KINDS:
        if kind != "trl":
            with pytest.raises(NotSupported, match="GRPOTrainer"):
                plan.files(kind)


def test_the_terminal_writes_a_grpo_script(small, tmp_path, capsys):
    given = ["--model", str(small), "--gpu", "L4", "--length", "32", "--batch", "4", "--methods", "lora"]
    given += ["--objective", "grpo", "--completion-length", "8", "--generations", "4", "--language", "en"]
    assert main([*given, "--beta", "0.1", "--save", str(tmp_path / "plan")]) == 0
    out = capsys.readouterr().out
    assert "GRPO (completions of 8, beta 0.1)" in out and "while generating" in out and "use_vllm" in out
    script = (tmp_path / "plan" / "train.py").read_text(encoding="utf-8")
    for line in ("GRPOConfig(", "COMPLETION = 8", "num_generations=4", "beta=0.1", "# completions that a GPU takes"):
        assert line in script
    assert "max_length" not in script and "num_iterations" not in script
    assert main([*given, "--batch", "6"]) == 2
    assert "4, 8" in capsys.readouterr().err
