"""The second meter: what a program's CPU tensors take of the host's RAM, on a virtual machine and on this one."""

import json
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig

import virtual_gpu
from benchmarks.children import ROOT
from benchmarks.host import SMALL
from helpers.models import byte_tokenizer
from virtual_gpu.errors import UnknownName, WrongValue
from virtual_gpu.host.machines import MACHINES, PROCESS, machine
from virtual_gpu.host.meter import HostMeter
from virtual_gpu.host.pinned import PinnedAllocator
from virtual_gpu.host.process import process_memory
from virtual_gpu.host.report import host_report
from virtual_gpu.plan.host import host_need, loadable
from virtual_gpu.plan.measure import measure
from virtual_gpu.plan.plans import Plan
from virtual_gpu.plan.recipes import Recipe
from virtual_gpu.plan.request import make_request
from virtual_gpu.plan.search import Plans
from virtual_gpu.program.runner import run
from virtual_gpu.units import GiB, MiB


def test_machines():
    assert machine("colab").memory.low == 13609422848 and MACHINES["Kaggle"].memory.low == 29 * 10**9
    assert machine("32GB").free.low == 32 * 10**9 and machine(machine("16GiB")).free.high == 16 * GiB
    assert all(len(one.source) == 2 and all(one.source) for one in MACHINES.values())
    with pytest.raises(UnknownName, match="Colab"):
        machine("Colba")
    with pytest.raises(WrongValue, match="16 TiB"):
        machine("1MB")
    with pytest.raises(WrongValue, match="host=32"):
        machine(32)


def test_pinned_memory_is_a_power_of_two_and_stays():
    pinned = PinnedAllocator()
    assert pinned.allocate(3 * MiB) == (4 * MiB, 4 * MiB)
    assert pinned.free(4 * MiB) == 0 and pinned.allocate(4 * MiB) == (4 * MiB, 0)
    assert pinned.allocate(1) == (1, 1) and pinned.reserved_bytes == 4 * MiB + 1
    pinned.free(1)
    assert pinned.empty_cache() == 1 and pinned.reserved_bytes == 4 * MiB
    limits = {"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:8,pinned_max_cached_size_mb:16"}
    pinned = PinnedAllocator.from_environment(environment=limits)
    assert [pinned.size_of(n * MiB) for n in (3, 8, 9)] == [4 * MiB, 8 * MiB, 9 * MiB]
    assert pinned.allocate(17 * MiB) == (17 * MiB, 17 * MiB) and pinned.free(17 * MiB) == 17 * MiB
    assert PinnedAllocator(rounds_up=False).size_of(3) == 3


def test_the_peak_and_what_it_was_of():
    meter = HostMeter()
    first, second = meter.allocate(100, "parameters"), meter.allocate(50, "other")
    meter.free(first)
    meter.label(second, "gradients")
    assert (meter.current_bytes, meter.peak_bytes) == (50, 150)
    held = {name: n for name, n in meter.by_category(at_peak=True).items() if n}
    assert held == {"parameters": 100, "gradients": 50}
    meter.reset_peak()
    assert meter.peak_bytes == 50 and len(meter.blocks) == 1
    assert "2" in host_report(HostMeter(ranks=2)).line.split("rank", 1)[1]


