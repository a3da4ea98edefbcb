"""LoRA over weights in 8 bits (LLM.int8), and modules that are trained whole beside adapters (`modules_to_save`)."""

import gc
import gzip
import json
import weakref
from pathlib import Path

import pytest
import torch
from bitsandbytes.autograd._functions import MatMul8bitLt
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, LlamaConfig

from helpers import gpu_memory_experiment, load_model_and_tokenizer, predict_memory
from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.errors import NoSuchLayer, NotSupported, WrongValue
from virtual_gpu.models.quantized import VirtualLinear8bit, _real_8bit_layer
from virtual_gpu.shards.rank_step import rank_step
from virtual_gpu.step.budget import budget_of
from virtual_gpu.step.flops import training_flops
from virtual_gpu.step.largest import _held_bytes
from virtual_gpu.step.predict import model_bytes
from virtual_gpu.step.setting import Setting
from virtual_gpu.step.states import states_of

RECORDED = Path(__file__).resolve().parent.parent / "benchmarks" / "records" / "h100-2026-11-23"
BLOCKS, WIDTH, MIDDLE, WORDS = 3, 256, 512, 2048
LORA = {"peft": "lora", "precision": "autocast_bf16", "lora_targets": "all-linear"}
EIGHT = LORA | {"load_in_8bit": True}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=BLOCKS, num_attention_heads=4, intermediate_size=MIDDLE,
        tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    config.save_pretrained(folder)
    return str(folder)


def predicted(model, **setting):
    return predict_memory(**{"batch_size": 2, "sequence_length": 128, "gpu": "A100-80GB"} | setting, model_id=model)


@pytest.mark.parametrize(
    ("row", "more"),
    [
        ("1.3b-lora base", {}),
        ("1.3b-lora int8", {"load_in_8bit": True}),
        # Of 16-bit weights under autocast the type makes no difference to a byte, and fp16 ones a scaler would refuse.
        ("1.3b-lora modules_to_save", {"modules_to_save": ("embed_in", "lm_head"), "precision": "autocast_bf16"}),
    ],
)
def test_an_h100_held_as_much(row, more):
    """The program of benchmarks/levers there, by transformers, peft and bitsandbytes themselves."""
    measured = {}
    for name in ("claims.jsonl.gz", "claims-levers.jsonl.gz"):
        with gzip.open(RECORDED / name, "rt", encoding="utf-8") as lines:
            rows = [row for row in map(json.loads, lines) if row["case"].startswith("levers-")]
        measured |= {row["row"]: row["most"][1] for row in rows if "most" in row}
    setting = {"precision": "autocast_fp16", "peft": "lora", "lora_rank": 16, "lora_targets": "all-linear"}
    setting |= {"lora_dropout": 0.0, "optimizer": "adamw_fused", "sequence_length": 256} | more
    found = predict_memory(batch_size=16, model_id="EleutherAI/polyglot-ko-1.3b", gpu="H100", **setting)
    assert abs(found.peak_bytes - measured[row]) < 1e-4 * measured[row]


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_holds_what_bitsandbytes_holds(bias):
    linear = torch.nn.Linear(96, 40, bias=bias, dtype=torch.float16)
    real = _real_8bit_layer(linear).to("cpu")
    real(torch.ones(1, 3, 96, dtype=torch.float16))  # the weight's scales go to the layer's state then
    gpu = VirtualGPU(CATALOG["T4"], limited=False)
    fake = gpu.place(VirtualLinear8bit(linear))
    theirs = [real.weight, real.state.SCB, *([real.bias] if bias else [])]
    ours = [fake.weight, fake.scales, *([fake.bias] if bias else [])]
    assert [(t.shape, t.dtype) for t in ours] == [(t.shape, t.dtype) for t in theirs]
    assert model_bytes(fake) == model_bytes(real)
    x = gpu.place(torch.ones(2, 3, 96, dtype=torch.float16)).requires_grad_()
    with gpu:
        out = fake(x)
        out.sum().backward()
    assert (out.shape, out.dtype, x.grad.shape, x.grad.dtype) == ((2, 3, 40), x.dtype, x.shape, x.dtype)


@pytest.mark.parametrize(("reentrant", "stays"), [(False, True), (True, False)])
def test_bitsandbytes_itself_keeps_the_input_of_a_checkpointed_product(reentrant, stays):
    """It hangs on the node, where checkpointing does not see it; a first forward without a graph has no node.

    The function that a card has: a CPU's layer would take another one (`MatMul8bitFp`), which keeps it too.
    """
    layer = _real_8bit_layer(torch.nn.Linear(16, 8, bias=False, dtype=torch.float16)).to("cpu")
    layer.init_8bit_state()
    inputs = []

    def block(x):
        doubled = x * 2
        inputs.append(weakref.ref(doubled))
        return MatMul8bitLt.apply(doubled, layer.weight, None, None, layer.state)

    out = checkpoint(block, torch.ones(1, 3, 16, dtype=torch.float16, requires_grad=True), use_reentrant=reentrant)
    gc.collect()
    assert (inputs[0]() is not None) == stays
    out.sum().backward()
    assert len(inputs) == (1 if stays else 2)  # with nothing to unpack nothing is computed again


