"""A plan's files, of every kind: they hold what the plan counted, train alike, and say only what the plan says."""

import ast
import importlib.util
import json
import re
import shlex
from dataclasses import replace

import pytest
import torch
import yaml
from forked import free_port, run_forked
from safetensors.torch import load_file
from transformers import GPTNeoXConfig, GptOssConfig, LlamaConfig, Qwen3Config
from transformers.integrations import sdpa_attention

from helpers.models import byte_tokenizer
from virtual_gpu.errors import NotSupported, UnknownName
from virtual_gpu.models.attention import REPEAT_KV
from virtual_gpu.models.build import build_model
from virtual_gpu.plan import Plan, Recipe
from virtual_gpu.plan.command import main
from virtual_gpu.plan.files import KINDS, files_of
from virtual_gpu.plan.files.settings import literal
from virtual_gpu.plan.host import host_need
from virtual_gpu.plan.measure import measure
from virtual_gpu.plan.request import make_request
from virtual_gpu.program.runner import run
from virtual_gpu.shards.fake_rank import run_rank
from virtual_gpu.shards.layout import CONVENTIONS, Layout
from virtual_gpu.step.optimizers import OPTIMIZERS

ALONE = [kind for kind in KINDS if kind != "deepspeed"]  # it only splits
WORDS, WIDTH, TOKENS = 4096, 512, 4 * 128  # of a micro-batch
TEXT = "대한민국의 수도는 서울이다.\n"


def llama(folder, family=LlamaConfig, **more):
    """A small Llama's configuration (or another family's) and tokenizer, as `from_pretrained` finds them.

    The virtual card reads no weights. No tensor of it leaves a rest in its block of the allocator: in whatever order it
    is loaded, it takes the same.
    """
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 4}
    config = family(**sizes | {"num_attention_heads": 8, "max_position_embeddings": 128} | more)
    config.architectures = [family.__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return config


def plan_of(model, recipe, way=(4, 2), gpu="T4", gpus=1, length=128, **more):
    """That recipe as a plan, measured."""
    batch = way[0] * way[1] * gpus // (recipe.tensor_parallel * recipe.context_parallel)
    return measure(make_request(str(model), gpu, gpus, length=length, batch=batch, **more), recipe, *way)


def unmeasured(recipe, gpus=1, model="gpt2", gpu="L4"):
    """A plan whose files are written only."""
    request = make_request(model, gpu, gpus, length=32, batch=max(4, gpus)).of(recipe)
    return Plan(request, recipe, 2, max(2 // gpus, 1), 0, {}, 0, 0, 0, None)


def on_the_virtual_card(plan, kind, folder):
    """What the files of that kind hold at their peak."""
    (folder / "text.txt").write_text(TEXT * 200, encoding="utf-8")
    plan.save(folder / "plan", force=True, kind=kind)
    words = ["--text", str(folder / "text.txt"), "--output", str(folder / "out")]
    report = run(str(folder / "plan" / "train.py"), words, gpu=plan.request.gpu)
    assert report.status == "fits" and report.steps == 3, report.text()
    return report.allocated


def one_rank(plan, launch, folder):
    """The report of one rank of the launched files on a virtual card."""
    cards = ["--gpu", plan.request.gpu, "--gpus", str(plan.request.gpus)]
    virtual = [*cards, "--no-advise", "--report", str(folder / "report.json")]
    status, _, err = run_forked(["-m", "virtual_gpu", "run", *virtual, "--", *launch], folder=folder / "plan")
    assert status == 0, err[-2000:]
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["steps"] == 3
    return report


# -- what they hold ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "accelerate"])
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("full", "bf16", "adamw_8bit", checkpointing=True),
        Recipe("lora", "mixed_bf16", "adamw_fused", checkpointing=True),
        Recipe("qlora", "mixed_fp16", "adamw_fused"),
        Recipe("qlora", "mixed_fp16", "adamw_fused", checkpointing=True, rest_in_fp32=False),
        Recipe("full", "mixed_fp16", "adamw_fused", fused_lm_head=True),
    ],
    ids=lambda recipe: recipe.method + "-fused" * recipe.fused_lm_head + "-16" * (not recipe.rest_in_fp32),
)
def test_a_loop_holds_what_the_plan_counted(kind, recipe, tmp_path):
    llama(tmp_path / "model")
    plan = plan_of(tmp_path / "model", recipe, gpu="T4" if "fp16" in recipe.precision else "L4")
    held = on_the_virtual_card(plan, kind, tmp_path)
    # A batch, numbers of steps; on a card TRL's head copies the hidden states that have a loss.
    assert abs(held - plan.tensors_bytes) < 2**14 + recipe.fused_lm_head * TOKENS * WIDTH * 2


WHOLE = ("embed_tokens", "lm_head")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALONE)
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_what_is_trained_whole_is_in_the_files(kind, method, tmp_path):
    """Copies of embeddings and head, with their gradients and states, beside the adapters."""
    llama(tmp_path / "model", tie_word_embeddings=False)
    recipe = Recipe(method, "mixed_bf16", "adamw_fused", checkpointing=True, fused_lm_head=kind == "trl")
    recipe = replace(recipe, rest_in_fp32=method == "lora")
    plain, whole = (plan_of(tmp_path / "model", recipe, gpu="L4", modules_to_save=saved) for saved in ((), WHOLE))
    assert whole.tensors_bytes - plain.tensors_bytes > 2 * 4 * 2 * WORDS * WIDTH  # the copy, and two moments
    held = on_the_virtual_card(whole, kind, tmp_path)
    # TRL has adapters on bf16 weights in bf16.
    assert abs(held - whole.tensors_bytes) < (2**14 if kind != "trl" else 0.03 * whole.tensors_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALONE)
@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_8bit"])
def test_8_bit_states_are_those_of_the_trainer(kind, optimizer, tmp_path):
    """What is remembered of embeddings is in 32 bits, in the Trainer and in the loops; half of this model is one."""
    llama(tmp_path / "model", vocab_size=4 * WORDS)
    recipe = Recipe("full", "bf16", optimizer, checkpointing=True, fused_lm_head=kind == "trl")  # it has its head
    plan = plan_of(tmp_path / "model", recipe, gpu="L4")
    assert plan.paged_bytes + plan.at_peak["optimizer"] > 2 * 4 * 4 * WORDS * WIDTH
    assert abs(on_the_virtual_card(plan, kind, tmp_path) - plan.tensors_bytes) < 2**15


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALONE)
def test_weights_beside_4_bits_stay_in_16(kind, tmp_path):
    """Embedding and head are most of it. TRL never makes fp32 of them, and has its head: its bytes are the plan's."""
    llama(tmp_path / "model", vocab_size=32 * WORDS)
    recipe = Recipe("qlora", "mixed_fp16", "adamw_fused", checkpointing=True, fused_lm_head=True, rest_in_fp32=False)
    plan = plan_of(tmp_path / "model", recipe)
    held = on_the_virtual_card(plan, kind, tmp_path)
    assert abs(held - plan.tensors_bytes) < 0.01 * held
    upcast = measure(plan.request, replace(recipe, rest_in_fp32=True), 4, 2)
    assert upcast.tensors_bytes - held > 2 * 32 * WORDS * WIDTH * 2


