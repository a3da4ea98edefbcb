"""DeepSpeed's engine on a virtual GPU, and what it rests on; without DeepSpeed only that."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from virtual_gpu.errors import WrongValue
from virtual_gpu.program import cuda
from virtual_gpu.program.extensions import ExtensionError
from virtual_gpu.program.runner import run

PROGRAMS = Path(__file__).parent / "programs"
MIB = 2**20
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed (pip install deepspeed==0.19.8): its engine is not run",
)


def zero(*argv: str, gpus: int = 4):
    report = run(str(PROGRAMS / "zero_deepspeed.py"), argv, gpu="A100-40GB", gpus=gpus)
    if report.error is not None:
        raise report.error
    assert report.steps == 3
    return report


def test_flat_copies_of_weights_are_optimizer_state():
    report = run(str(PROGRAMS / "flat_copies.py"), gpu="H100")
    assert report.error is None and report.steps == 2
    # at the peak, in backward: a part of 1 MiB and the whole of 2; the copy and AdamW's two states and count of steps
    assert report.at_peak["parameters"] == 3 * MIB and report.at_peak["optimizer"] == 3 * 2 * MIB + 512


def test_extensions_are_stood_in_for_or_refused(monkeypatch):
    with cuda("A100-40GB") as gpu:
        from torch.utils import cpp_extension

        known = cpp_extension.load("fused_adam", ["frontend.cpp", "adam.cu"])
        lists = [[torch.ones(4, device="cuda")] for _ in range(4)]
        before = torch.cuda.memory_allocated()
        known.multi_tensor_adam(2048 * 32, torch.zeros(1, device="cuda"), lists, 1e-4, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
        assert torch.cuda.memory_allocated() == before and any("fused_adam" in note for note in gpu.watch.notes)
        with pytest.raises(ExtensionError, match="'mine'"):
            cpp_extension.load(name="mine", sources="mine.cu")
        with pytest.raises(ExtensionError, match="'mine'"):
            cpp_extension.load_inline("mine", cpp_sources="", cuda_sources="__global__ void f() {}")
    assert cpp_extension.load.__module__ == "torch.utils.cpp_extension"


def test_without_deepspeed_it_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(WrongValue, match=r"deepspeed.*not installed|deepspeed.*설치"):
        run("deepspeed", ["train.py"])
    script = tmp_path / "train.py"
    script.write_text("import deepspeed\n")
    report = run(str(script))
    assert report.status == "failed" and "virtual-gpu shards" in report.notes[0]


def test_a_stage_3_configuration_ends_with_its_program():
    """transformers keeps it in its module, and would split the models of later programs by it."""
    from transformers.integrations import deepspeed

    with cuda("A100-40GB"):
        deepspeed.set_hf_deepspeed_config(
            deepspeed.HfTrainerDeepSpeedConfig.__new__(deepspeed.HfTrainerDeepSpeedConfig)
        )
        assert deepspeed._hf_deepspeed_config_weak_ref is not None
    assert deepspeed._hf_deepspeed_config_weak_ref is None


@needs_deepspeed
@pytest.mark.parametrize("stage", ["1", "2"])
def test_stages_1_and_2_keep_a_part_of_the_optimizer_state(stage):
    """8 Mi parameters on 4 ranks: 2 bytes each whole, 12 bytes each of a quarter."""
    report = zero(stage)
    assert report.at_peak["parameters"] == 16 * MIB
    assert report.at_peak["optimizer"] == 12 * 8 * MIB // 4


@needs_deepspeed
def test_stage_3_keeps_a_part_of_everything():
    report = zero("3")
    assert report.at_peak["gradients"] == 2 * 8 * MIB // 4
    assert report.at_peak["optimizer"] == 12 * 8 * MIB // 4
    assert report.at_peak["parameters"] >= 2 * 8 * MIB // 4  # and what is gathered at that moment


def test_steps_within_a_step_are_not_counted():
    with cuda("T4") as gpu:
        layer = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(layer.parameters())
        gpu.watch.within_a_step = True
        for _ in range(3):
            optimizer.step()
        assert gpu.watch.steps == 0
        gpu.watch.count_step(layer)
        assert gpu.watch.steps == 1


@needs_deepspeed
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_a_step_of_the_engine_is_one_of_however_many_groups(stage):
    report = run(str(PROGRAMS / "zero_groups.py"), [stage], gpu="T4", gpus=2)
    assert report.error is None and report.steps == 3
    assert [phase for phase, _ in report.watch.spans].count("backward") == 3 * 2  # two micro-batches each


@needs_deepspeed
@pytest.mark.parametrize("stage", ["2", "3"])
def test_an_optimizer_on_the_cpu_is_not_on_the_card(stage):
    assert zero(stage, "cpu").at_peak.get("optimizer", 0) == 0


@needs_deepspeed
def test_what_cannot_be_run_is_refused_by_name():
    with pytest.raises(ExtensionError, match=r"'pin_memory'"):
        zero("3", "nvme")


@needs_deepspeed
def test_its_launcher_starts_one_rank():
    program = str(PROGRAMS / "rank_of_deepspeed.py")
    report = run("deepspeed", ["--num_gpus", "2", program, "--mine", "1"], gpu="H100", gpus=2, rank=1)
    assert report.error is None
    with pytest.raises(WrongValue, match="--gpus 2"):
        run("deepspeed", ["--num_gpus", "2", program], gpu="H100", gpus=4)
