"""One rank of many: pipelines, ZeRO, the programs' own launchers."""

import json
import pickle
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers.distributed
from accelerate.state import PartialState

from benchmarks.recipes.compiled import compiler_on
from virtual_gpu.errors import WrongValue
from virtual_gpu.models.build import build_model
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.depth import with_depth
from virtual_gpu.program import device, pipeline, ranks
from virtual_gpu.program.context import cuda
from virtual_gpu.program.runner import run
from virtual_gpu.rules.active import installed

PROGRAMS = Path(__file__).parent / "programs"
MIB = 2**20


def program(name: str, *argv: str, **settings):
    report = run(str(PROGRAMS / name), argv, gpu="H100", **settings)
    if report.error is not None:
        raise report.error
    return report


def test_each_stage_of_a_pipeline_learns_what_it_receives(tmp_path, monkeypatch):
    """Rank 1 of 4 is told by rank 0; the last forward of one micro-batch comes before its backward in 1F1B alone."""
    file = tmp_path / "sent"
    run(str(PROGRAMS / "pipeline.py"), ["ScheduleGPipe"], gpu="H100", gpus=4, rank=0, sent=(0, str(file)))
    asked = []

    def ask(rank, stage):
        asked.append((rank, stage))
        return pickle.loads(file.read_bytes())

    monkeypatch.setattr(pipeline, "ask_by_running", lambda options, command: ask)
    gpipe, one = (program("pipeline.py", f"Schedule{name}", gpus=4, rank=1) for name in ("GPipe", "1F1B"))
    assert asked == [(0, 0), (0, 0)] and gpipe.steps == one.steps == 2
    # 8 micro-batches of 4 MiB: GPipe keeps the outputs of all of them, 1F1B on the second of four ranks those of 3
    saved = [report.at_peak["saved for backward"] for report in (gpipe, one)]
    assert saved[0] > saved[1] and one.allocated < gpipe.allocated
    assert gpipe.at_peak["parameters"] == 4 * MIB


def test_what_a_stage_has_said_is_not_asked_again():
    """Rank 1 asks rank 0 in a process of its own, and what that says is there for whoever began."""
    ask = pipeline.ask_by_running(["--gpu", "H100", "--gpus", "4"], [str(PROGRAMS / "pipeline.py"), "ScheduleGPipe"])
    with mock.patch.object(subprocess, "run", wraps=subprocess.run) as started:
        said = [ask(1, 1), ask(0, 0), ask(1, 1)]
    assert started.call_count == 1 and said[0] == said[1] == said[2]


def test_zero_keeps_its_part_of_the_optimizer_state():
    report = program("zero.py", gpus=4)
    assert report.at_peak["parameters"] == report.at_peak["gradients"] == 32 * MIB
    assert report.at_peak["optimizer"] == 2 * 32 * MIB // 4


@pytest.mark.parametrize(
    "command",
    (
        ["torchrun", "--nproc_per_node", "2", "ddp.py"],
        ["python", "-m", "torch.distributed.run", "--nproc-per-node=gpu", "ddp.py"],
        ["accelerate", "launch", "--num_processes", "2", "ddp.py"],
        ["spawn.py"],
    ),
    ids=lambda command: " ".join(command[:2]),
)
def test_launchers_start_one_rank(command, monkeypatch):
    monkeypatch.chdir(PROGRAMS)
    report = run(command[0], command[1:], gpu="H100", gpus=2)
    assert report.error is None and report.steps == 3
    assert report.at_peak["gradients"] == 8 * MIB  # DistributedDataParallel's buckets beside them


def test_a_launcher_that_wants_other_cards_is_told_what_to_write(monkeypatch):
    monkeypatch.chdir(PROGRAMS)
    with pytest.raises(WrongValue, match="--gpus 4"):
        run("torchrun", ["--nproc_per_node", "4", "ddp.py"], gpu="H100", gpus=2)
    report = run("spawn.py", ["3"], gpu="H100")
    assert report.status == "failed" and "--gpus 3" in str(report.error)