KEPT = ("attention", f"{WIDTH}x{4 * WIDTH}:3")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, kind",
    [
        pytest.param(method, kind, marks=() if (method == "lora") == (kind in ("trl", "torch")) else pytest.mark.stress)
        for method in ("lora", "qlora")
        for kind in ALONE
    ],
)
def test_what_blocks_keep_is_in_the_files(kind, method, tmp_path):
    llama(tmp_path / "model")
    recipe = Recipe(method, "mixed_bf16", "adamw_fused", checkpointing=True, fused_lm_head=True, kept=KEPT)
    plans = [plan_of(tmp_path / "model", replace(recipe, kept=kept), gpu="L4") for kept in ((), KEPT)]
    held = [on_the_virtual_card(plan, kind, tmp_path) for plan in plans]
    room = plans[1].tensors_bytes - plans[0].tensors_bytes
    assert room > TOKENS * WIDTH * 2 * 16 and abs(held[1] - held[0] - room) < 2**14


MOVED = ("attention@cpu", f"{WIDTH}x{4 * WIDTH}:1", f"{WIDTH}x{4 * WIDTH}@cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, kind",
    [
        pytest.param(method, kind, marks=() if (method, kind) == ("lora", "torch") else pytest.mark.stress)
        for method in ("lora", "qlora", "full")
        for kind in ALONE
    ],
)
def test_what_blocks_send_to_the_cpu_is_in_the_files(kind, method, tmp_path):
    """Of the card only what stays there takes room: of the last block; and what is sent is what was counted."""
    llama(tmp_path / "model")
    recipe = Recipe(method, "mixed_bf16", "adamw_fused", checkpointing=True, fused_lm_head=True)
    plans = [plan_of(tmp_path / "model", replace(recipe, kept=kept), gpu="L4") for kept in ((), MOVED)]
    held = [on_the_virtual_card(plan, kind, tmp_path) for plan in plans]
    up, attention = TOKENS * 4 * WIDTH * 2, TOKENS * (WIDTH * 2 + 8 * 4)  # with a number in fp32 for each head
    assert held[1] - held[0] == plans[1].tensors_bytes - plans[0].tensors_bytes <= 2 * up
    assert 0 <= plans[1].offloaded_bytes - 2 * (3 * 2 * up + 4 * attention) <= 2 * 4 * 64  # a generator's numbers
    alike = replace(recipe, kept=("attention", f"{WIDTH}x{4 * WIDTH}"))
    assert plans[1].flops == measure(plans[1].request, alike, 4, 2).flops < plans[0].flops


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALONE)
def test_a_fused_head_is_in_the_files(kind, tmp_path):
    words = 32 * WORDS
    llama(tmp_path / "model", vocab_size=words)
    recipe = Recipe("lora", "mixed_fp16", "adamw_fused", checkpointing=True, fused_lm_head=True)
    plan = plan_of(tmp_path / "model", recipe)
    held = on_the_virtual_card(plan, kind, tmp_path)
    assert abs(held - plan.tensors_bytes) < 0.01 * held
    unfused = measure(plan.request, replace(recipe, fused_lm_head=False), 4, 2)
    assert unfused.tensors_bytes - held > TOKENS * words * 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "trainer"])