def test_what_a_program_holds():
    with virtual_gpu.cuda("T4") as gpu:
        meter = gpu.host.meter
        model = torch.nn.Linear(1000, 1001, bias=False)
        assert meter.by_category()["parameters"] == 4 * 1001000
        half = model.half()
        assert meter.peak_bytes == 6 * 1001000  # the copy beside it
        assert meter.current_bytes == 2 * 1001000
        half.cuda()
        assert meter.current_bytes == 0
        kept = {name: value.cpu() for name, value in half.state_dict().items()}
        assert meter.by_category()["copies"] == 2 * 1001000
        del kept
        batch = torch.ones(3, MiB // 4).pin_memory()
        assert batch.is_pinned() and batch.pin_memory() is batch and not torch.ones(1).is_pinned()
        assert meter.by_category()["pinned"] == 4 * MiB and batch.sum() == 3 * MiB // 4
        del batch
        assert meter.by_category()["pinned"] == 4 * MiB  # waits in the allocator
        torch._C._host_emptyCache()
        assert meter.current_bytes == 0 and gpu.host.report().at_peak["pinned"] == 4 * MiB


def test_saved_activations_and_an_optimizer_on_the_host():
    with virtual_gpu.cuda("T4") as gpu:
        meter = gpu.host.meter
        x = torch.ones(64, 1000, device="cuda", requires_grad=True)
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            loss = (x * x).sum()
        assert meter.by_category()["pinned"] == 2 * 2**18  # 256,000 bytes each
        loss.backward()
        weight = torch.nn.Parameter(torch.ones(1000))
        optimizer = torch.optim.AdamW([weight])
        weight.sum().backward()
        optimizer.step()
        held = meter.by_category()
        assert held["gradients"] == 4000 and held["optimizer"] == 2 * 4000


def test_files(tmp_path):
    torch.save({"weight": torch.arange(10**6)}, tmp_path / "a.pt")
    with virtual_gpu.cuda("T4") as gpu:
        meter = gpu.host.meter
        loaded = torch.load(tmp_path / "a.pt")
        assert meter.by_category()["loading"] == 8 * 10**6 and loaded["weight"][5] == 5
        del loaded
        mapped = torch.load(tmp_path / "a.pt", mmap=True)["weight"]
        assert meter.current_bytes == 0 and meter.mapped_bytes == 8 * 10**6
        mapped += 1  # a private page of a file is copied when it is written
        assert meter.current_bytes == 8 * 10**6 and meter.mapped_bytes == 0


def test_weights_that_nobody_fills_take_no_ram_here():
    before = process_memory().rss
    with virtual_gpu.cuda("A100", host="100GB") as gpu:
        model = torch.nn.Linear(2**15, 2**14, bias=False)
        again = model.to(torch.bfloat16).state_dict()["weight"].clone().pin_memory()
        assert again.is_pinned() and gpu.host.meter.peak_bytes >= 2 * 2**30
        assert process_memory().rss - before < 2**29


def test_the_end_is_at_the_allocation_that_exceeds(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        "import torch\ntry:\n    x = [torch.empty(2**28) for _ in range(20)]\nexcept Exception:\n    pass\n"
    )
    report = run(str(program), host="Colab")
    assert report.status == "oom" and report.judgement == "does not fit" and report.host.killed
    free = machine("Colab").free.high - PROCESS.low
    assert report.host.peak == free // GiB * GiB and isinstance(report.error, virtual_gpu.HostOutOfMemory)
    assert report.error.nbytes == GiB and report.json()["host"]["verdict"] == "does not fit"
    assert report.host.line in report.text()
    assert not run(str(program), host="Colab", limited=False).host.killed


def test_processes_of_a_loader():
    with virtual_gpu.cuda("T4") as gpu:
        data = TensorDataset(torch.zeros(64, 1000))
        batches = iter(DataLoader(data, batch_size=8, num_workers=2, prefetch_factor=3))
        next(batches)
        assert gpu.host.report().workers == 2
        assert gpu.host.meter.by_category()["workers"] == 2 * 3 * 8 * 4000
        del batches
        assert gpu.host.meter.by_category()["workers"] == 0


def test_what_a_plan_says_of_the_host():
    gpt2 = Plan(make_request("gpt2", "T4"), Recipe("full", "mixed_fp16", "adamw_fused"), 1, 16, 0, {}, 0, 0, 0, None)
    full = host_need(gpt2)
    assert (full.loading.low, full.mapped, full.processes) == (0, 4 * 124439808, 1)  # its files are fp32 already
    request = make_request("meta-llama/Llama-3.2-1B", "T4", methods=("full", "lora"))
    wide, lora = (
        host_need(Plan(request, Recipe(method, "mixed_fp16", "adamw_fused"), 1, 16, 0, {}, 0, 0, 0, None))
        for method in ("full", "lora")
    )
    assert wide.loading.low == 4 * 1235814400 and wide.verdict(machine("4GB")) == "does not fit"
    assert lora.loading.low == 0 and lora.loading.high == 4 * 2 * 128256 * 2048  # bf16 files, converted to fp16
    assert "Colab" in full.line("Colab") and full.to_dict()["needed_bytes"][0] == PROCESS.low


def test_a_sharded_4_bit_model_is_quantized_in_the_ram_of_each_process():
    request = make_request("meta-llama/Llama-3.2-1B", "2 x T4", batch=2, methods=("lora", "qlora"))
    lora, one, four_bit = (
        host_need(measure(request, Recipe(method, "mixed_fp16", "adamw_fused", stage=stage), 1, 1)).loading
        for method, stage in (("lora", 3), ("qlora", 0), ("qlora", 3))
    )
    assert lora.low == 2 * 1_235_814_400 and one.low == 0  # rank 0 alone, bf16 files to fp16; straight to the GPUs
    embedding, layers = 2 * 128256 * 2048, (1_235_814_400 - 128256 * 2048) / 2
    assert 2 * (embedding + layers) < four_bit.low < 2 * (embedding + 1.06 * layers)  # two copies, with statistics
    assert four_bit.high - four_bit.low == one.high == 2 * 4 * 2 * 128256 * 2048


def test_a_plan_that_cannot_be_loaded_is_left_out():
    request = make_request("meta-llama/Llama-3.2-1B", "T4", host="5GB")
    full, lora = (
        Plan(request, Recipe(method, "mixed_fp16", "adamw_fused"), 1, 16, 0, {}, 0, 0, 0, None)
        for method in ("full", "lora")
    )
    left = loadable(Plans(request, [full, lora], [], {}))
    assert left.plans == [lora] and left.skipped == [(full.title, host_need(full).line("5GB"))]
    assert loadable(Plans(request, [full], [], {})).plans == [full]


@pytest.mark.slow
def test_the_files_of_a_plan_need_what_it_says(tmp_path):
    llama = LlamaConfig(
        vocab_size=258, hidden_size=512, num_hidden_layers=2, num_attention_heads=8, intermediate_size=1024,
        dtype="bfloat16", tie_word_embeddings=False,
    )  # fmt: skip
    llama.architectures = ["LlamaForCausalLM"]
    llama.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("대한민국의 수도는 서울이다.\n" * 100, encoding="utf-8")
    request = make_request(str(tmp_path / "model"), "T4", length=64, batch=2, methods=("full",))
    plan = measure(request, Recipe("full", "mixed_fp16", "adamw_fused"), 2, 1)
    plan.save(tmp_path / "plan")
    report = run(str(tmp_path / "plan" / "train.py"), ["--text", str(tmp_path / "text.txt")], gpu="T4")
    assert report.status == "fits", report.text()
    need, held = host_need(plan), report.host
    assert held.at_peak["parameters"] == need.loading.low and held.mapped == need.mapped
    assert held.peak - need.loading.low < 2**16  # buffers, and the batches' tensors


def test_predictions_hold_on_this_machine():
    """In a process of its own, which grows by whole pages: within 1 % of the mark that the kernel keeps."""
    command = [sys.executable, "benchmarks/host.py", "--small"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    measured = json.loads(out)
    assert measured.keys() == SMALL.keys() and len(measured) == 5
    for name, way in SMALL.items():
        with virtual_gpu.cuda("T4") as gpu:
            kept = way()
            predicted = gpu.host.meter.peak_bytes
            del kept
        assert abs(measured[name] - predicted) < 0.01 * predicted, (name, measured[name], predicted)
