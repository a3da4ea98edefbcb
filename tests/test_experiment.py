"""The experiment: the book's numbers, what a report says, what is refused, and prediction equal to the run."""

import gc
import json
import re
import signal
import sys

import numpy as np
import pytest
import torch

import helpers.experiment
import helpers.gpu
import helpers.models
from helpers.experiment import gpu_memory_experiment, gpu_memory_sweep, predict_memory
from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.counting.meter import AllocationMeter
from virtual_gpu.language import set_language
from virtual_gpu.models import build, configs, depth
from virtual_gpu.models.configs import architectures
from virtual_gpu.models.depth import forget_shallow_runs, with_depth
from virtual_gpu.report import MemoryTable
from virtual_gpu.step import predict
from virtual_gpu.step.setting import PRECISIONS, Setting
from virtual_gpu.step.states import states_of

WEIGHTS = 2_663_620_608  # 1,331,810,304 parameters in fp16, every tensor a multiple of 512 bytes
WORKSPACES = 2 * 8_519_680

NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
LLAMA = NEOX | {"model_type": "llama", "num_key_value_heads": 2}
GEMMA = LLAMA | {
    "model_type": "gemma3_text",
    "head_dim": 16,
    "sliding_window": 8,
}
# Large enough that its phases lie further apart than the caching allocator's segments.
MIDDLE = NEOX | {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 8192}
SMALL = {
    "middle/neox": MIDDLE,
    "small/neox": NEOX,
    "small/llama": LLAMA,
    "deep/neox": NEOX | {"num_hidden_layers": 6},
    "deep/llama": LLAMA | {"num_hidden_layers": 6},
    "turns/gemma": GEMMA | {"num_hidden_layers": 12, "layer_types": ["sliding_attention", "full_attention"] * 6},
    "windows/gemma": GEMMA
    | {
        "num_hidden_layers": 12,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 3,
    },
    "uneven/gemma": GEMMA | {"num_hidden_layers": 7, "layer_types": ["sliding_attention"] * 6 + ["full_attention"]},
    "five/neox": NEOX | {"num_hidden_layers": 5},
}


@pytest.fixture
def small(monkeypatch):
    """Small bundled architectures, and a T4 in use."""
    known = {name: {"config": config, "dtype": "float16"} for name, config in SMALL.items()}
    monkeypatch.setattr(configs, "architectures", lambda: known)
    gpu = VirtualGPU(CATALOG["T4"])
    monkeypatch.setattr(helpers.gpu, "_current", gpu)
    return gpu


def same_timelines(one, other):
    assert [phase.name for phase in one.phases] == [phase.name for phase in other.phases]
    for a, b in zip(one.phases, other.phases, strict=True):
        assert np.array_equal(a.live, b.live)


# -- the book's numbers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def book():
    """The book's experiments on a virtual T4, each run once: setting → report."""
    gpu = VirtualGPU(CATALOG["T4"])
    reports = {}
    for name, setting in {
        "4": {"batch_size": 4},
        "8": {"batch_size": 8},
        "16": {"batch_size": 16},
        "4 x 4": {"batch_size": 4, "gradient_accumulation_steps": 4},
        "16 checkpointed": {"batch_size": 16, "gradient_checkpointing": True},
    }.items():
        reports[name] = gpu_memory_experiment(**setting, gpu=gpu)
        assert gpu.memory_allocated() == 0
    return reports


@pytest.mark.parametrize(
    ("name", "fits"), [("4", True), ("8", True), ("16", False), ("4 x 4", True), ("16 checkpointed", True)]
)
def test_what_fits_a_t4(book, name, fits):
    report = book[name]
    assert report.fits is fits
    assert report.parameters_bytes == report.gradients_bytes == WEIGHTS
    assert report.optimizer_bytes == 2 * WEIGHTS
    assert (report.gpu_name, report.is_virtual, report.method) == ("T4", True, "run")
    assert report.capacity_bytes == CATALOG["T4"].capacity_bytes
    assert (report.needed_bytes > report.capacity_bytes) is not fits
    assert report.peak_bytes <= report.capacity_bytes