def test_a_model_without_sdpa_has_files_that_run(kind, tmp_path):
    """gpt-oss refuses it by name; transformers and the plan take what the model has."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 32, "num_local_experts": 4}
    llama(tmp_path / "model", GptOssConfig, num_key_value_heads=4, num_experts_per_tok=2, **sizes)
    plan = plan_of(tmp_path / "model", Recipe("lora", "mixed_bf16", "adamw_fused", checkpointing=True), gpu="L4")
    assert abs(on_the_virtual_card(plan, kind, tmp_path) - plan.tensors_bytes) < 2**15


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALONE)
def test_grouped_heads_are_repeated_before_ampere(kind, tmp_path):
    """Without the line the scores of every layer, whole, lie there in backward. What the script sets goes with it."""
    shipped = sdpa_attention.use_gqa_in_sdpa
    llama(tmp_path / "model", num_key_value_heads=2, max_position_embeddings=512)
    recipe = Recipe("lora", "mixed_fp16", "adamw_fused", fused_lm_head=kind == "trl")
    plan = plan_of(tmp_path / "model", recipe, (2, 2), length=512)
    held = on_the_virtual_card(plan, kind, tmp_path)
    assert abs(held - plan.tensors_bytes) < 0.01 * held
    assert sdpa_attention.use_gqa_in_sdpa is shipped
    script = tmp_path / "plan" / "train.py"
    script.write_text(script.read_text(encoding="utf-8").replace("sdpa_attention.use_gqa", "sdpa_attention.no_"))
    words = ["--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out")]
    as_shipped = run(str(script), words, gpu="T4").allocated
    assert as_shipped - held > 4 * 2 * 8 * 512**2 * 2  # layers, samples, heads
    assert "sdpa_attention" not in "".join(measure(make_request(
        str(tmp_path / "model"), "L4", length=512, batch=4), recipe, 2, 2).files(kind).values())  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe, words",
    [
        (Recipe("full", "mixed_fp16", "adamw_fused"), WORDS),
        (Recipe("lora", "mixed_bf16", "adamw_fused", checkpointing=True), 16 * WORDS),
        (Recipe("qlora", "mixed_fp16", "adamw_fused"), 16 * WORDS),
    ],
    ids=lambda value: value.method if isinstance(value, Recipe) else str(value),
)
def test_sft_makes_tiles_of_logits_and_no_whole_ones(recipe, words, tmp_path):
    llama(tmp_path / "model", vocab_size=words)
    plan = plan_of(tmp_path / "model", recipe, gpu="T4" if "fp16" in recipe.precision else "L4")
    held = on_the_virtual_card(plan, "trl", tmp_path)
    tile = TOKENS * 32_768 * 2
    if words > 32_768:  # the plan's logits and their gradient in fp32, and in 16 bits, are there no more
        assert held < plan.tensors_bytes - TOKENS * words * (4 + 4 + 2) + tile
    else:  # few words: its tile, and the gradients of head and hidden states in fp32, are the more
        assert held < plan.tensors_bytes + tile + (TOKENS + words) * WIDTH * 4


TOKENS_TOO = Recipe("full", "bf16", "adamw_fused", stage=3, tensor_parallel=2, sequence_parallel=True)
TORCHRUN = ("torchrun", "--nproc_per_node", "4")
ACCELERATE = ("accelerate", "launch", "--config_file", "accelerate.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, launcher, recipe, way",
    [
        ("torch", TORCHRUN, Recipe("full", "mixed_bf16", "adamw_fused", stage=3), (1, 4)),
        ("torch", TORCHRUN, Recipe("full", "bf16", "adamw_fused", stage=2, checkpointing=True), (2, 2)),
        ("torch", TORCHRUN, Recipe("lora", "mixed_fp16", "adamw_fused", stage=3, checkpointing=True), (4, 1)),
        ("torch", TORCHRUN, Recipe("full", "mixed_bf16", "adamw_fused", 3, True, fused_lm_head=True), (2, 2)),
        ("torch", TORCHRUN, Recipe("full", "mixed_bf16", "adamw_fused", stage=3), (4, 1)),  # no gradients wait
        ("torch", TORCHRUN, Recipe("full", "mixed_bf16", "adamw_fused", stage=3, tensor_parallel=2), (4, 1)),
        ("accelerate", ACCELERATE, Recipe("full", "mixed_bf16", "adamw_fused", stage=2), (4, 1)),
        ("torch", TORCHRUN, Recipe("full", "mixed_bf16", "adamw_fused", stage=3, tensor_parallel=2), (1, 4)),
        ("torch", TORCHRUN, Recipe("full", "bf16", "adamw_fused", 2, True, offload=True, tensor_parallel=2), (2, 2)),
        ("torch", TORCHRUN, Recipe("full", "bf16", "adamw_fused", stage=3, tensor_parallel=4), (2, 2)),
        ("accelerate", ACCELERATE, Recipe("full", "mixed_bf16", "adamw_fused", stage=3, checkpointing=True), (1, 4)),
        ("accelerate", ACCELERATE, Recipe("lora", "mixed_bf16", "adamw_fused", stage=0), (2, 2)),
        ("trainer", ACCELERATE, Recipe("lora", "mixed_fp16", "adamw_fused", stage=3, checkpointing=True), (4, 1)),
        ("trainer", ACCELERATE, Recipe("lora", "mixed_fp16", "adamw_fused", 3, True, fused_lm_head=True), (4, 1)),
        ("torch", TORCHRUN, Recipe("full", "mixed_bf16", "adamw_fused", stage=3, replicas=2), (1, 4)),
        ("torch", TORCHRUN, Recipe("full", "mixed_bf16", "adamw_fused", stage=3, context_parallel=2), (2, 4)),
        ("torch", TORCHRUN, Recipe("full", "bf16", "adamw_fused", 3, True, context_parallel=4), (4, 1)),
        ("torch", TORCHRUN, replace(TOKENS_TOO, precision="mixed_bf16"), (2, 4)),
        ("torch", TORCHRUN, replace(TOKENS_TOO, stage=2, checkpointing=True, offload=True), (2, 2)),
        ("torch", TORCHRUN, replace(TOKENS_TOO, tensor_parallel=4, checkpointing=True), (4, 1)),
        ("accelerate", ACCELERATE, Recipe("full", "mixed_bf16", "adamw_fused", 3, True, replicas=2), (2, 2)),
        ("trainer", ACCELERATE, Recipe("full", "bf16", "adamw_fused", 3, True, replicas=2), (2, 2)),
        ("accelerate", ACCELERATE, Recipe("full", "mixed_bf16", "adamw_fused", 3, True, fused_lm_head=True), (1, 4)),
    ],
    ids=lambda value: (
        f"{value.method}-{value.stage}-{value.tensor_parallel}-{value.replicas}" if isinstance(value, Recipe) else ""
    ),
)
def test_a_rank_holds_what_the_plan_counted(kind, launcher, recipe, way, tmp_path):
    """Launched as the script says, one of four ranks on a virtual card; of split weights the whole is never there.

    Embedding and head are a quarter of the model: which groups they are in, and how long they stay, shows.
    """
    words = 32_768 if recipe.stage else 258
    llama(tmp_path / "model", vocab_size=words, hidden_size=1024, intermediate_size=2816, max_position_embeddings=256)
    (tmp_path / "text.txt").write_text(TEXT * 1000, encoding="utf-8")
    plan = plan_of(tmp_path / "model", recipe, way, "T4" if "fp16" in recipe.precision else "L4", 4, length=256)
    plan.save(tmp_path / "plan", kind=kind)
    report = one_rank(plan, [*launcher, "train.py", "--text", str(tmp_path / "text.txt")], tmp_path)
    held = {phase: allocated for phase, (allocated, _) in report["phases"].items()}
    most = max(nbytes for phase, nbytes in held.items() if phase != "loading" or recipe.stage)
    # The plan is of a first step: backward's thread has its workspace in later ones.
    assert abs(most / plan.tensors_bytes - 1) < 0.03
    if not recipe.stage:  # DDP's first broadcast, in buckets of 250 MiB, is larger than so small a model's step
        return
    assert held["loading"] < 4 * plan.at_peak["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, launcher, recipe",
    [
        ("torch", TORCHRUN, Recipe("full", "mixed_bf16", "adamw_fused", 3, True, kept=("attention", "1024x2816"))),
        ("accelerate", ACCELERATE, Recipe("full", "bf16", "adamw_fused", 2, True, kept=("attention", "1024x2816:2"))),
        ("trainer", ACCELERATE, Recipe("lora", "mixed_bf16", "adamw_fused", 3, True, kept=("1024x2816:3",))),
        ("trainer", ACCELERATE, Recipe("qlora", "mixed_bf16", "adamw_fused", 3, True,
                                       kept=("attention@cpu", "1024x2816:2", "1024x2816@cpu"))),
    ],
    ids=["torchrun", "accelerate", "Trainer", "QLoRA"],
)  # fmt: skip
def test_what_blocks_of_shards_keep_is_in_the_files(kind, launcher, recipe, tmp_path):
    """Beside a rank that keeps nothing: so much more as was counted, where the peak is in the blocks."""
    llama(tmp_path / "model", hidden_size=1024, intermediate_size=2816, max_position_embeddings=1024)
    (tmp_path / "text.txt").write_text(TEXT * 3000, encoding="utf-8")
    held, counted = [], []
    for number, kept in enumerate(((), recipe.kept)):
        plan = plan_of(tmp_path / "model", replace(recipe, kept=kept), (4, 2), "L4", 4, length=1024)
        plan.save(tmp_path / f"{number}" / "plan", kind=kind)
        launch = [*launcher, "train.py", "--text", str(tmp_path / "text.txt")]
        report = one_rank(plan, launch, tmp_path / f"{number}")
        held.append(max(nbytes for phase, (nbytes, _) in report["phases"].items() if phase != "loading"))
        counted.append(plan.tensors_bytes)
    room = counted[1] - counted[0]
    # Backward's thread has its workspace in later steps; the plan is of a first one.
    assert room > 2**25 and abs(held[1] - held[0] - room) < 2**23 + 0.05 * room
    assert all(abs(one / other - 1) < 0.03 for one, other in zip(held, counted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, launcher, recipe",
    [
        ("trainer", ACCELERATE, Recipe("lora", "mixed_bf16", "adamw_fused", stage=3)),
        ("torch", TORCHRUN, Recipe("full", "mixed_bf16", "adamw_fused", stage=3, tensor_parallel=2)),
        ("accelerate", ACCELERATE, Recipe("full", "mixed_bf16", "adamw_fused", stage=3, cpu_offload=True)),
    ],
    ids=["adapters", "tensor parallel", "on the CPU"],
)
def test_what_fsdp2_splits_has_no_autocast(kind, launcher, recipe, tmp_path):
    """Of accelerate and of ours: its policy alone says 16 bits, in which LayerNorm computes, fp32 under autocast."""
    sizes = {"vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 2816, "max_position_embeddings": 256}
    llama(tmp_path / "model", GPTNeoXConfig, **sizes, num_hidden_layers=6)
    (tmp_path / "text.txt").write_text(TEXT * 1000, encoding="utf-8")
    plan = plan_of(tmp_path / "model", recipe, (4, 1), "L4", 4, length=256)
    plan.save(tmp_path / "plan", kind=kind)
    report = one_rank(plan, [*launcher, "train.py", "--text", str(tmp_path / "text.txt")], tmp_path)
    most = max(allocated for phase, (allocated, _) in report["phases"].items() if phase != "loading")
    assert abs(most / plan.tensors_bytes - 1) < 0.02


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed (pip install deepspeed==0.19.8): its engine is not run",
)
@pytest.mark.parametrize(
    "recipe, way",
    [
        (Recipe("full", "mixed_bf16", "adamw_fused", stage=2, checkpointing=True), (2, 2)),
        (Recipe("full", "mixed_bf16", "adamw_fused", stage=3), (1, 4)),
        (Recipe("lora", "mixed_fp16", "adamw_fused", stage=3, checkpointing=True), (4, 1)),
        (Recipe("full", "mixed_bf16", "adamw_fused", 3, True, fused_lm_head=True), (2, 2)),
    ],
    ids=lambda value: f"{value.method}-{value.stage}" if isinstance(value, Recipe) else "",
)
def test_deepspeed_keeps_to_the_plan(recipe, way, tmp_path):
    llama(tmp_path / "model", vocab_size=258, hidden_size=1024, intermediate_size=2816, max_position_embeddings=256)
    (tmp_path / "text.txt").write_text(TEXT * 1000, encoding="utf-8")
    plan = plan_of(tmp_path / "model", recipe, way, "T4" if "fp16" in recipe.precision else "L4", 4, length=256)
    plan.save(tmp_path / "plan", kind="deepspeed")
    report = one_rank(plan, [*TORCHRUN, "train.py", "--text", str(tmp_path / "text.txt")], tmp_path)
    held = max(nbytes for phase, (nbytes, _) in report["phases"].items() if phase != "loading")
    # 0.8 to 1: at stage 3 it lets gathered weights go earlier than FSDP2, whose next group is there beside the present.
    assert (0.8 if recipe.stage == 3 else 0.99) < held / plan.tensors_bytes < 1


CUBLAS = 4096 * 2048 + 1024 * 16 * 8  # its workspace on an L4
ON_CPU = Recipe("full", "mixed_bf16", "adamw_fused", 3, cpu_offload=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, gpus, recipe, way",
    [
        ("torch", 1, ON_CPU, (1, 4)),
        ("torch", 4, replace(ON_CPU, checkpointing=True), (2, 2)),
        ("accelerate", 4, replace(ON_CPU, checkpointing=True), (1, 2)),
        ("accelerate", 1, replace(ON_CPU, checkpointing=True, offload=True), (4, 1)),
        ("trainer", 4, replace(ON_CPU, precision="bf16"), (1, 2)),
        ("trainer", 1, replace(ON_CPU, checkpointing=True, fused_lm_head=True), (2, 2)),
    ],
    ids=lambda value: value.title if isinstance(value, Recipe) else str(value),
)
def test_states_on_the_cpu_hold_what_the_plan_counted(kind, gpus, recipe, way, tmp_path):
    """On the card, and in the RAM: parameters, gradients and AdamW's states of this rank, and no copy of them."""
    sizes = {"vocab_size": 32_768, "hidden_size": 1024, "intermediate_size": 2816, "max_position_embeddings": 256}
    llama(tmp_path / "model", **sizes)
    (tmp_path / "text.txt").write_text(TEXT * 1000, encoding="utf-8")
    plan = plan_of(tmp_path / "model", recipe, way, "L4", gpus, length=256)
    plan.save(tmp_path / "plan", kind=kind)
    launcher = ("torchrun", "--nproc_per_node", str(gpus)) if kind == "torch" else ACCELERATE
    report = one_rank(plan, [*launcher, "train.py", "--text", str(tmp_path / "text.txt")], tmp_path)
    most = max(allocated for phase, (allocated, _) in report["phases"].items() if phase != "loading")
    # The plan is of a first step: backward's thread has its workspace in later ones.
    assert -0.01 * plan.tensors_bytes < most - plan.tensors_bytes < 0.01 * plan.tensors_bytes + CUBLAS
    there, ram = host_need(plan), report["host"]["peak_bytes"]  # of this rank, the one that reads the weights
    assert (there.training + there.checkpoints) / gpus <= ram
    loading = there.loading.low + (there.loading.high - there.loading.low) / gpus
    assert ram <= max(loading, (there.training + 2 * there.checkpoints) / gpus) * 1.001


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, recipe, gpus",
    [
        ("torch", ON_CPU, 1),
        ("accelerate", ON_CPU, 1),
        ("trainer", ON_CPU, 1),
        ("trainer", Recipe("full", "bf16", "adamw_fused", 3), 2),
        ("torch", Recipe("full", "bf16", "adamw_fused", 3, tensor_parallel=2), 4),
    ],
    ids=["torch", "accelerate", "trainer", "trainer, on the cards", "torch, tensor parallel"],
)
def test_what_is_split_is_saved_as_a_model(kind, recipe, gpus, tmp_path):
    """The whole weights, gathered in the RAM beside all that waits there: the most of the run."""
    sizes = {"vocab_size": 32_768, "hidden_size": 1024, "intermediate_size": 2816, "max_position_embeddings": 256}
    model = build_model(llama(tmp_path / "model", **sizes), torch.float16)
    (tmp_path / "text.txt").write_text(TEXT * 20, encoding="utf-8")
    plan = plan_of(tmp_path / "model", recipe, (1, 1), "L4", gpus, length=256)
    plan.save(tmp_path / "plan", kind=kind)
    launcher = ("torchrun", "--nproc_per_node", str(gpus)) if kind == "torch" else ACCELERATE
    words = ["--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out"), "--max-steps", "2"]
    virtual = [
        "--gpu",
        "L4",
        "--gpus",
        str(gpus),
        "--no-advise",
        "--write-files",
        "--report",
        str(tmp_path / "report.json"),
    ]
    program = ["-m", "virtual_gpu", "run", *virtual, "--", *launcher, "train.py", *words]
    status, _, err = run_forked(program, folder=tmp_path / "plan")
    assert status == 0, err[-2000:]
    saved = load_file(tmp_path / "out" / "model.safetensors")
    whole = sum(value.numel() for value in saved.values())
    half = recipe.precision == "bf16"
    assert {value.dtype for value in saved.values()} == {torch.bfloat16 if half else torch.float32}
    assert whole == sum(parameter.numel() for parameter in model.parameters())
    there, ram = host_need(plan), json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["host"]
    assert there.saving == (2 if half else 4) * whole
    assert (there.training + there.saving) * 0.999 < ram["peak_bytes"] <= there.needed.high