def test_accelerates_launcher_sets_what_the_program_reads(tmp_path):
    script = tmp_path / "precision.py"
    script.write_text(
        "import os, torch\nfrom accelerate import Accelerator\n"
        "accelerator = Accelerator()\nassert accelerator.mixed_precision == 'bf16' and 'RANK' not in os.environ\n"
        "assert accelerator.device.type == 'cuda'\n"
    )
    before = PartialState(cpu=True).device
    report = run("accelerate", ["launch", "--mixed_precision", "bf16", str(script)], gpu="H100")
    assert report.error is None and PartialState().device == before


def test_tensors_that_dtensor_makes_for_their_shapes_are_on_no_card(tmp_path):
    """A fused step has no temporaries: it holds no more than what is there between backward and step."""
    fused = tmp_path / "fused.py"
    fused.write_text((PROGRAMS / "fsdp2.py").read_text(encoding="utf-8").replace("foreach=True", "fused=True"))
    report = run(str(fused), [], gpu="H100", gpus=8)
    assert report.error is None
    assert report.phases["step"][0] <= report.phases["between"][0]


def test_parts_of_a_dtensor_are_cast_one_by_one(tmp_path):
    """Under autocast the backward casts a DTensor's gradient to the device that it is on, which is no upload."""
    script = tmp_path / "cast.py"
    text = (PROGRAMS / "tensor_parallel.py").read_text(encoding="utf-8")
    step = "model(torch.randn(8, 1024, device="
    assert step in text
    script.write_text(text.replace(step, "with torch.autocast('cuda', torch.bfloat16): out = " + step, 1).replace(
        ".sum().backward()", "\nout.sum().backward()", 1
    ))  # fmt: skip
    report = run(str(script), [], gpu="H100", gpus=4)
    assert report.error is None
    assert report.at_peak["gradients"] == 2 * 4 * MIB


@pytest.mark.skipif(installed("torch") < (2, 13), reason="run eagerly before PyTorch 2.13")
@pytest.mark.parametrize("rank", (0, 1))
def test_blocks_of_dtensors_compile(rank, tmp_path):
    """Each in one graph, tensors and tokens split; what lies between its operations is never made."""
    found = {}
    for compiled in (False, True):
        script = tmp_path / f"{compiled}.py"
        text = (PROGRAMS / "sequence_parallel.py").read_text(encoding="utf-8")
        script.write_text(text.replace("compiled = False", f"compiled = {compiled}"), encoding="utf-8")
        with compiler_on():
            found[compiled] = run(str(script), [], gpu="H100", gpus=2, rank=rank)
        assert found[compiled].error is None and not [n for n in found[compiled].notes if n.startswith("torch.compile")]
        assert found[compiled].at_peak["parameters"] == found[False].at_peak["parameters"]
    assert found[True].phases["forward"][0] < found[False].phases["forward"][0]


def test_a_group_of_another_size_than_the_cards_is_told_what_to_write(tmp_path):
    script = tmp_path / "eight.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('nccl', rank=5, world_size=8)\n")
    report = run(str(script), [], gpu="H100", gpus=16, rank=13)
    assert isinstance(report.error, WrongValue) and "--gpus 8" in str(report.error)


def test_each_cards_generator_has_its_state():
    with cuda("H100", gpus=2, rank=1):
        first, second = torch.cuda.default_generators
        assert (first.device.index, second.device.index) == (0, 1)
        torch.cuda.manual_seed_all(7)
        for one in (first, second, torch.Generator("cuda")):
            again = one.clone_state()
            assert again.device == one.device and torch.equal(again.get_state(), one.get_state())


def test_neighbours_of_a_stage_are_in_machines_of_the_same_size(tmp_path, monkeypatch):
    """They are asked with the launcher that the program was started with."""
    asked = []
    monkeypatch.setattr(pipeline, "ask_by_running", lambda options, command: asked.append(command))
    command = ["torchrun", "--nnodes", "2", "--nproc_per_node", "2", str(PROGRAMS / "pipeline.py"), "ScheduleGPipe"]
    run(command[0], command[1:], gpu="H100", gpus=4)
    assert asked == [command]


