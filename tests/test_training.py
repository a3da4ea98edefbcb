"""The training loop: groups of micro-batches, gradients equal to the big batch's, and what is refused."""

import math
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPTNeoXConfig

import helpers.training
from helpers.data import make_dummy_dataset
from helpers.gpu import release_memory
from helpers.training import train_model
from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.language import set_language
from virtual_gpu.models.build import build_on_gpu, count_parameters
from virtual_gpu.step import run
from virtual_gpu.step.optimizers import (
    BITSANDBYTES,
    OPTIMIZERS,
    estimate_memory_of_gradients,
    estimate_memory_of_optimizer,
    make_optimizer,
)
from virtual_gpu.step.predict import predict_memory
from virtual_gpu.step.run import TrainingLog, enable_checkpointing
from virtual_gpu.trace.timeline import CATEGORIES, Timeline

CONFIG = GPTNeoXConfig(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    vocab_size=512,
    max_position_embeddings=32,
    bos_token_id=0,
    eos_token_id=0,
)


class CpuGPU:
    """A real "GPU" on the CPU, which measures nothing."""

    is_virtual, name, device = False, "CPU", torch.device("cpu")

    def place(self, thing):
        return {name: t.to("cpu") for name, t in thing.items()} if isinstance(thing, dict) else thing.to("cpu")

    def owns(self, tensor):
        return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device == self.device

    def autocast(self, dtype):
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    def memory_allocated(self):
        return 0

    @contextmanager
    def record(self, model, optimizer):
        yield SimpleNamespace(phase=lambda name: nullcontext(), timeline=Timeline)


@pytest.fixture
def gpu():
    return VirtualGPU(CATALOG["T4"])


@pytest.fixture
def model(gpu):
    return build_on_gpu(CONFIG, torch.float16, "sdpa", None, gpu)


@pytest.fixture
def cpu(monkeypatch):
    gpu = CpuGPU()
    monkeypatch.setattr(helpers.training, "current_gpu", lambda: gpu)
    return gpu


@pytest.fixture
def real_model(cpu):
    torch.manual_seed(0)
    return build_on_gpu(CONFIG, torch.float32, "eager", None, cpu)


def data(size=8, sequence_length=16, vocab_size=512):
    return make_dummy_dataset(size=size, sequence_length=sequence_length, vocab_size=vocab_size)


def arguments(batch_size=4, **others):
    return SimpleNamespace(per_device_train_batch_size=batch_size, **others)


# -- a run on the virtual GPU -----------------------------------------------------------------------------------------


def test_what_a_run_leaves(gpu, model, capsys):
    weights = gpu.memory_allocated()
    log = train_model(model, data(), arguments())
    count = count_parameters(model)
    assert (log.optimizer_steps, log.micro_steps, log.losses) == (2, 2, [])
    assert (log.gradients_bytes, log.optimizer_bytes) == (2 * count, 4 * count)
    assert [phase.name for phase in log.timeline.phases] == ["forward", "backward", "step"] * 2
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"GPU 메모리 사용량: {log.allocated_bytes / 2**30:.3f} GB",
        f"옵티마이저 상태의 메모리 사용량: {4 * count / 2**30:.3f} GB",
        f"그레이디언트의 메모리 사용량: {2 * count / 2**30:.3f} GB",
    ]
    assert log.timeline.at_end(2) == log.timeline.at_end(5) | {"other": log.timeline.at_end(2)["other"]}
    assert sum(log.timeline.at_end(2).values()) == log.allocated_bytes
    release_memory(gpu)
    assert gpu.memory_allocated() == weights
    assert all(p.grad is None for p in model.parameters())


def test_it_prints_english(model, capsys):
    set_language("en")
    try:
        train_model(model, data(), arguments())
    finally:
        set_language("ko")
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "GPU memory used",
        "Optimizer state",
        "Gradients",
    ]


def test_the_cache_is_off_for_training_and_as_before_after_it(model):
    model.config.use_cache = True
    without = train_model(model, data(), arguments()).timeline.at_end(0)
    assert model.config.use_cache is True
    kept = train_model(model, data(), arguments(use_cache=True)).timeline.at_end(0)
    assert kept["activations"] != without["activations"]  # keys and values are copied into the cache
    with pytest.raises(ValueError, match="배치 크기"):
        train_model(model, data(), arguments(9))
    assert model.config.use_cache is True