# -- what they learn --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small Llama with weights."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = llama(folder, **sizes, intermediate_size=128)
    torch.manual_seed(0)
    build_model(config, torch.float32, device="cpu").save_pretrained(folder)
    return folder


def rehearse(plan, kind, folder, text, steps, ranks=1, clip="1.0"):
    """The tensors that the files save, run on the CPU, by as many processes as torchrun would start."""
    plan.save(folder, kind=kind, force=True)
    for path in folder.iterdir():  # a step that can be told from the rounding of the weights
        if path.suffix in (".py", ".json"):
            path.write_text(
                re.sub(r'(LEARNING_RATE = |"learning_rate": )\S+?(,?)\n', r"\g<1>1.0\2\n", path.read_text()).replace(
                    "(trained, 1.0", f"(trained, {clip}"
                )
            )
    (folder / "text.txt").write_text(text, encoding="utf-8")
    words = ["--text", folder / "text.txt", "--output", folder / "out", "--cpu", "--max-steps", str(steps)]
    program = list(map(str, [folder / "train.py", *words]))
    status, _, err = run_forked(program, ranks, port=free_port() if ranks > 1 else "0", folder=folder)
    assert status == 0, err[-2000:]
    saved = [*(folder / "out").glob("*model*.safetensors")]
    return {name: tensor for part in saved for name, tensor in load_file(part).items()}


