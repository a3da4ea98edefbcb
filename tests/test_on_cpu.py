"""A training state in the CPU's RAM: what the planner counts of it, how it says so, and the real code below it."""

from __future__ import annotations

import ast
import json
from dataclasses import replace

import pytest
import torch

from virtual_gpu.cards import CATALOG, card
from virtual_gpu.errors import NotSupported, WrongValue
from virtual_gpu.models.build import build_model
from virtual_gpu.models.configs import load_config
from virtual_gpu.plan import Recipe, plan_training
from virtual_gpu.plan.alternatives import CHANGED, Change, anything_that_fits
from virtual_gpu.plan.candidates import left_out, recipes_of
from virtual_gpu.plan.command import main
from virtual_gpu.plan.host import holds_step, host_need
from virtual_gpu.plan.measure import held, measure
from virtual_gpu.plan.on_cpu import InRAM, _run, _trace, _Way, states_in_ram, step_on_cpu
from virtual_gpu.plan.request import make_request
from virtual_gpu.program import ranks
from virtual_gpu.program.context import cuda
from virtual_gpu.shards.ledger import ConfigKey
from virtual_gpu.units import human_bytes

MODEL, SMALL = "Qwen/Qwen3-0.6B", "openai-community/gpt2"
ON_CPU = Recipe("full", "mixed_bf16", "adamw_fused", 3, cpu_offload=True)
ASKED = {"gpu": "8GiB, 8.9", "length": 128, "batch": 4, "methods": ("full",), "cpu_offload": True}
ASKED |= {"precision": "mixed_bf16", "optimizer": "adamw_fused"}
TYPES = {"weights": torch.float32, "half": torch.bfloat16}


def way(model=MODEL, gpus=2, **more):
    same = {"checkpointing": False, "offload": False, "fused_lm_head": False, "repeat_kv": False}
    like = replace(CATALOG["T4"], compute_capability=card("L4").compute_capability)
    return _Way(ConfigKey.of(load_config(model)), gpus, like, **TYPES, **same | more)


# -- what a step takes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "gpus, more", [(1, {}), (4, {"checkpointing": True, "offload": True}), (2, {"fused_lm_head": True})]
)
def test_a_few_layers_do_what_all_of_them_do(gpus, more):
    """Entry by entry, as many as there are; and what is copied, byte by byte."""
    setting = way(gpus=gpus, **more)
    deep, numbers = _run(setting.model.config, setting, 2, 64)
    found, same = _trace(setting, 2, 64)
    assert same == numbers
    for column in ("born", "nbytes", "category", "span", "stream"):
        assert (getattr(found, column) == getattr(deep, column)).all(), column


@pytest.mark.parametrize("gpus", [1, 2])
def test_shards_come_once_a_pass_and_gradients_go_back_once(gpus):
    """Two passes for the blocks, one for what stays gathered: head, embedding and last norm of a tied model."""
    model = build_model(load_config(MODEL), torch.float16)
    last = model.model.embed_tokens.weight.numel() + model.model.norm.weight.numel()
    whole = sum(parameter.numel() for parameter in model.parameters())
    step = step_on_cpu(MODEL, gpus, card("L4"), **TYPES, batch_size=1, sequence_length=16)
    assert step.to_cpu == 4 * whole // gpus
    assert step.to_card == 4 * (2 * whole - last) // gpus
    assert step.at_peak["parameters"] == step.at_peak["gradients"] == step.at_peak["optimizer"] == 0


def test_the_ram_is_counted_tensor_by_tensor():
    """Pinned ones by the power of two above: of two embeddings of 50,257 and 1,024 rows the first grows by a third."""
    sizes = [4 * parameter.numel() for parameter in build_model(load_config(SMALL), torch.float16).parameters()]
    pinned = sum(1 << (size - 1).bit_length() for size in sizes)
    expected = InRAM(sum(sizes) + pinned, 2 * pinned + 2 * sum(sizes))
    assert states_in_ram(SMALL, 1, torch.float32, accumulating=False) == expected
    more = states_in_ram(SMALL, 1, torch.float32, accumulating=True)
    assert more.training - expected.training == max(sizes)


def test_nothing_of_it_stays_in_the_process():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    step_on_cpu(SMALL, 2, card("L4"), **TYPES, batch_size=1, sequence_length=8)
    assert not torch.distributed.is_initialized() and not torch.cuda.is_available()
    assert torch.equal(before, torch.get_rng_state())