@pytest.mark.parametrize(
    ("name", "after_step", "peak", "phase"),
    [
        # GiB without the cuBLAS workspaces, with transformers 5.23: a change in the machinery shows here.
        ("4", 9.927, 12.408, "step"),
        ("8", 9.927, 12.408, "step"),
        ("16", 9.925, 15.235, "forward"),
        ("16 checkpointed", 9.926, 12.408, "step"),
    ],
)
def test_after_the_first_step_and_at_the_peak(book, name, after_step, peak, phase):
    report = book[name]
    assert (report.allocated_bytes - WORKSPACES) / 2**30 == pytest.approx(after_step, abs=0.0006)
    assert (report.needed_bytes - WORKSPACES) / 2**30 == pytest.approx(peak, abs=0.0006)
    assert report.peak_phase == phase


def test_the_batch_changes_nothing_but_activations(book):
    """배치 크기를 늘려도 모델·그레이디언트·옵티마이저는 그대로다."""
    four, eight = book["4"].timeline, book["8"].timeline
    for i in range(6):
        a, b = four.at_end(i), eight.at_end(i)
        assert [a[c] for c in ("parameters", "gradients", "optimizer")] == [
            b[c] for c in ("parameters", "gradients", "optimizer")
        ]
    assert eight.at_end(0)["activations"] == pytest.approx(2 * four.at_end(0)["activations"], rel=0.001)


def test_accumulation_holds_gradients_between_micro_steps(book):
    phases = book["4 x 4"].timeline.phases
    assert [phase.name for phase in phases] == (["forward", "backward"] * 4 + ["step"]) * 2
    ends = [book["4 x 4"].timeline.at_end(i)["gradients"] for i in range(9)]
    assert ends == [0] + [ends[-1]] * 8
    assert WEIGHTS <= ends[-1] < 1.01 * WEIGHTS  # with the rests that the allocator does not split off


def test_an_out_of_memory_report(book):
    report = book["16"]
    assert report.error.startswith("CUDA out of memory. Tried to allocate ")
    assert report.needed_bytes > report.capacity_bytes >= report.peak_bytes
    assert report.timeline.phases[-1].name == report.peak_phase == "forward"
    assert book["4"].error is None


def test_the_setting_is_in_the_report(book):
    setting = book["4 x 4"].setting
    assert setting == {
        "batch_size": 4,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": False,
        "model_id": "EleutherAI/polyglot-ko-1.3b",
        "peft": None,
        "sequence_length": 256,
        "precision": "auto",
        "optimizer": "adamw",
        "attention": "sdpa",
        "holds_outputs": False,
        "fused_lm_head": False,
        "kept_results": (),
        "offload_checkpoints": False,
        "gpu": "T4",
    }
    assert book["4 x 4"].title == "polyglot-ko-1.3b · 배치 4 × 4 · 길이 256 · 가상 T4"
    json.dumps(book["4 x 4"].to_dict())


@pytest.mark.parametrize("name", ["4", "8", "16", "4 x 4", "16 checkpointed"])
def test_the_prediction_of_the_books_experiments(book, name):
    report = book[name]
    setting = {key: value for key, value in report.setting.items() if key != "gpu"}
    predicted = predict_memory(**setting, gpu="T4")
    assert predicted.method == "depth"
    assert predicted.reserved_bytes == (report.reserved_bytes if report.fits else None)
    for field in ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "allocated_bytes", "fits", "needed_bytes"):
        assert getattr(predicted, field) == getattr(report, field), field
    if report.fits:
        assert predicted.peak_bytes == report.peak_bytes
        assert predicted.at_peak == report.at_peak
        assert [p.peak_bytes for p in predicted.timeline.phases] == [p.peak_bytes for p in report.timeline.phases]


# -- the run ----------------------------------------------------------------------------------------------------------


def test_what_is_printed(small, capsys):
    report = gpu_memory_experiment(4, model_id="small/neox")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "배치 크기: 4",
        f"GPU 메모리 사용량: {report.allocated_bytes / 2**30:.3f} GB",
        f"옵티마이저 상태의 메모리 사용량: {report.optimizer_bytes / 2**30:.3f} GB",
        f"그레이디언트의 메모리 사용량: {report.gradients_bytes / 2**30:.3f} GB",
        "GPU 메모리 사용량: 0.000 GB",
    ]
    assert report.peak_bytes == report.needed_bytes == report.timeline.peak_bytes
    assert report.allocated_bytes == sum(report.timeline.at_end(2).values())
    assert report.activations_bytes == report.at_peak["activations"] + report.at_peak["other"]