@pytest.mark.slow
@pytest.mark.parametrize("text, steps", [("abcdefgh" * 48, 3), (TEXT * 5, 1)], ids=["schedule", "accumulation"])
def test_every_kind_makes_the_same_steps(text, steps, small, tmp_path):
    """Blocks that are all alike for three steps, or one batch of blocks that differ: their order says nothing."""
    plan = plan_of(small, Recipe("full", "fp32", "sgd"), way=(2, 2), length=32)
    if steps == 1:
        text = text.encode()[: 4 * 32 - 2].decode(errors="ignore")
        text += "x" * (4 * 32 - len(text.encode()))
    before = load_file(small / "model.safetensors")
    learned = {kind: rehearse(plan, kind, tmp_path / kind, text, steps) for kind in ALONE}
    for kind, weights in learned.items():
        moved = max((weights[name] - before[name]).abs().max() for name in before)
        apart = max((weights[name] - learned["trainer"][name]).abs().max() for name in before)
        assert moved > 1e-2 and apart < 1e-4 * moved, (kind, moved, apart)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "accelerate", "trainer"])  # TRL's has one whatever the plan says
def test_a_fused_head_makes_the_same_step(kind, small, tmp_path):
    text = TEXT.encode()[: 4 * 32 - 2].decode(errors="ignore")
    text += "x" * (4 * 32 - len(text.encode()))
    before, learned = load_file(small / "model.safetensors"), []
    for fused in (False, True):
        plan = plan_of(small, Recipe("full", "fp32", "sgd", fused_lm_head=fused), way=(2, 2), length=32)
        learned.append(rehearse(plan, kind, tmp_path / f"{fused}", text, 1))
    moved = max((learned[0][name] - before[name]).abs().max() for name in before)
    apart = max((learned[1][name] - learned[0][name]).abs().max() for name in before)
    assert moved > 1e-2 and apart < 1e-4 * moved, (moved, apart)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALONE)