def test_checkpointing_takes_less(model):
    plain = train_model(model, data(), arguments()).timeline
    log = train_model(model, data(), arguments(gradient_checkpointing=True))
    assert log.timeline.at_end(0)["activations"] < plain.at_end(0)["activations"]
    assert log.gradients_bytes == 2 * count_parameters(model)


def test_checkpointing_where_there_is_none(model):
    model.activation_checkpointing_enable = lambda kwargs: (_ for _ in ()).throw(ValueError("not supported"))
    with pytest.raises(ValueError, match="이 모델은 그레이디언트 체크포인팅을 지원하지 않는다"):
        enable_checkpointing(model)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_mixed_precision_keeps_fp32_weights(gpu, dtype):
    model = build_on_gpu(CONFIG, torch.float32, "sdpa", None, gpu)
    mixed = train_model(model, data(sequence_length=32), arguments(**{dtype: True}))
    plain = train_model(model, data(sequence_length=32), arguments())
    assert mixed.gradients_bytes == plain.gradients_bytes == 4 * count_parameters(model)
    assert mixed.timeline.at_end(0)["activations"] < plain.timeline.at_end(0)["activations"]


def test_transformers_own_arguments(model, tmp_path):
    from transformers import TrainingArguments

    args = TrainingArguments(
        output_dir=tmp_path,
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        report_to=[],
    )
    log = train_model(model, data(), args)
    assert (log.micro_steps, log.optimizer_steps) == (8, 4)
    assert log.optimizer_bytes == 4 * count_parameters(model)


# -- optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OPTIMIZERS, *(alias for aliases in OPTIMIZERS.values() for alias in aliases)])
def test_optimizers_and_their_names_in_transformers(name, model):
    optimizer = make_optimizer(name.upper(), model)
    ours = next(key for key, aliases in OPTIMIZERS.items() if name in (key, *aliases))
    kinds = BITSANDBYTES | {"adamw": "AdamW", "adamw_fused": "AdamW", "sgd": "SGD", "adafactor": "Adafactor"}
    assert type(optimizer).__name__ == kinds[ours]
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}
    assert estimate_memory_of_optimizer(optimizer) == 0


def test_the_trainer_s_arguments_keep_embeddings_in_32_bits(model, tmp_path):
    from transformers import TrainingArguments

    given = {"per_device_train_batch_size": 2, "max_steps": 1}
    theirs = TrainingArguments(str(tmp_path), optim="adamw_bnb_8bit", use_cpu=True, report_to=[], **given)
    loop = SimpleNamespace(optim="adamw_bnb_8bit", **given)
    trainer, own = (train_model(model, data(), args).optimizer_bytes for args in (theirs, loop))
    embeddings = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding))
    assert trainer - own > 5.9 * embeddings


def test_transformers_knows_the_names_too():
    from transformers.training_args import OptimizerNames

    known = {member.value for member in OptimizerNames}
    missing = {alias for aliases in OPTIMIZERS.values() for alias in aliases} - known
    assert missing <= {"adamw_hf", "adamw_8bit"}  # older names


def test_only_what_is_trained_is_optimized(model):
    for parameter in list(model.parameters())[1:]:
        parameter.requires_grad_(False)
    [group] = make_optimizer("adamw", model).param_groups
    assert len(group["params"]) == 1
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(ValueError, match="학습할 파라미터가 하나도 없다"):
        train_model(model, data(), arguments())


def test_the_estimates_count_what_is_there(model):
    assert estimate_memory_of_gradients(model) == 0
    parameter = next(model.parameters())
    parameter.grad = torch.empty_like(parameter)
    assert estimate_memory_of_gradients(model) == parameter.nbytes