def test_english(small, capsys):
    set_language("en")
    try:
        report = gpu_memory_experiment(4, 2, True, "small/neox")
        shown = report._repr_svg_() + str(report) + MemoryTable([report])._repr_html_()
    finally:
        set_language("ko")
    said = capsys.readouterr().out + shown
    assert report.title == "neox · batch 4 × 2 · length 256 · checkpointing · virtual T4"
    assert not [char for char in said.replace("Noto Sans KR", "") if "가" <= char <= "힣"]


def test_two_runs_are_the_same(small):
    one, other = (gpu_memory_experiment(4, 2, model_id="small/llama") for _ in range(2))
    same_timelines(one.timeline, other.timeline)
    assert one.to_dict() == other.to_dict()
    assert one._repr_svg_() == other._repr_svg_()


def test_what_lies_on_the_gpu_already_counts(small):
    alone = gpu_memory_experiment(4, model_id="small/neox")
    held = small.place(torch.empty(2**20, dtype=torch.uint8))
    beside = gpu_memory_experiment(4, model_id="small/neox")
    assert beside.peak_bytes == alone.peak_bytes + 2**20
    assert small.memory_allocated() == 2**20
    del held


def test_another_gpu_than_the_one_in_use(small, capsys):
    held = small.place(torch.empty(2**29, dtype=torch.uint8))
    report = gpu_memory_experiment(4, model_id="small/neox", gpu="h100")
    assert report.gpu_name == "H100"
    assert capsys.readouterr().out.endswith("GPU 메모리 사용량: 0.000 GB\n")  # of that one
    assert small.memory_allocated() == 2**29
    del held


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bytes_of_a_parameter(small, precision):
    report = gpu_memory_experiment(2, model_id="small/neox", precision=precision, sequence_length=16)
    count = build.count_parameters(build.build_model(configs.load_config("small/neox"), torch.float32))
    nbytes = 2 if precision in ("auto", "fp16", "bf16") else 4
    assert report.parameters_bytes == report.gradients_bytes == nbytes * count
    assert report.optimizer_bytes == 2 * nbytes * count


@pytest.mark.parametrize(("optimizer", "most"), [("adamw_8bit", 0.6), ("adafactor", 0.1), ("sgd", 0.0)])
def test_optimizers_that_take_less(small, optimizer, most):
    count = gpu_memory_experiment(2, model_id="small/neox", sequence_length=16).optimizer_bytes
    report = gpu_memory_experiment(2, model_id="small/neox", optimizer=optimizer, sequence_length=16)
    assert report.optimizer_bytes <= most * count
    assert (report.optimizer_bytes > 0) is (optimizer != "sgd")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("peft", ["lora", "qlora"])
def test_adapters(small, peft):
    full = gpu_memory_experiment(2, model_id="small/llama", sequence_length=16)
    report = gpu_memory_experiment(2, model_id="small/llama", peft=peft, sequence_length=16)
    assert 0 < report.gradients_bytes < full.gradients_bytes / 5
    assert report.optimizer_bytes == 2 * report.gradients_bytes
    assert small.memory_allocated() == 0


# -- errors -----------------------------------------------------------------------------------------------------------


def limited(gpu, nbytes):
    gpu.meter.allocator.capacity_bytes = nbytes
    gpu.spec = type(gpu.spec)(**vars(gpu.spec) | {"memory_bytes": nbytes, "usable_bytes": None})