def test_blocks_that_keep_results_make_the_same_step(kind, small, tmp_path):
    text = TEXT.encode()[: 4 * 32 - 2].decode(errors="ignore")
    text += "x" * (4 * 32 - len(text.encode()))
    sizes = json.loads((small / "config.json").read_text(encoding="utf-8"))
    kept = "attention", f"{sizes['hidden_size']}x{sizes['intermediate_size']}:1"
    before, learned = load_file(small / "model.safetensors"), []
    for names in ((), kept):
        plan = plan_of(small, Recipe("full", "fp32", "sgd", checkpointing=True, kept=names), way=(2, 2), length=32)
        learned.append(rehearse(plan, kind, tmp_path / f"{len(names)}", text, 1))
    assert max((learned[0][name] - before[name]).abs().max() for name in before) > 1e-2
    assert all(torch.equal(learned[1][name], learned[0][name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, stage, tied, method, more",
    [
        ("torch", 0, False, "full", {}),
        ("torch", 2, True, "full", {}),
        ("torch", 3, False, "full", {}),
        ("torch", 3, False, "full", {"fused_lm_head": True}),
        ("torch", 3, True, "full", {"fused_lm_head": True}),
        ("torch", 3, True, "full", {"cpu_offload": True}),
        ("torch", 3, False, "full", {"replicas": 2}),  # four ranks: two in each copy
        ("torch", 3, False, "full", {"kept": ("attention", "64x128:1")}),
        ("torch", 3, True, "lora", {}),
        ("torch", 3, False, "lora", {"fused_lm_head": True}),
        ("torch", 3, False, "lora", {"modules_to_save": WHOLE}),
        ("accelerate", 0, False, "full", {"fused_lm_head": True}),  # its FSDP goes on GPUs only
    ],
)
def test_two_ranks_make_the_steps_of_one(kind, stage, tied, method, more, tmp_path):
    """Whole on each or split, by real processes: of blocks that are all alike half a batch has the batch's gradient."""
    model = tmp_path / "model"
    sizes = {"vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = llama(model, **sizes, intermediate_size=128, tie_word_embeddings=tied)
    torch.manual_seed(0)
    build_model(config, torch.float32, device="cpu").save_pretrained(model)
    saved = {name: value for name, value in more.items() if name == "modules_to_save"}
    more = {name: value for name, value in more.items() if name not in saved}
    recipe = Recipe(method, "fp32", "sgd", checkpointing=stage == 2 or "kept" in more, **more)
    text, learned = "abcdefgh" * 48, {}
    for several, ranks in ((1, 1), (2, 2 * recipe.replicas)):
        one = replace(recipe, stage=stage) if ranks > 1 else replace(recipe, cpu_offload=False, replicas=1)
        request = make_request(str(model), "L4", ranks, length=32, batch=4, **saved)
        plan = Plan(request, one, 1, 4 // ranks, 0, {}, 0, 0, 0, None)
        learned[several] = rehearse(plan, kind, tmp_path / f"{several}", text, 3, ranks)
    assert learned[1].keys() <= learned[2].keys()  # FSDP2 gathers a tied head apart
    if method == "lora":  # its dropout and its first values are drawn anew
        assert all(value.abs().max() > 0 for name, value in learned[2].items() if "lora_B" in name)
        whole = {name for name in learned[2] if "lora" not in name}
        assert {name.split(".")[-2] for name in whole} == {*saved.get("modules_to_save", ())}
        before = load_file(model / "model.safetensors")
        assert all(
            (learned[2][name] - before[name.removeprefix("base_model.model.")]).abs().max() > 0 for name in whole
        )
        return
    before = load_file(model / "model.safetensors")
    moved = max((learned[1][name] - before[name]).abs().max() for name in before)
    apart = max((learned[1][name] - learned[2][name]).abs().max() for name in before)
    assert moved > 1e-2 and apart < 1e-4 * moved, (moved, apart)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, tied, stage, ranks, tokens",
    [
        (LlamaConfig, False, 3, 4, False),
        (Qwen3Config, True, 2, 4, False),  # norms of its heads are whole on each rank, which sees half of the heads
        (GPTNeoXConfig, False, 3, 4, False),  # its head has another name in the files
        (LlamaConfig, False, 3, 2, False),  # all of them compute each layer together
        (LlamaConfig, False, 3, 2, True),
        (Qwen3Config, False, 2, 4, True),
    ],
)
def test_ranks_that_share_a_layer_make_the_steps_of_one(family, tied, stage, ranks, tokens, tmp_path):
    """Groups of two real processes: a step over four blocks that differ, and what AdamW would not tell: by SGD."""
    model = tmp_path / "model"
    sizes = {"vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    more = {"num_key_value_heads": 2, "intermediate_size": 128, "tie_word_embeddings": tied, "attention_bias": True}
    config = llama(model, family, **sizes, **more)
    torch.manual_seed(0)
    whole = build_model(config, torch.float32, device="cpu")
    for name, parameter in whole.named_parameters():  # biases that are not zero are added once
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    whole.save_pretrained(model)
    text, learned = "".join(chr(97 + n * n * 7 % 26) for n in range(4 * 32)), {}
    for n in (1, ranks):
        recipe = Recipe("full", "fp32", "sgd", checkpointing=stage == 2)
        recipe = recipe if n == 1 else replace(recipe, stage=stage, tensor_parallel=2, sequence_parallel=tokens)
        way, request = (1, 4 // max(n // 2, 1)), make_request(str(model), "L4", n, length=32, batch=4).of(recipe)
        plan = Plan(request, recipe, *way, 0, {}, 0, 0, 0, None)
        learned[n] = rehearse(plan, "torch", tmp_path / f"{n}", text, 1, n)
    before = load_file(model / "model.safetensors")
    for name in before:
        moved = (learned[1][name] - before[name]).abs().max()
        apart = (learned[1][name] - learned[ranks][name]).abs().max()
        assert apart < 1e-3 * moved + 2e-7, name  # of values around 1 the rounding
    assert max((learned[1][name] - before[name]).abs().max() for name in before) > 1e-2


@pytest.mark.slow
def test_zero_s_files_rehearse_without_it(small, tmp_path):
    """With --cpu they are the Trainer's, which make the same step: of DeepSpeed's engine this says nothing."""
    plan = unmeasured(Recipe("full", "mixed_bf16", "adamw_fused", stage=3), 2, str(small))
    learned = [rehearse(plan, kind, tmp_path / kind, "abcdefgh" * 48, 1) for kind in ("trainer", "deepspeed")]
    before = load_file(small / "model.safetensors")
    assert all(torch.equal(learned[0][name], learned[1][name]) for name in before)
    assert max((learned[0][name] - before[name]).abs().max() for name in before) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in ALONE if kind != "trainer"])  # the Trainer's: tests/test_planner.py
def test_quantized_weights_with_adapters_train(kind, small, tmp_path):
    recipe = Recipe("qlora", "mixed_bf16", "adamw_8bit", checkpointing=True, offload=True)  # a rehearsal moves nothing
    plan = plan_of(small, recipe, (2, 1), "L4", length=32)
    adapters = rehearse(plan, kind, tmp_path, TEXT * 40, 2)
    assert all(value.abs().max() > 0 for name, value in adapters.items() if "lora_B" in name)
    (tmp_path / "text.txt").write_text("짧다", encoding="utf-8")
    status, _, err = run_forked([str(tmp_path / "train.py"), "--text", str(tmp_path / "text.txt"), "--cpu"])
    assert status != 0 and "tokens are fewer than one" in err


# -- what they say ----------------------------------------------------------------------------------------------------

RECIPES = [
    Recipe("full", "mixed_fp16", "adamw"),
    Recipe("full", "mixed_bf16", "adafactor", checkpointing=True),
    Recipe("full", "bf16", "sgd"),
    Recipe("full", "bf16", "lion_8bit"),
    Recipe("full", "mixed_fp16", "paged_adamw"),
    Recipe("lora", "mixed_fp16", "adamw_fused"),
    Recipe("qlora", "mixed_bf16", "adamw_8bit", checkpointing=True),
    Recipe("lora", "mixed_bf16", "adamw_fused", checkpointing=True, fused_lm_head=True),
    Recipe("lora", "mixed_bf16", "adamw_fused", checkpointing=True, kept=("attention", "768x2304:5")),
    Recipe("qlora", "mixed_fp16", "adamw_fused", rest_in_fp32=False),
    Recipe("qlora", "mixed_fp16", "adamw_fused", checkpointing=True, rest_in_fp32=False, offload=True),
]
SHARDED = [
    Recipe("full", "bf16", "adamw_fused", stage=2, checkpointing=True),
    Recipe("lora", "mixed_fp16", "adamw_fused", stage=3, fused_lm_head=True),
]


@pytest.mark.parametrize("kind", [kind for kind in ALONE if kind != "trainer"])
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_script_says_what_the_plan_says(kind, gpus):
    for recipe in RECIPES + (SHARDED if kind != "trl" and gpus > 1 else []):
        script = unmeasured(recipe, gpus).files(kind)["train.py"]
        tree = ast.parse(script)
        constants = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).isupper()
        }
        assert constants["LENGTH"] == 32 and constants["MICRO_BATCH"] == 2 and constants["ACCUMULATION"] == 2 // gpus
        calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert any("LoraConfig(" in call for call in calls) == (recipe.method != "full")
        assert any("BitsAndBytesConfig(" in call for call in calls) == (recipe.method == "qlora")
        checkpointing = "'use_reentrant': False" in ast.unparse(tree) or "gradient_checkpointing=True" in script
        if kind == "accelerate" and recipe.stage:  # there its configuration says it
            yaml = unmeasured(recipe, gpus).files(kind)["accelerate.yaml"]
            assert not checkpointing
            checkpointing = "fsdp_activation_checkpointing: true" in yaml
        assert checkpointing == recipe.checkpointing
        moved = "offload=not args.cpu" in script or '"offload": not args.cpu' in script
        assert moved == recipe.offload
        upcast = recipe.method == "qlora" and recipe.rest_in_fp32 and kind != "trl"
        assert any("prepare_model_for_kbit_training(" in call for call in calls) == upcast
        assert ("add_fused_lm_head(" in script) == (recipe.fused_lm_head and kind != "trl")  # TRL's SFTTrainer adds it
        scaled = any(said in script for said in ("GradScaler", "fp16=not args.cpu", "fp16=True", 'else "fp16"'))
        assert scaled == ("fp16" in recipe.precision)
        assert ("round small updates away" in ast.get_docstring(tree)) == bool(recipe.caution)
        names = {alias.asname or alias.name for node in ast.walk(tree) for alias in getattr(node, "names", [])}
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert {name.split(".")[0] for name in names} <= used, "imported and not used"
        reshard = re.findall(r"reshard_after_forward=(\w+)", script)
        assert reshard == ([str(recipe.stage == 3), "False"] if recipe.stage and kind == "torch" else [])
        assert ("sync_each_batch" in script) == (bool(recipe.stage) and kind == "accelerate")


@pytest.mark.parametrize("kind", ["torch", "accelerate"])
def test_a_loop_makes_the_optimizer_as_the_trainer_does(kind, tmp_path):
    from transformers import Trainer, TrainingArguments

    for name, (theirs, *_) in OPTIMIZERS.items():
        script = unmeasured(Recipe("full", "bf16", name)).files(kind)["train.py"]
        (call,) = (
            node.value for node in ast.parse(script).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "optimizer"
        )  # fmt: skip
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg != "lr"}
        arguments = TrainingArguments(str(tmp_path), optim=theirs, use_cpu=True, report_to=[])
        made, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
        paged, name_of_class = settings.get("is_paged", False), ast.unparse(call.func).split(".")[-1]
        assert name_of_class.startswith("Paged" * paged + made.__name__)
        assert settings.get("betas", (0.9, 0.999)) == given.get("betas", (0.9, 0.999))
        assert ("register_module_override" in script) == ("8bit" in name)