# -- accumulation -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 6), st.one_of(st.integers(1, 3), st.floats(0.1, 3.0)))
def test_every_sample_is_in_one_group_of_an_epoch(size, batch_size, accumulation, epochs):
    setting = run._Setting.read(
        arguments(batch_size, gradient_accumulation_steps=accumulation, num_train_epochs=epochs)
    )
    groups = [[batch.tolist() for batch in group] for group in run._groups(list(range(size)), setting)]
    per_epoch = math.ceil(math.ceil(size / batch_size) / accumulation)
    assert len(groups) == math.ceil(epochs * per_epoch)
    for start in range(0, len(groups) - per_epoch + 1, per_epoch):
        epoch = [sample for group in groups[start : start + per_epoch] for batch in group for sample in batch]
        assert epoch == list(range(size))
    assert all(len(group) == accumulation for i, group in enumerate(groups) if (i + 1) % per_epoch)


@pytest.mark.parametrize(("max_steps", "steps"), [(1, 1), (2, 2), (5, 5), (-1, 2), (0, 2), (None, 2)])
def test_max_steps_goes_before_epochs(max_steps, steps, model):
    log = train_model(model, data(), arguments(max_steps=max_steps, num_train_epochs=1))
    assert log.optimizer_steps == steps


def gradients_at_each_step(model, dataset, args, monkeypatch):
    """The gradients that each optimizer step sees; the weights stay as they are (learning rate 0)."""
    seen = []
    step = torch.optim.SGD.step

    def look(optimizer, *rest, **others):
        seen.append({name: p.grad.clone() for name, p in model.named_parameters()})
        return step(optimizer, *rest, **others)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", look)
        train_model(model, dataset, args)
    return seen


@pytest.mark.parametrize(
    ("size", "batch_size", "accumulation", "groups"),
    [
        (8, 4, 2, [8]),
        (8, 2, 4, [8]),
        (10, 2, 2, [4, 4, 2]),  # a shorter last group
        (6, 4, 2, [6]),  # a smaller last micro-batch: each sample still counts once
        (7, 2, 3, [6, 1]),
        (5, 2, 8, [5]),  # accumulation beyond the data
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_big_batch(
    size, batch_size, accumulation, groups, checkpointing, real_model, monkeypatch
):
    dataset = data(size)
    accumulated = gradients_at_each_step(
        real_model,
        dataset,
        arguments(
            batch_size,
            gradient_accumulation_steps=accumulation,
            optim="sgd",
            learning_rate=0.0,
            gradient_checkpointing=checkpointing,
        ),
        monkeypatch,
    )
    assert len(accumulated) == len(groups)
    start = 0
    for group, gradients in zip(groups, accumulated, strict=True):
        rows = [dataset[i] for i in range(start, start + group)]
        [big] = gradients_at_each_step(real_model, rows, arguments(group, optim="sgd", learning_rate=0.0), monkeypatch)
        start += group
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, big[name], atol=1e-6, rtol=1e-4, msg=name)


def test_a_real_model_learns(real_model):
    log = train_model(real_model, data(4), arguments(2, num_train_epochs=20, learning_rate=1e-2))
    assert len(log.losses) == log.micro_steps == 40
    assert log.losses[-1] < log.losses[0] - 1
    assert log.optimizer_bytes == 2 * log.gradients_bytes == 8 * count_parameters(real_model)


def test_bf16_on_a_real_model(real_model):
    log = train_model(real_model, data(4), arguments(2, bf16=True))
    assert all(math.isfinite(loss) for loss in log.losses)
    assert {p.dtype for p in real_model.parameters()} == {torch.float32}


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "4", None])
@pytest.mark.parametrize("name", ["per_device_train_batch_size", "gradient_accumulation_steps"])
def test_what_is_no_number_of_samples(name, value, model):
    args = SimpleNamespace(**({"per_device_train_batch_size": 4} | {name: value}))
    with pytest.raises(ValueError, match=f"{name}={value!r}: 1 이상의 정수여야 한다"):
        train_model(model, data(), args)