@pytest.mark.parametrize("phase", ["forward", "backward", "step"])
def test_out_of_memory_in_each_phase(small, phase, capsys):
    setting = {"batch_size": 4, "model_id": "middle/neox", "sequence_length": 256 if phase == "forward" else 16}
    free = gpu_memory_experiment(**setting)
    peaks = {"load": free.parameters_bytes} | {p.name: p.peak_bytes for p in free.timeline.phases[:3]}
    before = list(peaks)[list(peaks).index(phase) - 1]
    limited(small, (peaks[before] + peaks[phase]) // 2)
    report = gpu_memory_experiment(**setting)
    assert (report.fits, report.timeline.phases[-1].name) == (False, phase)
    assert report.error in capsys.readouterr().out
    assert report.needed_bytes == free.peak_bytes > report.capacity_bytes
    assert (report.allocated_bytes, report.optimizer_bytes) == (0, 0)  # the first step was not reached
    assert small.memory_allocated() == 0
    limited(small, free.reserved_bytes)
    assert gpu_memory_experiment(**setting).fits
    limited(small, free.peak_bytes)  # room for the tensors, not for what lies lost between them
    report = gpu_memory_experiment(**setting)
    assert not report.fits and report.needed_bytes == report.capacity_bytes
    assert "조각나" in report.verdict


def test_not_even_the_model_fits(small, capsys):
    limited(small, 2**17)
    report = gpu_memory_experiment(1, model_id="small/neox")
    assert not report.fits
    assert report.timeline.phases == []
    assert report.peak_phase is None
    assert "메모리 부족(OOM): T4의 한도 128.00 KiB를 넘었다" in capsys.readouterr().out
    assert small.memory_allocated() == 0
    assert report._repr_svg_() and MemoryTable([report])._repr_html_()


@pytest.mark.parametrize(
    ("where", "failure", "message"),
    [
        *[
            (where, KeyboardInterrupt(), "실험을 중단했다. 메모리는 모두 돌려주었다.")
            for where in ("load", "forward", "backward", "step")
        ],
        ("forward", ZeroDivisionError("a bug"), "a bug"),
        ("step", RuntimeError("CUDA error: device-side assert triggered"), "T4을(를) 더는 쓸 수 없다"),
    ],
)
def test_interrupted_in_the_middle(small, where, failure, message, monkeypatch):
    def fail(*args, **kwargs):
        raise failure

    {
        "load": lambda: monkeypatch.setattr(helpers.experiment, "model_bytes", fail),
        "forward": lambda: monkeypatch.setattr(torch.nn.functional, "gelu", fail),
        "backward": lambda: monkeypatch.setattr(torch.Tensor, "backward", fail),
        "step": lambda: monkeypatch.setattr(torch.optim.AdamW, "step", fail),
    }[where]()
    attention = torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(type(failure), match=re.escape(message)) as caught:
        gpu_memory_experiment(2, model_id="small/neox", sequence_length=16)
    assert small.memory_allocated() == 0  # with the exception still in hand
    assert caught.value is not None
    assert torch.nn.functional.scaled_dot_product_attention is attention
    monkeypatch.undo()


def test_interrupted_in_the_middle_of_backward(small, monkeypatch):
    """By a node of the graph, as Ctrl+C would: what autograd has still to do is let go as well."""
    place, calls = VirtualGPU.place, []

    def hook(grad):
        raise KeyboardInterrupt

    def place_with_a_hook(gpu, thing):
        placed = place(gpu, thing)
        if isinstance(thing, torch.nn.Module):
            calls.append(placed.gpt_neox.layers[0].mlp.dense_h_to_4h.weight.register_hook(hook))
        return placed

    monkeypatch.setattr(VirtualGPU, "place", place_with_a_hook)
    with pytest.raises(KeyboardInterrupt, match="실험을 중단했다"):
        gpu_memory_experiment(2, model_id="small/neox", sequence_length=16)
    assert calls
    calls.clear()
    gc.collect()
    assert small.memory_allocated() == 0


@pytest.mark.parametrize("capacity_bytes", [2**33, 2**26])  # the second ends while the model is loaded
def test_ctrl_c_falls_into_a_release(small, capacity_bytes, monkeypatch):
    """In training, in loading, in tidying up: there an exception is swallowed, and what should be freed is not."""
    free, releases, swallowed = AllocationMeter.free, [], []

    def interrupted(meter, block):
        releases.append(block)
        if len(releases) == at:
            signal.raise_signal(signal.SIGINT)
        free(meter, block)

    monkeypatch.setattr(AllocationMeter, "free", interrupted)
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)
    limited(small, capacity_bytes)
    at = 0
    assert gpu_memory_experiment(2, model_id="middle/neox", sequence_length=16).fits == (capacity_bytes > 2**26)
    assert releases
    for at in sorted({round(1 + part * (len(releases) - 1)) for part in (0, 0.2, 0.4, 0.6, 0.8, 1)}):
        releases.clear()
        with pytest.raises(KeyboardInterrupt, match="실험을 중단했다"):
            gpu_memory_experiment(2, model_id="middle/neox", sequence_length=16)
        assert len(releases) >= at and small.memory_allocated() == 0
    assert swallowed == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: 1 이상의 정수여야 한다"),
        ({"batch_size": -1}, "batch_size=-1: 1 이상"),
        ({"batch_size": 2.5}, r"batch_size=2\.5: 1 이상"),
        ({"batch_size": True}, "batch_size=True: 1 이상"),
        ({"batch_size": "4"}, "batch_size='4': 1 이상"),
        ({"batch_size": 10**9}, "샘플 2,000,000,000개 × 토큰 256개는 너무 크다"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0: 1 이상"),
        ({"gradient_accumulation_steps": 10**9}, "너무 크다"),
        ({"sequence_length": 0}, "sequence_length=0: 1 이상"),
        ({"sequence_length": 513}, "sequence_length=513: small/neox의 최대 길이는 512이다"),
        ({"model_id": "small/neoks"}, "'small/neoks': 모르는 모델 이름이다. 혹시 small/neox"),
        ({"precision": "fp8"}, "'fp8': 모르는 정밀도 이름이다. 혹시 fp"),
        ({"optimizer": "adam"}, "'adam': 모르는 옵티마이저 이름이다. 혹시 adamw"),
        ({"attention": "flash"}, "'flash': 모르는 어텐션 이름이다"),
        ({"peft": "qlorra"}, "'qlorra': 모르는 peft 이름이다. 혹시 qlora"),
        ({"gpu": "T5"}, "'T5': 모르는 GPU 이름이다. 혹시 T4"),
    ],
    ids=str,
)
@pytest.mark.parametrize("function", [gpu_memory_experiment, predict_memory])
def test_bad_input(function, setting, message, small, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(configs, "hub_argument", lambda: {"local_files_only": True})
    with pytest.raises(ValueError, match=message):
        function(**({"batch_size": 4, "model_id": "small/neox"} | setting))
    assert capsys.readouterr().out == ""
    assert small.memory_allocated() == 0


def test_a_setting_is_checked_and_its_names_are_completed():
    setting = Setting(np.int64(4), model_id="POLYGLOT-ko-1.3b", peft="LoRA", precision="BF16", optimizer="AdamW")
    assert setting == Setting(4, model_id="EleutherAI/polyglot-ko-1.3b", peft="lora", precision="bf16")
    assert hash(setting) == hash(Setting(4, peft="lora", precision="bf16"))
    assert type(setting.batch_size) is int
    assert setting.samples == 8


# -- sweeps -----------------------------------------------------------------------------------------------------------


def test_a_sweep(small, capsys):
    table = gpu_memory_sweep(
        batch_size=[1, 2], gradient_checkpointing=(False, True), model_id="small/neox", sequence_length=16
    )
    assert capsys.readouterr().out == ""
    assert [(r.setting["batch_size"], r.setting["gradient_checkpointing"]) for r in table] == [
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]
    html = table._repr_html_()
    assert html.count("<tr>") == 5
    assert "<th>배치 크기</th><th>체크포인팅</th><th>파라미터</th>" in html
    assert table.chart()._repr_svg_().startswith("<svg")
    assert repr(table).count("\n") == 3


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("precision", ["fp16", "mixed_bf16"]),
        ("optimizer", ["adamw", "sgd"]),
        ("attention", ["sdpa", "eager"]),
        ("sequence_length", range(32, 97, 32)),
        ("gpu", ["T4", "H100"]),
    ],
)
def test_a_sweep_over_anything(small, name, values):
    table = gpu_memory_sweep(**({"batch_size": 4, "model_id": "small/neox", "sequence_length": 64} | {name: values}))
    assert [report.setting[name] for report in table] == list(values)
    assert len({report.peak_bytes for report in table}) == len(values)


