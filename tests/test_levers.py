"""The levers: their record is what a run gives, the page is what the record says, and what is said to be equal is."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.levers import __main__ as levers
from benchmarks.levers import activations, losses, optimizers
from benchmarks.levers.catalogue import BASES, EQUAL, LEVERS, Lever
from benchmarks.levers.program import LORA_RANK, Traffic, checkpointed, loss_of_model
from tools import lever_claims, lever_words, lever_words_cards
from tools import levers as tool
from virtual_gpu.plan.measure import measure as plan_of
from virtual_gpu.plan.request import make_request
from virtual_gpu.program.context import cuda
from virtual_gpu.step.predict import predict_memory

RECORD = tool.read()["rows"]
BY_KEY = {lever.key: lever for lever in LEVERS}


def test_the_page_is_what_the_record_says():
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(tool.read()), "python tools/levers.py"


def test_every_lever_has_its_words_and_its_programs():
    assert len(BY_KEY) == len(LEVERS)
    assert set(BY_KEY) == set(tool.WORDS) and set(BASES) == set(tool.BASE_WORDS)
    assert all(base in BASES for lever in LEVERS for base in lever.bases)
    assert {lever.group for lever in LEVERS} == set(lever_words.GROUPS) | set(lever_words_cards.CARD_GROUPS)
    for base, rows in RECORD.items():
        assert {"base"} <= set(rows) <= {"base"} | {key for key, lever in BY_KEY.items() if base in lever.bases}


def same_versions(base, key):
    """Whether what is installed is what the row was made with."""
    versions = RECORD[base][key]["versions"]
    return all(levers.installed(package) == version for package, version in versions.items())


@pytest.mark.stress
@pytest.mark.parametrize(("base", "key"), [(base, key) for base in RECORD for key in RECORD[base]])
def test_every_row_is_what_its_program_takes(base, key, tmp_path):
    """In a process of its own, as the record was made."""
    if not same_versions(base, key):
        pytest.skip(f"made with {RECORD[base][key]['versions']}")
    into = tmp_path / "record.json"
    command = [sys.executable, "-m", "benchmarks.levers", "--only", base, "--lever", key, "--into", str(into)]
    subprocess.run(command, cwd=tool.PAGE.parent.parent, check=True, capture_output=True)
    assert json.loads(into.read_text())["rows"][base][key] == RECORD[base][key]


def test_the_start_is_what_the_instrument_predicts():
    """The same program by another way: virtual_gpu's own step."""
    same = {"model_id": "EleutherAI/polyglot-ko-1.3b", "batch_size": 16, "sequence_length": 256}
    lora = {"peft": "lora", "lora_rank": 16, "lora_targets": "all-linear", "lora_dropout": 0.0}
    report = predict_memory(**same, **lora, precision="autocast_fp16", optimizer="adamw_fused", gpu="T4")
    assert RECORD["1.3b-lora"]["base"]["peak"] == pytest.approx(report.peak_bytes, rel=0.005)


@pytest.mark.parametrize(("base", "key"), [("1b-dpo", "dpo_lora"), ("1b-grpo", "grpo_vllm_asleep")])
def test_two_models_in_one_memory_are_what_the_planner_counts(base, key):
    program = BY_KEY[key].of(base)
    request = make_request(
        program.model_id, program.card, length=program.length, batch=program.batch, objective=program.objective,
        lora_rank=LORA_RANK, lora_targets="all-linear", **program.asked,
    )  # fmt: skip
    plan = plan_of(request, program.recipe, program.micro_batch, program.batch // program.micro_batch)
    row = RECORD[base][key]
    assert row["flops"] == plan.flops and row["fits"] == plan.fits
    # While an engine sleeps there is the training's peak alone, as here, or what wakes beside less of it.
    assert row["peak"] == (plan.training_bytes if program.recipe.vllm else plan.tensors_bytes)
    more = "grpo_vllm" if program.recipe.vllm else "base"  # the engine awake takes more, and so do all weights
    assert row["peak"] < RECORD[base][more]["peak"]


def test_traffic_counts_both_ways():
    with cuda("T4"), Traffic() as traffic:
        there = torch.zeros(1000, 1000).cuda()
        there.cpu()
        (there + 1).cuda()
    assert traffic.to_cpu + traffic.to_card == 2 * 4_000_000


def test_a_package_that_is_not_there_is_named_and_stops_nothing(monkeypatch, tmp_path, capsys):
    absent = Lever("absent", "loss", ("1.3b",), {}, EQUAL, ("no-such-package",))
    monkeypatch.setattr(levers, "LEVERS", (absent,))
    monkeypatch.setattr(levers, "row", lambda base, lever: {"peak": 1})
    monkeypatch.setattr(sys, "argv", ["levers", "--only", "1.3b", "--into", str(tmp_path / "record.json")])
    assert levers.main() == 0
    assert "1.3b absent: no-such-package is not installed" in capsys.readouterr().err
    assert json.loads((tmp_path / "record.json").read_text())["rows"] == {"1.3b": {"base": {"peak": 1}}}


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=101, num_hidden_layers=4, **sizes)).train()