@pytest.mark.parametrize("kind", ["trainer", "deepspeed"])
def test_where_nothing_is_pinned_no_checkpoint_is_moved(kind):
    """A rehearsal on the CPU has no DeepSpeed and no pinned memory."""
    stage = 3 if kind == "deepspeed" else 0
    recipe = Recipe("lora", "mixed_bf16", "adamw_fused", stage, True, offload=True)
    files = unmeasured(recipe, 2 if stage else 1).files(kind)
    assert json.loads(files["training_arguments.json"])["gradient_checkpointing_kwargs"]["offload"] is True
    assert 'name.endswith("checkpointing_kwargs")' in files["train.py"].split("if args.cpu:")[1].split("dtype =")[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ['x"""', "x\\new\\x41", 'x"""\nraise SystemExit(7)\n"""', "모델'{dtype}", "{}😀\u2028"]
)
def test_a_folder_s_name_is_data(kind, name, tmp_path):
    llama(tmp_path / name)
    recipe = Recipe("lora", "mixed_bf16", "adamw_fused", stage=3 if kind == "deepspeed" else 0)
    script = unmeasured(recipe, 2 if recipe.stage else 1, model=str(tmp_path / name)).files(kind)["train.py"]
    tree = ast.parse(script)
    assert str(tmp_path / name) in [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert not any(isinstance(node, ast.Raise) and "7" in ast.unparse(node) for node in ast.walk(tree))
    assert script.count("trust_remote_code=False") == 2 and script.isascii()


@pytest.mark.parametrize("kind, objective", [("trainer", "sft"), ("accelerate", "sft"), ("trl", "dpo")])
def test_what_is_split_does_not_begin_whole(kind, objective, tmp_path):
    """`python train.py` would train all of the model on one GPU. A plan on one GPU alone begins so."""
    for recipe, gpus in ((Recipe("full", "mixed_bf16", "adamw_fused", stage=3), 2), (RECIPES[0], 1)):
        request = make_request("gpt2", "L4", gpus, length=32, batch=4, objective=objective).of(recipe)
        Plan(request, recipe, 2, 2 // gpus, 0, {}, 0, 0, 0, None).save(tmp_path / f"{gpus}", kind=kind)
        given = ["--pairs" if objective == "dpo" else "--text", "nothing", "--model", "nowhere"]
        status, _, err = run_forked([str(tmp_path / f"{gpus}" / "train.py"), *given])
        assert status and ("accelerate launch --config_file accelerate.yaml train.py" in err) == (gpus > 1), err[-800:]


@pytest.mark.parametrize("kind, objective", [("trainer", "sft"), ("trl", "dpo")])
def test_4_bit_weights_that_are_split_wait_in_the_ram(kind, objective):
    """Whole they might not fit on the card, to which other weights go straight, or piece by piece."""
    request = make_request("gpt2", "L4", 2, length=32, batch=4, objective=objective)
    for method, stage, place in (("qlora", 3, '{"": "cpu"}'), ("lora", 3, ""), ("qlora", 0, "PartialState|device")):
        recipe = Recipe(method, "mixed_bf16", "adamw_fused", stage=stage, rest_in_fp32=False)
        plan = Plan(request.of(recipe), recipe, 2, 1, 0, {}, 0, 0, 0, None)
        [line] = re.findall(r"device_map=(.*),", plan.files(kind)["train.py"]) or [""]
        assert line == place if stage else re.search(place, line)


@pytest.mark.parametrize("value", ["a", 'a"', "a'\"", "a\\", "\n", "한😀", "{x}", True, None, 0.05, 8, ["q", "v'"]])
def test_a_value_is_written_as_it_is(value):
    assert ast.literal_eval(literal(value)) == value


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_cut_is_in_the_script(stage):
    """Matrices by transformers' plan, tied ends whole; FSDP2 over the other dimension in groups that are let go."""
    recipe = Recipe("full", "mixed_bf16", "adamw_fused", stage=stage, tensor_parallel=4)
    scripts = {
        model: unmeasured(recipe, 8, model).files("torch")["train.py"]
        for model in ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-0.6B")
    }
    for model, script in scripts.items():
        tree = ast.parse(script)
        assert f"ZeRO-{stage}, tensor parallel 4, 8 x L4" in ast.get_docstring(tree)
        names = {alias.asname or alias.name for node in ast.walk(tree) for alias in getattr(node, "names", [])}
        assert names <= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}, "imported and not used"
        [cut] = (
            dict(zip(map(ast.literal_eval, node.value.keys), map(ast.unparse, node.value.values), strict=True))
            for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "plan"
        )  # fmt: skip
        assert cut["model.layers.*.self_attn.q_proj"] == "ColwiseParallel()"
        assert cut["model.layers.*.mlp.down_proj"] == "RowwiseParallel()"
        assert ("lm_head" in cut) == ("model.embed_tokens" in cut) == ("8B" in model)
        assert len(cut) == 7 + 2 * ("8B" in model)
        assert ("of_heads" in script) == ('(".q_norm", ".k_norm")' in script) == ("Qwen3" in model)
        assert re.findall(r"reshard_after_forward=(\w+)", script) == [str(stage == 3)]
        assert "DistributedSampler(blocks, world // 4, rank // 4, drop_last=True)" in script


def test_what_is_shared_is_in_the_script():
    """Tokens and logits beside the matrices; a text and its targets; copies, in every kind that can have them."""
    shared = {
        "sequence parallel": Recipe("full", "bf16", "adamw_fused", 3, tensor_parallel=2, sequence_parallel=True),
        "context parallel 4": Recipe("full", "mixed_bf16", "adamw_fused", 3, context_parallel=4),
        "HSDP, 2 copies": Recipe("full", "mixed_bf16", "adamw_fused", 3, replicas=2),
    }
    for said, recipe in shared.items():
        script = unmeasured(recipe, 16, "Qwen/Qwen3-8B").files("torch")["train.py"]
        tree = ast.parse(script)
        assert said in ast.get_docstring(tree)
        names = {alias.asname or alias.name for node in ast.walk(tree) for alias in getattr(node, "names", [])}
        assert names <= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}, "imported and not used"
        assert ("with loss_parallel():" in script) == ("SequenceParallel()" in script) == recipe.sequence_parallel
        assert ("with cut, sdpa_kernel(" in script) == (recipe.context_parallel > 1)
        assert ("copies = 2" in script) == (recipe.replicas > 1)
        apart = recipe.tensor_parallel * recipe.context_parallel
        assert ("DistributedSampler(blocks, world // " in script) == (apart > 1)
    told = yaml.safe_load(unmeasured(shared["HSDP, 2 copies"], 16).files("accelerate")["accelerate.yaml"])
    sizes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 8}
    assert told["parallelism_config"] == sizes