# -- prediction -------------------------------------------------------------------------------------------------------


def assert_the_same(predicted, run):
    for field in ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "allocated_bytes", "peak_bytes", "fits"):
        assert getattr(predicted, field) == getattr(run, field), field
    assert predicted.at_peak == run.at_peak
    assert predicted.peak_phase == run.peak_phase
    assert len(predicted.timeline.phases) == len(run.timeline.phases)
    for a, b in zip(predicted.timeline.phases, run.timeline.phases, strict=True):
        assert a.name == b.name
        assert np.array_equal(a.live, b.live)
    for name in ("born", "nbytes", "category", "span"):  # entry by entry
        assert np.array_equal(getattr(predicted.timeline.trace, name), getattr(run.timeline.trace, name)), name
    if run.fits:
        assert predicted.reserved_bytes == run.reserved_bytes


SETTINGS = [
    {"batch_size": 2, "model_id": "deep/neox"},
    {"batch_size": 2, "model_id": "deep/llama", "gradient_accumulation_steps": 3},
    {"batch_size": 2, "model_id": "deep/neox", "gradient_checkpointing": True},
    {"batch_size": 2, "model_id": "deep/llama", "peft": "qlora", "gradient_checkpointing": True},
    {"batch_size": 16, "model_id": "deep/neox", "attention": "eager"},
    {"batch_size": 2, "model_id": "deep/llama", "precision": "fp32", "optimizer": "adamw_fused"},
    {"batch_size": 2, "model_id": "deep/neox", "precision": "mixed_fp16"},
    {"batch_size": 2, "model_id": "deep/llama", "precision": "mixed_bf16", "optimizer": "adamw_8bit", "gpu": "L4"},
    {"batch_size": 2, "model_id": "deep/llama", "optimizer": "sgd", "gradient_checkpointing": True, "gpu": "H100"},
    {"batch_size": 2, "model_id": "deep/neox", "peft": "lora"},
    {"batch_size": 2, "model_id": "deep/llama", "optimizer": "adafactor"},
    {"batch_size": 2, "model_id": "turns/gemma"},
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_predicted_by_depth_is_the_full_run(small, setting):
    arguments = setting | {"sequence_length": 64}
    predicted, full = (predict_memory(**arguments, full=full) for full in (False, True))
    assert (predicted.method, full.method) == ("depth", "run")
    assert_the_same(predicted, full)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("setting", SETTINGS[:4], ids=str)
def test_the_unlimited_run_is_the_experiment(small, setting):
    arguments = setting | {"sequence_length": 32, "model_id": setting["model_id"].replace("deep", "small")}
    predicted, run = predict_memory(**arguments, full=True), gpu_memory_experiment(**arguments)
    assert_the_same(predicted, run)
    same_timelines(predicted.timeline, run.timeline)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "setting, first",
    [
        ({"model_id": "deep/neox", "peft": "lora", "gradient_checkpointing": True}, 2),
        ({"model_id": "turns/gemma"}, 3),  # a window of 8 tokens: one for that its kinds do not do the same
    ],
    ids=str,
)
def test_another_batch_or_length_takes_one_shallow_run(small, setting, first, monkeypatch):
    """What two depths have shown holds while the same things happen, of whatever sizes; else they are run anew."""
    runs, real = [], predict.virtual_run
    forget_shallow_runs()
    monkeypatch.setattr(predict, "virtual_run", lambda *args: runs.append(args) or real(*args))
    needed = []
    for batch_size, sequence_length in ((2, 64), (3, 48), (2, 6)):
        arguments = setting | {"batch_size": batch_size, "sequence_length": sequence_length}
        report = predict_memory(**arguments)
        needed.append(len(runs))
        runs.clear()
        assert report.method == "depth"
        assert_the_same(report, predict_memory(**arguments, full=True))
        runs.clear()
    assert needed[:2] == [first, 1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("peft", [None, "lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_kinds_of_layers_that_do_the_same_are_taken_for_one(small, peft, checkpointing, monkeypatch):
    """Texts that are shorter than the window: all layers attend to all of them. Longer ones have two kinds."""
    runs, real = [], predict.virtual_run
    forget_shallow_runs()
    monkeypatch.setattr(predict, "virtual_run", lambda *args: runs.append(args[1].num_hidden_layers) or real(*args))
    needed = []
    for batch_size, sequence_length in ((2, 6), (3, 5), (2, 64), (2, 64)):
        arguments = {"batch_size": batch_size, "sequence_length": sequence_length, "model_id": "windows/gemma"}
        arguments |= {"peft": peft, "gradient_checkpointing": checkpointing}
        report = predict_memory(**arguments)
        needed.append([*runs])
        assert report.method == ("depth" if sequence_length < 8 else "run")
        assert_the_same(report, predict_memory(**arguments, full=True))
        predict.predict_need.cache_clear()
        runs.clear()
    assert needed == [[4, 6], [6], [6, 4, 12], [6, 12]]
    # With other lengths they still do.
    predict_memory(batch_size=2, sequence_length=6, model_id="windows/gemma", precision="mixed_fp16")
    assert runs == [4, 6]


@pytest.mark.filterwarnings("ignore")
def test_what_goes_on_in_two_ways_is_not_shown_again(small, monkeypatch):
    """A single sample may be packed ones to transformers, which looks: a batch of one does more than a larger one."""
    runs, real = [], predict.virtual_run
    forget_shallow_runs()
    monkeypatch.setattr(predict, "virtual_run", lambda *args: runs.append(args) or real(*args))
    needed = []
    for batch_size, sequence_length in ((1, 64), (2, 64), (1, 48), (3, 64), (1, 32)):
        report = predict_memory(model_id="deep/llama", batch_size=batch_size, sequence_length=sequence_length)
        needed.append(len(runs))
        runs.clear()
        same = predict_memory(model_id="deep/llama", batch_size=batch_size, sequence_length=sequence_length, full=True)
        assert_the_same(report, same)
        runs.clear()
    assert needed == [2, 2, 1, 1, 1]


def test_kinds_that_were_not_compared_are_not_said_to_differ(small):
    """Runs that have to be deeper would be more work than the model; others of the same length are not."""
    config = configs.load_config("windows/gemma")
    forget_shallow_runs()
    assert not [*depth._starts(config, b"", 2, 6)]
    turns, start = next(depth._starts(config, b"", 0, 6))
    assert turns.alike and start == 0


@pytest.mark.filterwarnings("ignore")
def test_targets_that_name_layers_are_counted_in_the_whole_model(small):
    """Of four layers among eight, shallow models would have all or none."""
    arguments = {"batch_size": 2, "model_id": "deep/llama", "peft": "lora", "sequence_length": 32}
    arguments["lora_targets"] = r".*layers\.[0-3]\.self_attn\.q_proj"
    predicted, full = (predict_memory(**arguments, full=full) for full in (False, True))
    assert predicted.method == "run"
    assert_the_same(predicted, full)
    held = states_of(Setting(2, **{name: value for name, value in arguments.items() if name != "batch_size"}))
    assert held["gradients"] == full.gradients_bytes


def test_layers_that_do_not_take_turns_are_run(small):
    report = predict_memory(batch_size=2, model_id="uneven/gemma")
    assert report.method == "run"
    assert_the_same(report, gpu_memory_experiment(2, model_id="uneven/gemma"))


def test_few_layers_are_run(small):
    assert predict_memory(batch_size=2, model_id="five/neox").method == "run"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "setting",
    [
        {"batch_size": 2, "model_id": "gpt2", "gradient_checkpointing": True},
        {"batch_size": 1, "model_id": "Llama-3.2-1B", "sequence_length": 1024},
        {"batch_size": 4, "peft": "qlora", "optimizer": "adamw_8bit"},
        {"batch_size": 2, "precision": "mixed_fp16", "attention": "eager"},
    ],
    ids=str,
)
def test_predicted_by_depth_is_the_full_run_of_real_models(setting):
    predicted, full = (predict_memory(**setting, gpu="H100", full=full) for full in (False, True))
    assert (predicted.method, full.method) == ("depth", "run")
    assert_the_same(predicted, full)


def test_the_largest_model():
    report = predict_memory(batch_size=1, model_id="Llama-3.1-405B", gpu="H200")
    assert report.method == "depth"
    assert report.parameters_bytes == 2 * 405_853_388_800
    assert not report.fits
    assert report.needed_bytes > 8 * 405_853_388_800


def test_a_prediction_leaves_the_gpu_in_use_alone(small):
    predict_memory(batch_size=2, model_id="small/neox")
    assert small.memory_allocated() == small.max_memory_allocated() == 0


FAMILIES = {entry["config"]["model_type"]: model_id for model_id, entry in architectures().items()}


@pytest.mark.parametrize("model_id", FAMILIES.values())
def test_every_family_runs_on_the_virtual_gpu(model_id):
    config = with_depth(configs.load_config(model_id), 2)
    run = predict.virtual_run(Setting(1, model_id=model_id), config, CATALOG["A100-80GB"])
    assert run.gradients == run.parameters
    assert run.trace.peak_bytes > 4 * run.parameters