@pytest.mark.skipif(installed("torch") < (2, 13), reason="run eagerly before PyTorch 2.13")
def test_compiled_attention_of_dtensors_takes_the_cards_kernel(tmp_path):
    """As in tensor and context parallelism: PyTorch has a plan for CUDA's kernels, and none for the CPU's."""
    script = tmp_path / "heads.py"
    script.write_text(
        "import torch, torch.nn.functional as F\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import DTensor, Shard\n"
        "mesh = init_device_mesh('cuda', (2,))\n"
        "@torch.compile(fullgraph=True)\n"
        "def attend(q, k, v):\n"
        "    q, k, v = (DTensor.from_local(t, mesh, [Shard(1)]) for t in (q, k, v))\n"
        "    return F.scaled_dot_product_attention(q, k, v, is_causal=True).to_local()\n"
        "heads = (torch.randn(1, 4, 128, 64, device='cuda', dtype=torch.half, requires_grad=True) for _ in range(3))\n"
        "attend(*heads).sum().backward()\n"
    )
    with compiler_on():
        report = run(str(script), [], gpu="H100", gpus=2)
    assert report.error is None and not [note for note in report.notes if note.startswith("torch.compile")]


@pytest.mark.parametrize(
    "gpus, rank, command, local, of",
    (
        (16384, 16001, (), 1, 8),
        (12, 11, (), 11, 12),
        (129, 128, (), 2, 3),
        (2, 1, (), 1, 2),
        (16, 13, ("torchrun", "--nnodes", "4", "--nproc_per_node", "4"), 1, 4),
        (16, 13, ("torchrun", "--nproc_per_node", "16"), 13, 16),
    ),
)
def test_more_cards_than_a_machine_has_are_in_several(tmp_path, gpus, rank, command, local, of):
    script = tmp_path / "where.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        f"assert (dist.get_rank(), dist.get_world_size()) == ({rank}, {gpus})\n"
        f"assert (torch.cuda.current_device(), torch.cuda.device_count()) == ({local}, {of})\n"
        f"assert int(os.environ['GROUP_RANK']) == {rank // of} and int(os.environ['LOCAL_WORLD_SIZE']) == {of}\n"
        f"x = torch.ones(3, device='cuda')\nassert x.device == torch.device('cuda', {local})\n"
        "generator = torch.cuda.default_generators[x.device.index]\n"
        "assert torch.cuda.current_stream().device == generator.device == x.device\n"
    )
    (program, *argv) = [*command, str(script)]
    report = run(program, argv, gpu="H100", gpus=gpus, rank=rank)
    assert report.error is None and report.host.ranks == of


def test_a_card_brings_nccl_to_one_process_too(tmp_path):
    """torchtune asks for it before it trains in bf16 on one card, and opens no group."""
    script = tmp_path / "asks.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "assert dist.is_nccl_available() and torch.cuda.nccl.version() >= (2, 10)\n"
        "assert not dist.is_initialized()\n"
    )
    before = dist.is_nccl_available()
    assert run(str(script), [], gpu="A100-80GB").error is None
    assert dist.is_nccl_available() is before


def test_names_that_were_bound_before_the_group_is_opened(tmp_path):
    """`from torch.nn.parallel import …` at the top, also to inherit from; ours comes with the group of one process."""
    script = tmp_path / "bound.py"
    script.write_text(
        "import copy, torch, torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "class Reaching(DDP):\n"
        "    def __init__(self, module, **more):\n"
        "        super().__init__(module, **more)\n"
        "        self.own = 7\n"
        "    def __getattr__(self, name):\n"
        "        try:\n"
        "            return super().__getattr__(name)\n"
        "        except AttributeError:\n"
        "            return getattr(self.module, name)\n"
        "dist.init_process_group('nccl')\n"
        "for kind in (DDP, Reaching, torch.nn.parallel.DistributedDataParallel):\n"
        "    model = kind(torch.nn.Linear(64, 64).cuda(), device_ids=[0])\n"
        "    assert isinstance(model, kind) and isinstance(model, DDP) and len(model.gradient_buckets) == 1\n"
        "    model(torch.ones(2, 64, device='cuda')).sum().backward()\n"
        "    assert model.module.weight.grad.shape == (64, 64)\n"
        "    if kind is Reaching:\n"
        "        assert model.own == 7 and model.in_features == 64 and type(model).__name__ == 'Reaching'\n"
    )
    before = torch.nn.parallel.DistributedDataParallel.__init__
    assert run(str(script), [], gpu="T4").error is None
    assert torch.nn.parallel.DistributedDataParallel.__init__ is before