def test_the_parts_of_a_text_have_its_loss():
    """The mean over all ranks of a part's sum over the mean part's number of targets, the last of which is none."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    model = build_model(config, torch.float64, device="cpu")
    tokens = torch.arange(2 * 16).reshape(2, 16) * 7 % 64
    whole = model(input_ids=tokens, labels=tokens)
    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    given = {"vocab_size": 64, "labels": tokens, "num_items_in_batch": 2 * 15 / 4}
    parts = zip(whole.logits.chunk(4, 1), targets.chunk(4, 1), strict=True)
    losses = [
        model.loss_function(logits=logits.contiguous(), shift_labels=of_part.contiguous(), **given)
        for logits, of_part in parts
    ]
    assert torch.allclose(sum(losses) / 4, whole.loss)


@pytest.mark.parametrize("degree", [1, 2])
def test_gradients_travel_in_the_type_that_was_counted(degree):
    """In 16 bits, in the file and in the plan, with tensor parallelism or not; torchtitan's are fp32."""
    recipe = Recipe("full", "mixed_bf16", "adamw_fused", stage=3, tensor_parallel=degree)
    script = unmeasured(recipe, 4, "Qwen/Qwen3-0.6B").files("torch")["train.py"]
    [reduced] = re.findall(r"MixedPrecisionPolicy\(half, (\w+), half\)", script)
    assert reduced == "half" and "half = None if args.cpu else torch.bfloat16" in script
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    ran = run_rank(config, Layout(4, 3, degree), CONVENTIONS["mixed"].fp32_shards)
    name = next(name for name in ran.sent if "reduce_scatter" in name)
    assert ran.sent_bytes[name] == 2 * ran.sent[name] > 0


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_is_told_what_the_plan_says(stage):
    recipe = Recipe("full", "mixed_bf16", "adamw_fused", stage=stage, checkpointing=True)
    files = unmeasured(recipe, gpus=2).files("deepspeed")
    told, said = json.loads(files["ds_config.json"]), json.loads(files["training_arguments.json"])
    assert told["zero_optimization"]["stage"] == stage and told["bf16"] == {"enabled": "auto"}
    assert said["bf16"] and said["gradient_checkpointing"] and "accelerator_config" not in said
    tree = ast.parse(files["train.py"])
    assert "settings['deepspeed'] = read('ds_config.json')" in ast.unparse(tree)
    assert "--gpus 2 torchrun" in ast.get_docstring(tree)


def test_what_a_kind_cannot_say_is_refused_with_those_that_can():
    full = unmeasured(Recipe("full", "mixed_bf16", "adamw_fused", stage=3), gpus=2)
    with pytest.raises(NotSupported, match=r"trl.*ZeRO-3.*: trainer, torch, accelerate, deepspeed"):
        full.files("trl")
    split = unmeasured(Recipe("full", "mixed_bf16", "adamw_fused", stage=3, tensor_parallel=2), 2, "Qwen/Qwen3-0.6B")
    parts = unmeasured(Recipe("full", "mixed_bf16", "adamw_fused", stage=3, context_parallel=2), 2, "Qwen/Qwen3-0.6B")
    for made, words in ((split, "텐서 병렬 2"), (parts, "컨텍스트 병렬 2")):
        for kind in KINDS:
            if kind != "torch":
                with pytest.raises(NotSupported, match=rf"{kind}.*{words}.*: torch$"):
                    made.files(kind)
        assert made.files() == made.files("torch")
    copies = unmeasured(Recipe("full", "mixed_bf16", "adamw_fused", stage=3, replicas=2), gpus=4)
    with pytest.raises(NotSupported, match=r"deepspeed.*HSDP.*: trainer, torch, accelerate$"):
        copies.files("deepspeed")
    plan = unmeasured(Recipe("qlora", "mixed_bf16", "adamw_fused", stage=3), gpus=2)
    with pytest.raises(NotSupported, match=r"torch.*ZeRO-3.*: trainer"):
        plan.files("torch")
    for recipe in (Recipe("full", "bf16", "adamw_fused", stage=3), Recipe("lora", "mixed_bf16", "adamw_fused")):
        with pytest.raises(NotSupported, match=r"deepspeed.*: trainer, torch, accelerate"):
            unmeasured(recipe, gpus=2).files("deepspeed")
    with pytest.raises(UnknownName, match=", ".join(KINDS)):
        plan.files("tensorflow")
    assert files_of(plan, "Trainer") == plan.files()


def test_the_terminal_writes_the_kind_that_is_asked_for(capsys, tmp_path, monkeypatch):
    base = ["--model", "gpt2", "--length", "16", "--batch", "1", "--methods", "lora"]
    assert main([*base, "--json", "--save", str(tmp_path / "plan"), "--files", "torch"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]
    assert [path.name for path in (tmp_path / "plan").iterdir()] == ["train.py"]
    assert "torch.autocast" in (tmp_path / "plan" / "train.py").read_text(encoding="utf-8")
    monkeypatch.setattr("virtual_gpu.plan.command.plan_training", lambda *_, **__: pytest.fail("searched"))
    assert main([*base, "--save", str(tmp_path / "new"), "--files", "keras"]) == 2
    assert ", ".join(KINDS) in capsys.readouterr().err
    assert main([*base, "--files", "torch"]) == 2
    assert "--save" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpu", ["T4", "L4"])
def test_grouped_heads_are_repeated_where_the_card_does_not_take_them(kind, gpu):
    recipe = Recipe("lora", "mixed_fp16", "adamw_fused", stage=0 if kind == "trl" else 3)
    script = unmeasured(recipe, 2, "Qwen/Qwen3-0.6B", gpu).files(kind)["train.py"]
    lines = script.splitlines()
    assert (REPEAT_KV in lines) == ("from transformers.integrations import sdpa_attention" in lines) == (gpu == "T4")
    loads = next(place for place, line in enumerate(lines) if "AutoModelForCausalLM.from_pretrained(" in line)
    assert REPEAT_KV not in lines[loads:]


@pytest.mark.parametrize("gpus, machines, each", [(8, 1, 8), (12, 2, 6), (64, 8, 8)])
def test_more_gpus_than_a_machine_has_are_on_several(gpus, machines, each, tmp_path):
    """The same command on each of them; of accelerate's file one line is each machine's own."""
    from accelerate.commands.config.config_args import load_config_from_file
    from torch.distributed.run import get_args_parser

    recipe = Recipe("full", "mixed_bf16", "adamw_fused", stage=3)
    for kind in ("torch", "deepspeed"):
        line = next(
            line for line in unmeasured(recipe, gpus).files(kind)["train.py"].splitlines() if "torchrun" in line
        )
        given = get_args_parser().parse_args(shlex.split(line[line.index("torchrun") :])[1:])
        assert (given.nnodes, given.nproc_per_node) == (f"{machines}" if machines > 1 else "1:1", f"{each}")
        assert bool(given.rdzv_endpoint) == (machines > 1)
    (tmp_path / "accelerate.yaml").write_text(unmeasured(recipe, gpus).files("accelerate")["accelerate.yaml"])
    read = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert (read.num_machines, read.num_processes) == (machines, gpus)
    assert read.main_process_ip == ("FIRST_MACHINE" if machines > 1 else None)
