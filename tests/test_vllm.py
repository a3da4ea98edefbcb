"""vLLM beside GRPO: what its logs say of weights and cache, TRL's trainer with an engine, plans that leave it room."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_completions import COMPLETION, PROMPT, words
from test_plan_files import llama
from test_plan_files import small as small  # a fixture
from transformers import Gemma3Config

from helpers.chapters.c12_two_models.made import QUIET, length_of, prompts, tokenizer
from helpers.chapters.c12_two_models.phases import BACKWARD, LOSS, REFERENCE, ROLLOUT, steps_of
from helpers.chapters.c12_two_models.phases import phases_of as watched
from virtual_gpu.errors import NotSupported, WrongValue
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.kv_cache import kv_bytes
from virtual_gpu.plan import Recipe, plan_training
from virtual_gpu.plan.command import main
from virtual_gpu.plan.engine import ASLEEP, AWAKE, BESIDE, GRAPHS, MOST_ROWS, TOKENS, _weights
from virtual_gpu.plan.files.settings import lora_config
from virtual_gpu.plan.measure import held, measure, setting_of
from virtual_gpu.plan.request import make_request
from virtual_gpu.program.runner import run
from virtual_gpu.step.predict import predict_memory, predict_need
from virtual_gpu.trace.edits import with_ddp, with_phase
from virtual_gpu.trace.trace import Trace
from virtual_gpu.units import GiB

LOGS = json.loads((Path(__file__).parents[1] / "benchmarks" / "engines.json").read_text(encoding="utf-8"))
# A log's model → the catalogue's, of those whose weights it prints in 16 bits and without room for adapters.
KNOWN = {
    "Qwen3-0.6B": "Qwen/Qwen3-0.6B", "Qwen3-1.7B": "Qwen/Qwen3-1.7B", "Qwen3-4B": "Qwen/Qwen3-4B",
    "Qwen3-8B": "Qwen/Qwen3-8B", "Qwen3-14B": "Qwen/Qwen3-14B", "Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    "Qwen2.5-7B-Instruct": "Qwen/Qwen2.5-7B",
}  # fmt: skip


def beside(log):
    """GiB of an engine's share that are neither its weights nor its cache."""
    if "consumed_gib" in log:  # weights, and all that is outside PyTorch's allocator
        return log["consumed_gib"] + log["activation_gib"] - log["weights_gib"]
    if "non_torch_gib" in log:
        return log["activation_gib"] + log["non_torch_gib"]
    return log["share"] * log["total_gib"] - log["cache_gib"] - log["weights_gib"]


def test_weights_are_what_logs_print():
    """To 1 %: vLLM measures what the card's free memory lost, in pieces of 2 MiB."""
    found = {log["model"]: log["weights_gib"] for log in LOGS if log["model"] in KNOWN and log["weights"] == "bf16"}
    assert {*found} == {*KNOWN}
    for name, printed in found.items():
        assert _weights(KNOWN[name]) / GiB == pytest.approx(printed, rel=0.01, abs=0.03), name


def test_a_token_of_the_cache_is_what_logs_print():
    """The tokens that a log prints take the GiB that it prints: to the last digit, and the rest of a block."""
    models = KNOWN | {"Qwen3-8B-FP8": "Qwen/Qwen3-8B", "Qwen3-4B-Base": "Qwen/Qwen3-4B"}
    models |= {"Llama-3.2-1B-Instruct-FP8-Block": "meta-llama/Llama-3.2-1B", "Qwen3-4B + LoRA": "Qwen/Qwen3-4B"}
    found = [log for log in LOGS if "cache_tokens" in log and log["model"] in models]
    assert len(found) > 8
    for log in found:
        token = kv_bytes(load_config(models[log["model"]]), 1)
        left = log["cache_gib"] - token * log["cache_tokens"] / GiB
        assert -0.005 <= left <= 0.005 + TOKENS * token / GiB, log