def test_checkpointing_keeps_inputs_unless_it_is_reentrant(small):
    """Those of all layers but one block's: q, k and v have one, o one, gate and up one, down one of its own width."""
    tokens, found = 2 * 128, {}
    for setting in (LORA, EIGHT, EIGHT | {"rest_in_fp32": False}):
        both = [
            predicted(small, **setting, gradient_checkpointing=True, use_reentrant=reentrant).peak_bytes
            for reentrant in (False, True)
        ]
        found[setting.get("load_in_8bit", False), setting.get("rest_in_fp32")] = both
    of_a_block = tokens * (3 * WIDTH + MIDDLE)
    assert found[False, None][0] == found[False, None][1]
    kept, dropped = found[True, False]
    assert (BLOCKS - 1) * 2 * of_a_block <= kept - dropped <= BLOCKS * 4 * of_a_block
    assert found[True, None][0] - found[True, None][1] > kept - dropped  # beside fp32 norms inputs are fp32


def test_8_bits_are_a_byte_and_the_rest_is_as_it_is_asked_for(small):
    weights = BLOCKS * (4 * WIDTH * WIDTH + 3 * WIDTH * MIDDLE)
    scales = BLOCKS * 4 * (4 * WIDTH + 2 * MIDDLE + WIDTH)
    rest = 2 * WORDS * WIDTH + (2 * BLOCKS + 1) * WIDTH
    whole = predicted(small, **LORA).parameters_bytes
    adapters = whole - 2 * (weights + rest)
    for rest_in_fp32, size in ((True, 4), (False, 2)):
        held = predicted(small, **EIGHT, rest_in_fp32=rest_in_fp32).parameters_bytes
        assert held == weights + scales + size * rest + adapters
        setting = Setting(1, model_id=small, **EIGHT, rest_in_fp32=rest_in_fp32)
        assert states_of(setting)["parameters"] == held
        assert _held_bytes(setting) <= held + rest


def test_what_is_trained_whole_is_a_copy_with_gradient_and_state(small):
    ends, table = ("embed_tokens", "lm_head"), WORDS * WIDTH
    for more, each in (({}, 2), ({"trained_dtype": "fp32"}, 4)):
        without, whole = (
            predicted(small, **LORA, **saved, optimizer="adamw") for saved in ({}, {"modules_to_save": ends} | more)
        )
        assert whole.parameters_bytes - without.parameters_bytes == 2 * each * table
        assert whole.gradients_bytes - without.gradients_bytes == 2 * each * table
        assert whole.optimizer_bytes - without.optimizer_bytes == 2 * 2 * each * table
    fused = [predicted(small, **LORA, modules_to_save=["lm_head"], fused_lm_head=on) for on in (False, True)]
    assert fused[1].peak_bytes != fused[0].peak_bytes and fused[0].parameters_bytes == fused[1].parameters_bytes
    setting = {"batch_size": 1, "model_id": small, "sequence_length": 64} | LORA
    head = training_flops(**setting, modules_to_save=["lm_head"]).total - training_flops(**setting).total
    assert head == 2 * 64 * table  # of its own gradient


def test_of_several_gpus_each_has_its_part_of_the_copy(small):
    """accelerate makes it fp32 beside 16-bit weights, and leaves it in 16 bits beside 4-bit ones."""
    for method, each in (("lora", 4), ("qlora", 2)):
        without, whole = (
            rank_step(small, 4, 3, peft=method, modules_to_save=saved, as_accelerate=True, sequence_length=64).memory
            for saved in ((), ("embed_tokens", "lm_head"))
        )
        assert whole.parameters - without.parameters == whole.gradients - without.gradients
        assert whole.parameters - without.parameters == 2 * each * WORDS * WIDTH // 4
        assert whole.momentum - without.momentum == whole.variance - without.variance
        assert whole.momentum - without.momentum == 2 * each * WORDS * WIDTH // 4
    with pytest.raises(NotSupported, match="modules_to_save"):
        rank_step("Qwen/Qwen3-0.6B", 4, 3, peft="lora", modules_to_save=["lm_head"])
    assert rank_step("Qwen/Qwen3-0.6B", 4, 3, peft="lora", modules_to_save=["norm"], sequence_length=64).card_bytes > 0