@pytest.mark.parametrize(
    ("dataset", "args", "message"),
    [
        ({}, {"batch_size": 9}, "배치 크기 9가 데이터 8개보다 크다"),
        ({}, {"batch_size": 10**9}, "배치 크기 1000000000가 데이터 8개보다 크다"),
        ({"sequence_length": 33}, {}, "시퀀스 길이 33가 이 모델의 최대 길이 32보다 길다"),
        ({"vocab_size": 30000}, {}, "이 모델의 어휘 512개를 벗어난다"),
        ({}, {"optim": "adamv"}, "'adamv': 모르는 옵티마이저 이름이다. 혹시 adamw"),
    ],
)
def test_what_does_not_fit_the_model(dataset, args, message, gpu, model):
    weights = gpu.memory_allocated()
    with pytest.raises(ValueError, match=message):
        train_model(model, data(**dataset), arguments(**args))
    assert gpu.memory_allocated() == weights


def test_an_empty_data_set(model):
    with pytest.raises(ValueError, match="데이터 0개보다 크다"):
        train_model(model, [], arguments(1))


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_the_largest_id_is_looked_for_everywhere(name, model):
    rows = [{"input_ids": torch.zeros(16, dtype=torch.int64), "labels": torch.full((16,), -100)} for _ in range(8)]
    train_model(model, rows, arguments())
    rows[-1][name] = torch.full((16,), 511)
    train_model(model, rows, arguments())
    rows[-1][name] = torch.full((16,), 512)
    with pytest.raises(ValueError, match="토큰 번호 512가 이 모델의 어휘 512개를 벗어난다"):
        train_model(model, rows, arguments())


def test_a_model_that_is_on_no_gpu(gpu):
    with pytest.raises(ValueError, match="모델이 GPU에 있지 않다"):
        train_model(torch.nn.Linear(2, 2), data(), arguments())
    with pytest.raises(ValueError, match="모델이 GPU에 있지 않다"):
        train_model(torch.nn.Module(), data(), arguments())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("phase", ["forward", "backward", "step"])
def test_out_of_memory_leaves_nothing_but_the_model(phase, checkpointing):
    gpu = VirtualGPU(CATALOG["T4"])
    # Large enough that its phases lie further apart than the caching allocator's segments.
    config = GPTNeoXConfig(**CONFIG.to_diff_dict() | {"hidden_size": 1024, "intermediate_size": 4096})
    model = build_on_gpu(config, torch.float16, "sdpa", None, gpu)
    weights = gpu.memory_allocated()
    dataset = data(size=64, sequence_length=32)
    train = partial(train_model, model, dataset, arguments(32, gradient_checkpointing=checkpointing))
    peaks = {"load": weights} | {p.name: p.peak_bytes for p in train().timeline.phases[:3]}
    release_memory(gpu)
    before = list(peaks)[list(peaks).index(phase) - 1]
    gpu.meter.allocator.capacity_bytes = (peaks[before] + peaks[phase]) // 2
    log = TrainingLog()
    with pytest.raises(torch.OutOfMemoryError) as held:
        train(log=log)
    assert log.timeline.phases[-1].name == phase
    assert log.timeline.peak_bytes <= gpu.meter.allocator.capacity_bytes
    release_memory(gpu)
    # A notebook keeps the error as `held` does. What a hook of checkpointing was recomputing stays with it.
    recomputing = checkpointing and phase == "backward"
    assert held.value.__traceback__ and (gpu.memory_allocated() == weights) != recomputing
    gpu.meter.allocator.capacity_bytes = None
    assert train().optimizer_steps == 2  # as if nothing had been: up to PyTorch 2.12 the hooks themselves stayed, too
    del held
    release_memory(gpu)
    assert gpu.memory_allocated() == weights


@pytest.mark.parametrize("holds", [False, True])
def test_the_loss_goes_after_backward_unless_it_has_a_name(holds):
    """With adapters a checkpoint's input, and its gradient, hang on the loss: with it they stay."""
    report = predict_memory(
        model_id="gpt2", gpu="L4", full=True, batch_size=2, gradient_accumulation_steps=2, sequence_length=128,
        precision="bf16", optimizer="adamw_fused", peft="lora", gradient_checkpointing=True, holds_outputs=holds,
    )  # fmt: skip
    activations = CATEGORIES.index("activations")
    left = [int(p.live[0][activations]) for p in report.timeline.phases if p.name in ("forward", "step")][1:]
    logits, embedded = 2 * 128 * 50_257 * 2, 2 * 128 * 768 * 2
    assert min(left) > logits + embedded if holds else not any(left)