def test_a_step_on_the_cpu_takes_gradients_that_are_one_number(tmp_path, monkeypatch):
    """FSDP2's CPU offload: the parts of a DTensor are real tensors there, and a fused step reads every element."""
    monkeypatch.setattr(device, "_HUGE", 2**10)
    script = tmp_path / "offload.py"
    text = (PROGRAMS / "fsdp2.py").read_text(encoding="utf-8").replace("foreach=True", "fused=True")
    for part in ("layer", "model"):
        text = text.replace(f"fully_shard({part})", f"fully_shard({part}, offload_policy=CPUOffloadPolicy())")
    text = text.replace("import fully_shard", "import CPUOffloadPolicy, fully_shard")
    script.write_text(text + "assert all((p.to_local() <= 1).all() for p in model.parameters())\n")
    report = run(str(script), [], gpu="H100", gpus=8, steps=9)
    assert report.error is None
    assert not report.at_peak["optimizer"] and not report.at_peak["gradients"]


EXPERT_PARALLEL = pytest.mark.skipif(
    "ep_size" not in vars(transformers.distributed.DistributedConfig), reason="a newer transformers' expert parallelism"
)
# name → the model, transformers' `distributed_config`, and the part of what no plan of tensors splits
SHARED = {
    "fsdp": ("Qwen/Qwen3-0.6B", {"fsdp_size": 4}, 4),
    "tensors": ("Qwen/Qwen3-0.6B", {"tp_size": 4, "tp_plan": "auto"}, 1),
    "experts": ("Qwen/Qwen3-30B-A3B", {"fsdp_size": 4, "ep_size": 4, "ep_implementation": "noted"}, 4),
    "experts and tensors": (
        "Qwen/Qwen3-30B-A3B", {"tp_size": 2, "fsdp_size": 2, "ep_size": 4, "ep_implementation": "noted"}, 2
    ),
}  # fmt: skip


@EXPERT_PARALLEL
@pytest.mark.parametrize("kind", SHARED)
def test_each_rank_loads_and_trains_its_part_by_transformers_own_plan(kind):
    """Of four ranks each has a quarter; norms and routers are split by FSDP alone. Experts get rows from all ranks."""
    name, config, of_rest = SHARED[kind]
    report = program("shared_by_transformers.py", name, json.dumps(config), gpus=4)
    assert report.steps == 2
    model = build_model(with_depth(load_config(name), 2), torch.float32)
    parts = [
        p.nbytes // (of_rest if "norm" in name or "mlp.gate." in name else 4) for name, p in model.named_parameters()
    ]
    parameters = sum(-(-part // 512) * 512 for part in parts)  # the allocator's blocks
    assert report.at_peak["parameters"] == parameters
    assert report.at_peak["optimizer"] == pytest.approx(2 * parameters, rel=0.02)  # and rests of the allocator's blocks
    assert any("top-k" in note or "best k" in note for note in report.notes) is ("experts" in kind)


def test_shards_are_filled_with_random_numbers():
    """As torchtitan begins: on each rank's part, without numbers for the others to keep apart from."""
    report = program("random_shards.py", gpus=4)
    assert report.steps == 2 and report.at_peak["parameters"] == 4 * 4 * MIB // 4


def test_known_values_go_round_the_ranks():
    """Every rank has sent the same: numbers without dimensions, lists, and what a view was filled with."""
    with cuda("H100", gpus=4, rank=1) as gpu:
        ranks.install(gpu.patches, gpu, gpu.watch)
        dist.init_process_group("nccl")
        seven, four = torch.tensor(7).cuda(), torch.zeros(4, dtype=torch.int64).cuda()
        dist.all_gather_into_tensor(four, seven)
        assert four.tolist() == [7] * 4
        found = [torch.zeros(1, dtype=torch.int64).cuda() for _ in range(4)]
        dist.all_gather(found, torch.tensor([5]).cuda())
        assert [one.item() for one in found] == [5] * 4
        dist.all_to_all(found, [torch.tensor([number]).cuda() for number in range(4)])
        assert [one.item() for one in found] == [1] * 4
        dist.reduce_scatter_tensor(found[0], four)
        assert found[0].item() == 1 and gpu.answers  # a sum of all ranks is not followed
        whole = torch.empty(4, dtype=torch.int64, device="cuda")
        dist.all_gather_into_tensor(whole[:], seven)
        whole.random_(0, 9)
        assert whole[:].tolist() == [1] * 4