def test_an_experiment_takes_them_too(small, capsys):
    setting = {"sequence_length": 64, "gradient_checkpointing": True, "peft": "lora", "load_in_8bit": True}
    setting |= {"batch_size": 1, "model_id": small, "gpu": "T4", "modules_to_save": ["lm_head"]}
    report, foretold = gpu_memory_experiment(**setting), predict_memory(**setting)
    assert report.fits and report.parameters_bytes == foretold.parameters_bytes
    assert report.peak_bytes == foretold.peak_bytes
    capsys.readouterr()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"load_in_8bit": True}, "load_in_8bit=True, peft=None"),
        ({"load_in_8bit": True, "peft": "qlora"}, "load_in_8bit=True, peft='qlora'"),
        ({"load_in_8bit": "yes", "peft": "lora"}, "load_in_8bit"),
        ({"peft": "lora", "modules_to_save": "lm_head"}, "modules_to_save='lm_head'"),
        ({"peft": "lora", "modules_to_save": [3]}, "modules_to_save"),
        ({"peft": "lora", "modules_to_save": ["lm_head"], "precision": "autocast_fp16"}, "GradScaler"),
        ({"gradient_checkpointing": True, "use_reentrant": True, "kept_results": ("attention",)}, "use_reentrant"),
        ({"gradient_checkpointing": True, "use_reentrant": 1.5}, "use_reentrant"),
        ({"peft": "lora", "modules_to_save": ["lm_head"], "trained_dtype": "fp8"}, "trained_dtype"),
    ],
)
def test_what_cannot_be_is_refused(setting, said):
    with pytest.raises(WrongValue, match=said):
        Setting(1, **setting)


def test_what_says_nothing_is_dropped():
    assert Setting(1, modules_to_save=["lm_head"], use_reentrant=True) == Setting(1)
    saved = Setting(1, peft="qlora", precision="autocast_fp16", modules_to_save=["b", "a"])  # fp32 in QLoRA
    assert saved.modules_to_save == ("a", "b") and "통째로: a, b" in saved.title
    assert "use_reentrant" not in Setting(1, gradient_checkpointing=True, use_reentrant=True).title


def test_a_module_that_is_not_there_is_named_with_those_that_are(small):
    with pytest.raises(NoSuchLayer, match=r"lm_heads.*embed_tokens, lm_head"):
        predicted(small, **LORA, modules_to_save=["lm_heads"])
    with pytest.raises(NoSuchLayer, match="q_proj"):  # its weight is int8
        predicted(small, **EIGHT, modules_to_save=["q_proj"])


def test_a_model_with_conv1d_and_biases_trains_in_8_bits():
    config = GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=2, n_positions=64)
    found = predict_memory(batch_size=1, model_id=config, sequence_length=32, gpu="T4", peft="lora", load_in_8bit=True)
    assert 0 < found.parameters_bytes < found.peak_bytes


@pytest.mark.parametrize("objective", ["sft", "dpo", "grpo"])
def test_a_tied_head_is_copied_apart_on_one_gpu(objective):
    setting = {"model_id": "Qwen/Qwen3-0.6B", "batch_size": 2, "sequence_length": 64, "objective": objective} | LORA
    without, whole = (
        predict_memory(**setting, modules_to_save=names, gpu="A100-80GB") for names in ((), ("embed_tokens", "lm_head"))
    )
    assert whole.parameters_bytes - without.parameters_bytes == 2 * 2 * 151936 * 1024


def test_embeddings_that_are_trained_whole_have_fp32_states_as_the_trainer_gives_them(small):
    """`optim_bits: 32` of every embedding in the model (transformers 5.23, trainer.py), a copy among them."""
    eight = {"optimizer": "adamw_8bit", "modules_to_save": ["embed_tokens"]}
    plain, of_trainer = (
        predicted(small, **LORA, **eight, fp32_embedding_state=on).optimizer_bytes for on in (False, True)
    )
    assert of_trainer - plain > 5.8 * WORDS * WIDTH
    assert not Setting(1, optimizer="adamw_8bit", fp32_embedding_state=True, **LORA).fp32_embedding_state


def test_reentrant_checkpoints_go_to_the_cpu_too(small):
    setting = EIGHT | {"gradient_checkpointing": True, "use_reentrant": True}
    here, there = (predicted(small, **setting, offload_checkpoints=on).peak_bytes for on in (False, True))
    assert there < here
    budget = budget_of(Setting(1, model_id=small, sequence_length=64, use_reentrant=True, gradient_checkpointing=True),
                       CATALOG["T4"])  # fmt: skip
    assert not budget.setting.use_reentrant  # what is kept is told by contexts, which it does not take


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"peft": "qlora", "load_in_8bit": True}, "load_in_8bit=True, peft='qlora'"),
        ({"load_in_8bit": True}, "load_in_8bit=True, peft=None"),
        ({"peft": "lora", "modules_to_save": "lm_head"}, "modules_to_save='lm_head'"),
    ],
)
def test_a_loader_refuses_what_a_setting_does(wrong, said):
    with pytest.raises(WrongValue, match=said):
        load_model_and_tokenizer("gpt2", gpu="T4", quiet=True, **wrong)