def gradients(model, *, prepare=None, loss=loss_of_model):
    """The loss of a copy and its gradients."""
    model = copy.deepcopy(model)
    if prepare is not None:
        prepare(model)
    batch = {"input_ids": torch.arange(2 * 24).reshape(2, 24) % 101}
    value = loss(model, batch)
    value.backward()
    return value.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    "change",
    [
        {"prepare": checkpointed},
        {"prepare": activations.every_second},
        {"prepare": activations.pairs},
        {"prepare": activations.selective},
        {"prepare": activations.only_attention_kept},
    ],
)
def test_what_is_said_to_be_equal_is(small, change):
    loss, grads = gradients(small)
    other, others = gradients(small, **change)
    assert torch.equal(loss, other) and all(map(torch.equal, grads, others))


@pytest.mark.parametrize(
    "change",
    [{"loss": losses.chunks_recomputed}, {"loss": losses.pytorch_chunks}, {"prepare": activations.tiled_mlp}],
)
def test_what_is_said_to_round_otherwise_is_close(small, change):
    loss, grads = gradients(small)
    other, others = gradients(small, **change)
    torch.testing.assert_close(other, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(others, grads, rtol=1e-4, atol=1e-6)


def test_a_step_in_the_backward_is_the_same_step(small):
    one, two = copy.deepcopy(small), copy.deepcopy(small)
    batch = {"input_ids": torch.arange(48).reshape(2, 24)}
    ordinary = torch.optim.AdamW(one.parameters(), lr=1e-5, fused=True)
    optimizers.in_backward(two)
    loss_of_model(one, batch).backward()
    ordinary.step()
    loss_of_model(two, batch).backward()
    assert all(map(torch.equal, one.parameters(), two.parameters()))
    assert all(parameter.grad is None for parameter in two.parameters())


def test_a_verdict_follows_from_its_numbers():
    rows = {
        base: {key: {"peak": 100} for key in ("base", "nf4", "checkpointing", "nf4_checkpointed")} for base in BASES
    }
    claim = next(claim for claim in lever_claims.CLAIMS if claim.tried is lever_claims._qlora)
    assert claim.tried(rows, (100, 100))[0] == lever_claims.FALSE
    rows["8b-lora"]["nf4_checkpointed"]["peak"] = 50
    assert claim.tried(rows, (100, 100))[0] == lever_claims.CONDITIONAL
    for base in rows:
        rows[base]["nf4"]["peak"] = rows[base]["nf4_checkpointed"]["peak"] = 50
    assert claim.tried(rows, (100, 50))[0] == lever_claims.TRUE
    assert claim.tried(rows, (100, 150))[0] == lever_claims.CONDITIONAL
    claim = next(claim for claim in lever_claims.CLAIMS if claim.tried is lever_claims._eight_bits)
    keys = {key for _, key in claim.needs}
    rows = {base: {key: {"peak": 100} for key in keys} for base in BASES}
    assert claim.tried(rows)[0] == lever_claims.FALSE
    rows["8b-lora"]["int8_reentrant"]["peak"] = 50
    assert claim.tried(rows)[0] == lever_claims.CONDITIONAL
    for base in rows:
        rows[base]["int8"]["peak"] = rows[base]["int8_checkpointed"]["peak"] = 50
    assert claim.tried(rows)[0] == lever_claims.TRUE