def test_a_process_group_that_is_open_stays_and_refuses_it(tmp_path):
    """Nothing is found with it then, and a program of several ranks on a virtual card does not close it either."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="process group"):
            step_on_cpu(SMALL, 2, card("L4"), **TYPES, batch_size=5, sequence_length=8)
        with cuda("T4", gpus=2) as gpu:
            ranks.install(gpu.patches, gpu, gpu.watch)
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


def test_inside_a_program_on_a_card_it_is_refused():
    with cuda("T4"), pytest.raises(NotSupported, match="cuda"):
        step_on_cpu(SMALL, 2, card("L4"), **TYPES, batch_size=3, sequence_length=8)


# -- the plan ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def offloaded():
    """Where the state alone, 10 GB, does not fit."""
    return plan_training(MODEL, **ASKED)


def test_what_does_not_fit_on_the_card_fits_so(offloaded):
    assert offloaded.best.recipe == ON_CPU and offloaded.best.fits
    assert "CPU" in offloaded.best.title and "CPU" in offloaded._repr_html_()
    assert any(
        plan.at_least and plan.recipe == replace(ON_CPU, stage=0, cpu_offload=False) for plan in offloaded.losers
    )
    assert sum(held(offloaded.request, ON_CPU).values()) == 0


def test_a_step_s_copies_count_by_the_micro_batch(offloaded):
    request = offloaded.request
    once, four = measure(request, ON_CPU, 4, 1), measure(request, ON_CPU, 1, 4)
    assert four.states_to_card_bytes == 4 * once.states_to_card_bytes > 0
    assert four.states_to_cpu_bytes == 4 * once.states_to_cpu_bytes == four.to_cpu_bytes
    assert four.to_dict()["states_to_cpu_bytes"] == four.states_to_cpu_bytes
    assert once.seconds is None  # a card of which no rate is known


def test_the_bound_on_a_step_waits_for_the_link():
    request = make_request(MODEL, "RTX 4090", length=16, batch=1, methods=("full",), cpu_offload=True)
    plan = measure(request, ON_CPU, 1, 1)
    assert plan.seconds == plan.states_to_card_bytes / card("RTX 4090").link_bytes_per_s


def test_the_ram_that_it_needs_decides_where_a_machine_is_named(offloaded):
    need = host_need(offloaded.best)
    assert need.training == states_in_ram(MODEL, 1, torch.float32, accumulating=False).training
    assert need.training > 16 * 596e6 and need.saving == 4 * 596_049_920
    assert need.needed.low >= need.training + need.saving and need.to_dict()["training_bytes"] == need.training
    assert f"상태 {human_bytes(need.training)}, 저장할 때 {human_bytes(need.saving)} 더" in need.line(None)
    here = replace(offloaded.best, request=replace(offloaded.request, host="Kaggle"))
    small = replace(offloaded.best, request=replace(offloaded.request, host="8GB"))
    assert holds_step(here) and not holds_step(small)
    lean = anything_that_fits(here.request)
    assert lean.recipe.cpu_offload and anything_that_fits(small.request) is None
    [(what, why)] = [row for row in left_out(small.request) if "CPU 오프로드" in row[0]]
    assert what == "전체 미세 조정 · mixed_bf16 · CPU 오프로드" and why.startswith("8GB의 RAM이 ")


def test_it_is_asked_for_and_full_fine_tuning_alone_has_it():
    request = make_request(MODEL, "L4", 2, batch=4, cpu_offload=True)
    found = [recipe for recipe in recipes_of(request) if recipe.cpu_offload]
    assert found == [ON_CPU, replace(ON_CPU, precision="bf16")]
    assert not any(recipe.cpu_offload for recipe in recipes_of(replace(request, cpu_offload=False)))
    said = [what for what, _ in left_out(request) if "CPU 오프로드" in what]
    together = ["텐서 병렬 · CPU 오프로드", "컨텍스트 병렬 · CPU 오프로드"]
    assert said == ["LoRA · CPU 오프로드", "QLoRA · CPU 오프로드", *together]
    old = make_request(MODEL, "T4", batch=4, methods=("full",), cpu_offload=True)
    assert not any(recipe.cpu_offload for recipe in recipes_of(old))
    assert ("전체 미세 조정 · CPU 오프로드", "bf16과 fp32로만 실행해 보았다") in left_out(old)
    assert ("전체 미세 조정 · CPU 오프로드", "bf16과 fp32로만 실행해 보았다") in left_out(
        make_request(MODEL, "L4", batch=4, methods=("full",), precision="mixed_fp16", cpu_offload=True)
    )
    with pytest.raises(WrongValue, match="cpu_offload"):
        make_request(MODEL, "L4", cpu_offload="yes")


def test_where_nothing_fits_it_is_one_of_the_changes():
    request = make_request(MODEL, **ASKED | {"cpu_offload": False})
    (changed,) = CHANGED["cpu_offload"](request)
    assert changed == replace(request, cpu_offload=True)
    assert str(Change("cpu_offload", True, anything_that_fits(changed))).startswith("학습 상태를 CPU에 둔다: RAM 13.")
    assert not [*CHANGED["cpu_offload"](replace(request, host="8GB"))]


# -- how it is said ---------------------------------------------------------------------------------------------------


def test_the_terminal_says_what_goes_where(capsys):
    asked = ["--model", MODEL, "--gpu", "8GiB, 8.9", "--length", "128", "--batch", "4", "--cpu-offload"]
    asked += ["--methods", "full", "--precision", "mixed_bf16", "--optimizer", "adamw_fused"]
    assert main([*asked, "--language", "en"]) == 0
    out = capsys.readouterr().out
    assert "1. full fine-tuning · mixed_bf16 · adamw_fused · ZeRO-3 · CPU offload" in out
    assert "of parameters to each GPU and" in out and "optimizer state" in out
    main([*asked, "--json"])
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert any(plan["cpu_offload"] and plan["host"]["training_bytes"] for plan in plans)


def test_what_a_kind_of_files_cannot_say_is_refused():
    request = make_request(SMALL, "L4", length=32, batch=4, methods=("full",), cpu_offload=True)
    two = measure(request, ON_CPU, 2, 2)
    with pytest.raises(NotSupported, match=r"deepspeed.*trainer, torch$"):
        two.files("deepspeed")
    with pytest.raises(NotSupported, match="accelerate"):
        two.files("accelerate")
    assert "fsdp_offload_params: true" in measure(request, ON_CPU, 4, 1).files("accelerate")["accelerate.yaml"]
    assert "CPUOffloadPolicy" in two.files("torch")["train.py"]
    assert "--nproc_per_node 1" in two.files("torch")["train.py"]
    assert "fsdp_offload_params: true" in two.files()["accelerate.yaml"]
    said = ast.get_docstring(ast.parse(two.files()["train.py"]))
    assert "accelerate launch --config_file accelerate.yaml train.py" in said and "python train.py" not in said


# -- the program's card below it --------------------------------------------------------------------------------------


LARGE = 2**24  # elements of a copy from which on it is one number, expanded


def test_copies_that_are_one_number_are_added_up_and_scaled():
    """A large gradient on the CPU, of which no value is known, takes no RAM here; PyTorch would refuse to write it."""
    with cuda("T4", values="2.0") as gpu:
        one, other = (torch.empty(LARGE, device="cuda").cpu() for _ in range(2))
        assert one.untyped_storage().nbytes() == 4
        one += other
        one.mul_(torch.tensor([0.5]))
        torch._foreach_mul_([one, other], torch.tensor(3.0))
        torch.nn.Parameter(one).data.view(2, -1).add_(other.view(2, -1))  # whole, by another name
        assert one.untyped_storage().nbytes() == 4 and one.shape == (LARGE,)
        assert one[7].item() == 12.0 and other[-1].item() == 6.0
        other.zero_()
        assert one[7].item() == 12.0 and other[3].item() == 0.0
        assert gpu.host.meter.current_bytes == 2 * 4 * LARGE


@pytest.mark.parametrize(
    "write",
    [
        lambda one: one[:10].mul_(3),
        lambda one: one.add_(torch.arange(LARGE)),
        lambda one: torch.add(torch.ones(1), 1, out=one),
        lambda one: torch._foreach_add_([one], [torch.arange(LARGE).float()]),
    ],
)
def test_what_is_not_one_number_any_more_is_refused(write):
    with cuda("T4", values="2.0"):
        one = torch.empty(LARGE, device="cuda").cpu()
        with pytest.raises(RuntimeError, match=r"single memory location|resize"):
            write(one)
        assert one[0].item() == one[-1].item() == 2.0


def test_what_is_only_read_stays_one_number():
    with cuda("T4", values="2.0"):
        one, whole = torch.empty(LARGE, device="cuda").cpu(), torch.zeros(LARGE)
        whole.add_(one)
        torch._foreach_add_([whole], [one])
        assert one.untyped_storage().nbytes() == 4 and whole[5].item() == 4.0


def test_what_the_program_expanded_itself_is_refused_as_ever():
    with cuda("T4"), pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        torch.ones(1).expand(8).add_(torch.ones(8))