def test_what_is_beside_them_is_the_range_of_all_logs():
    """But of those before 0.17 that do not say how large the forward pass was."""
    told = [log for log in LOGS if "rows" in log or tuple(map(int, log["vllm"].split(".")[:2])) >= (0, 17)]
    assert len(told) == 23 and len({log["card"] for log in told}) == 5
    sizes, graphs = [beside(log) for log in told], [log["graphs_gib"] for log in told if "graphs_gib" in log]
    assert min(sizes) == pytest.approx(BESIDE.low / GiB, abs=0.01)
    assert max(sizes) == pytest.approx(BESIDE.high / GiB, abs=0.01)
    assert len(graphs) == 19 and max(graphs) == pytest.approx(GRAPHS.high / GiB, abs=0.01)
    assert GRAPHS.low == 0 < min(graphs)  # since 0.20 they may be in the share
    assert max(log["rows"] for log in told if "rows" in log) == MOST_ROWS


# -- TRL's trainer ----------------------------------------------------------------------------------------------------


def trainer_of(folder, request, recipe, **engine):
    """GRPOTrainer as a program makes it, with an engine."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        str(folder / "out"), per_device_train_batch_size=2, gradient_accumulation_steps=8, num_generations=4,
        max_completion_length=COMPLETION, max_steps=3, bf16=True, optim="adamw_torch_fused", beta=request.beta,
        gradient_checkpointing=recipe.checkpointing, use_vllm=True, **engine, **QUIET,
    )  # fmt: skip
    lora = recipe.method == "lora"
    dtype = torch.bfloat16 if lora else torch.float32
    model = AutoModelForCausalLM.from_pretrained(str(folder / "model"), dtype=dtype, device_map={"": 0})
    adapters = LoraConfig(**lora_config(SimpleNamespace(request=request))) if lora else None
    return GRPOTrainer(
        model, length_of, args=arguments, train_dataset=prompts(PROMPT), processing_class=tokenizer(),
        peft_config=adapters,
    )  # fmt: skip


SHARE = 0.25
WAYS = [
    (Recipe("lora", "mixed_bf16", "adamw_fused", checkpointing=True), {}),
    (Recipe("full", "mixed_bf16", "adamw_fused"), {}),
    (Recipe("full", "mixed_bf16", "adamw_fused", checkpointing=True), {"beta": 0.1}),
]


@pytest.mark.slow
@pytest.mark.parametrize("recipe, more", WAYS, ids=["lora", "full", "beta"])
@pytest.mark.parametrize("vllm", [AWAKE, ASLEEP])
def test_each_phase_takes_what_trl_s_takes(recipe, more, vllm, tmp_path):
    """An engine adds its share where it is awake; of the rest each phase is as counted."""
    llama(tmp_path / "model")
    request = make_request(
        str(tmp_path / "model"), "L4", length=PROMPT + COMPLETION, completion_length=COMPLETION, batch=16,
        objective="grpo", generations=4, vllm=AWAKE, **more,
    )  # fmt: skip
    setting, planned = setting_of(request, replace(recipe, fused_lm_head=True, vllm=vllm), 2, 8), {}
    for phase in predict_memory(setting, gpu="L4").timeline.phases:
        planned[phase.name] = max(planned.get(phase.name, 0), phase.peak_bytes)
    engine, shares = {"vllm_gpu_memory_utilization": SHARE, "vllm_enable_sleep_mode": vllm == ASLEEP}, []

    def program(found):
        trainer = trainer_of(tmp_path, request, recipe, **engine)
        shares.append(int(torch.cuda.mem_get_info()[1] * SHARE))
        with watched(trainer, found):
            trainer.train()

    before = dict(os.environ)
    found = steps_of(program, "L4")
    assert found.outcome.died is None, found.outcome
    # TRL says to the process that it is rank 0 of 1, which is not for the next program.
    assert {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")} == {
        name: before.get(name) for name in ("RANK", "WORLD_SIZE")
    }
    peaks, [share] = found.peaks(), shares
    for theirs, ours in {REFERENCE: "scoring", LOSS: "forward", BACKWARD: "backward"}.items():
        beside_it = share if vllm == AWAKE else 0
        assert abs((peaks[theirs] - beside_it) / planned[ours] - 1) < 0.015, theirs
    # What the model does is to hand its weights over.
    assert abs((peaks[ROLLOUT] - share) / planned["generation"] - 1) < 0.015
    if vllm == ASLEEP:  # what the allocator could not give back before the engine woke, to a segment
        left = [phase.reserved for phase in found.phases if phase.name == ROLLOUT]
        assert abs(left[1] - predict_need(setting, (8, 9)).rollout) < 20 * 2**20


# -- plans ------------------------------------------------------------------------------------------------------------


def planned(model, recipe, vllm, gpu="L4", way=(4, 2), length=128, **more):
    """That recipe as a plan, measured, with completions of an engine's."""
    given = {"completion_length": length // 4, "generations": 4, "vllm": AWAKE} | more
    request = make_request(str(model), gpu, length=length, batch=way[0] * way[1], objective="grpo", **given)
    return measure(request, replace(recipe, fused_lm_head=True, vllm=vllm), *way)


@pytest.mark.slow
@pytest.mark.parametrize("vllm", [AWAKE, ASLEEP])
def test_the_files_hold_what_the_plan_counted(vllm, tmp_path):
    """The engine's block is its share, which the plan writes; the rest is as GRPO's without an engine is held."""
    llama(tmp_path / "model")
    recipe = Recipe("lora" if vllm == ASLEEP else "full", "mixed_bf16", "adamw_fused")
    plan = planned(tmp_path / "model", recipe, vllm)
    plan.save(tmp_path / "plan")
    script = (tmp_path / "plan" / "train.py").read_text(encoding="utf-8")
    report = run(str(tmp_path / "plan" / "train.py"), words(tmp_path, 96, "--max-steps", "4"), gpu="L4")
    assert report.status == "fits", report.text()
    assert any("vLLM" in note for note in report.notes)
    share = plan.engine.share(plan.request)
    assert f"vllm_gpu_memory_utilization={share}" in script and "vllm_max_model_length=LENGTH" in script
    counted, taken = plan.training_bytes, int(plan.request.spec.memory_bytes * share)
    counted = counted + taken if vllm == AWAKE else max(counted, plan.generation_bytes + taken)
    assert -0.004 < 1 - report.allocated / counted < 0.01


@pytest.mark.slow
def test_a_rehearsal_has_no_engine(small, tmp_path):
    from forked import run_forked

    recipe = Recipe("lora", "mixed_bf16", "adamw_fused", checkpointing=True)
    planned(small, recipe, AWAKE, length=32, way=(4, 1)).save(tmp_path / "plan")
    given = words(tmp_path, 24, "--cpu", "--max-steps", "2")
    status, _, err = run_forked([str(tmp_path / "plan" / "train.py"), *given], folder=tmp_path / "plan")
    assert status == 0, err[-2000:]


def test_an_engine_is_weights_and_the_completions_of_a_prompt(tmp_path):
    """So much at least, whatever the micro-batch; the share to write is what is left, and says how many it holds."""
    recipe = Recipe("lora", "mixed_bf16", "adamw_fused", checkpointing=True, fused_lm_head=True, vllm=AWAKE)
    given = {"length": 2048, "completion_length": 1024, "generations": 8, "objective": "grpo", "vllm": AWAKE}
    for batch, whole in ((16, True), (128, False)):
        request = make_request("Qwen/Qwen3-1.7B", "RTX 4090", batch=batch, **given)
        plan = measure(request, recipe, 1, batch)
        engine, memory = plan.engine, request.spec.memory_bytes
        assert engine.weights == _weights(request.model) and engine.rows == batch and plan.fits
        assert engine.text == kv_bytes(load_config(request.model), 2048 + TOKENS) and engine.cache == 8 * engine.text
        assert plan.at_peak["engine"] == engine.nbytes
        assert sum(plan.at_peak.values()) == plan.needed_bytes == engine.trained + engine.nbytes
        share, texts = engine.share(request), engine.texts(request)
        assert (texts == batch) == whole and texts >= 8
        assert share * memory >= engine.weights + texts * engine.text + BESIDE.high
        left = request.room.memory.low - sum(part.bytes.high for part in request.room.outside[:-1])
        assert engine.trained + share * memory + GRAPHS.high <= left
        assert (engine.weights + engine.text) / memory <= engine.least_share(request) < share
        more = measure(request, recipe, 2, batch // 2)
        assert more.engine.cache == engine.cache and more.engine.texts(request) <= texts
    larger = make_request("Qwen/Qwen3-4B", "RTX 3060", batch=16, **given)
    found = measure(larger, recipe, 1, 16)
    assert not found.fits and found.to_dict()["engine"]["share"] is None


def test_one_that_sleeps_takes_turns_with_the_training():
    """What the allocator cannot give back before it wakes is more than what tensors hold then."""
    recipe = Recipe("full", "mixed_bf16", "adamw_fused", fused_lm_head=True)
    request = make_request("Qwen/Qwen3-0.6B", "RTX 4090", length=512, objective="grpo", vllm=AWAKE)
    awake, asleep = (measure(request, replace(recipe, vllm=vllm), 4, 4) for vllm in (AWAKE, ASLEEP))
    assert awake.engine.nbytes == asleep.engine.nbytes
    assert asleep.engine.trained > asleep.generation_bytes
    while_made = asleep.engine.trained + asleep.engine.nbytes + BESIDE.high
    assert asleep.needed_bytes >= while_made and asleep.needed_bytes < awake.needed_bytes
    assert sum(asleep.at_peak.values()) == asleep.needed_bytes
    assert asleep.engine.share(asleep.request) >= awake.engine.share(awake.request)
    # Asleep it has graphs alone; awake what is beside its weights and cache too.
    assert awake.request.room.sure_bytes < asleep.request.room.sure_bytes
    # Weights, optimizer state and what the last step left to learn from; neither gradients nor activations.
    kinds = held(request, replace(recipe, vllm=ASLEEP))
    assert 0 <= asleep.generation_bytes - kinds["parameters"] - kinds["optimizer"] < 64 * 2**20
    assert kinds["engine"] == max(asleep.engine.nbytes - kinds["gradients"], 0)


def test_a_trace_gives_the_cache_back_where_it_says():
    """Before a phase, also through edits: what lies free in whole segments is the driver's again."""
    big, small = 32 * 2**20, 20 * 2**20
    trace = Trace(*np.array([[0, 0, 2, 2], [big, big, small, small], [3] * 4, [1, 1, 3, 3]]), ("forward", "wake"))
    assert trace.reserved_in("wake") == big
    emptied = replace(trace, emptied=("wake",))
    assert emptied.reserved_in("wake") == small and emptied.through()[1].reserved_bytes == small
    assert trace.through()[1].reserved_bytes == big
    assert with_ddp(emptied).emptied == emptied.emptied
    both = with_phase(trace, 1, "generation", Trace(*np.array([[0], [small], [3], [1]]), ("token",)), emptied=True)
    assert both.emptied == ("generation",) and both.reserved_in("generation") == small


def test_the_planner_searches_with_an_engine(capsys):
    given = {"length": 256, "completion_length": 128, "objective": "grpo", "methods": ("lora", "qlora")}
    plans = plan_training("meta-llama/Llama-3.2-1B", "T4", vllm="colocate", **given)
    assert plans.best and "vLLM" in plans.request.title and "vLLM" in plans.best.title
    assert {plan.recipe.method for plan in (*plans.plans, *plans.losers)} == {"lora"}
    said = dict(plans.skipped)
    assert "QLoRA · vLLM" in said and "use_vllm=True" not in said
    found = json.loads(json.dumps(plans.to_dict()))
    assert found["request"]["vllm"] == "colocate" and found["plans"][0]["vllm"] in (AWAKE, ASLEEP)
    assert found["plans"][0]["engine"]["share"] >= found["plans"][0]["engine"]["least_share"] > 0
    assert any(part["what"] == "vLLM" for part in found["room"]["outside"])
    assert "engine" not in plans.to_frame().columns
    # An engine that sleeps is tried for more samples at once alone.
    asleep = [plan for plan in (*plans.plans, *plans.refused.values()) if plan.recipe.vllm == ASLEEP]
    assert asleep
    for plan in asleep:
        beside = [one for one in plans.plans if one.recipe == replace(plan.recipe, vllm=AWAKE)]
        assert all(one.micro_batch < plan.micro_batch for one in beside)
    # A plan's own request asks for its way alone.
    again = asdict(asleep[0].request)
    only = plan_training(again.pop("model"), again.pop("gpu"), **again)
    assert {plan.recipe.vllm for plan in (*only.plans, *only.losers)} == {ASLEEP}
    small = ["--model", "Qwen/Qwen3-0.6B", "--length", "256", "--methods", "lora", "--objective", "grpo"]
    assert main([*small, "--vllm", "colocate"]) == 0
    assert "vllm_gpu_memory_utilization=0." in capsys.readouterr().out


def test_what_no_engine_is_counted_of_gets_a_reason():
    given = {"length": 256, "objective": "grpo"}
    for model, more, said, error in (
        ("Qwen/Qwen3-0.6B", {"vllm": "server"}, "colocate", WrongValue),
        ("Qwen/Qwen3-0.6B", {"vllm": "colocate", "batch": 2048}, "1024", NotSupported),
        ("Qwen/Qwen3-0.6B", {"vllm": "colocate", "objective": "dpo"}, "grpo", WrongValue),
        ("Qwen/Qwen3-0.6B", {"vllm": "colocate", "methods": "qlora"}, "4", NotSupported),
        ("Qwen/Qwen3-32B", {"vllm": "colocate"}, "15", NotSupported),
        ("deepseek-ai/DeepSeek-V3", {"vllm": "colocate"}, "키와 값", NotSupported),
        (Gemma3Config(), {"vllm": "colocate"}, "그림", NotSupported),
    ):
        with pytest.raises(error, match=said):
            make_request(model, "A100-80GB", **given | more)
    with pytest.raises(NotSupported, match=r"7\.0"):
        make_request("Qwen/Qwen3-0.6B", "P100", vllm="colocate", **given)


# -- a program --------------------------------------------------------------------------------------------------------


def test_an_engine_does_not_start_where_its_share_is_not_free():
    """As vLLM says it; with expandable segments none can sleep."""
    import virtual_gpu
    from virtual_gpu.program.vllm import Engine

    with virtual_gpu.cuda("T4") as gpu:
        held = torch.empty(10 * GiB, dtype=torch.uint8, device="cuda")
        with pytest.raises(ValueError, match="Free memory on device"):
            Engine(gpu.watch, "gpt2", 0.5, 64)
        assert torch.cuda.memory_allocated() == held.nbytes
        engine = Engine(gpu.watch, "gpt2", 0.25, 64, enable_sleep_mode=True)
        share = torch.cuda.memory_allocated() - held.nbytes
        assert share == pytest.approx(0.25 * torch.cuda.mem_get_info()[1], abs=2**21)
        engine.sleep(level=2)
        assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == held.nbytes
        engine.wake_up(tags=["weights"])
        engine.wake_up(tags=["kv_cache"])
        assert torch.cuda.memory_allocated() - held.nbytes == share
        wanted = SimpleNamespace(n=2, max_tokens=100)
        [answer] = engine.generate([{"prompt_token_ids": [1] * 60}], wanted)
        assert [len(one.token_ids) for one in answer.outputs] == [4, 4]  # a text ends where the engine's ends
        del held
