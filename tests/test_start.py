"""A starting point: other tools' configurations are read as they mean them, changed line by line, and never trusted."""

import difflib
import json
import os
from dataclasses import replace

import pytest
import trl.scripts.sft
import yaml
from forked import run_forked
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, PreTrainedTokenizerFast, TrainingArguments

from virtual_gpu.cards import card
from virtual_gpu.errors import BadConfiguration, ExistingFile, NotSupported, VirtualGPUError, WrongValue
from virtual_gpu.plan import Recipe
from virtual_gpu.plan.command import main
from virtual_gpu.plan.measure import measure
from virtual_gpu.plan.request import make_request
from virtual_gpu.plan.start import hugging_face, start_from, torchtune
from virtual_gpu.plan.start.answer import TOOLS
from virtual_gpu.plan.start.document import MOST_BYTES, read_document
from virtual_gpu.plan.start.keys import Keys, free, place_of
from virtual_gpu.room import room_on
from virtual_gpu.shards.ledger import count_elements
from virtual_gpu.shards.rank_step import rank_step
from virtual_gpu.step.predict import predict_memory, predict_need
from virtual_gpu.step.setting import Setting, rest_label
from virtual_gpu.units import GiB

SMALL = LlamaConfig(
    vocab_size=16384, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=704,
    max_position_embeddings=2048, dtype="bfloat16",
)  # fmt: skip

SMALL_GQA = LlamaConfig.from_dict(
    SMALL.to_dict() | {"num_key_value_heads": 2, "architectures": ["LlamaForCausalLM"], "vocab_size": 32768}
)

LLAMA_FACTORY = """\
### what is trained
model_name_or_path: MODEL
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: q_proj, v_proj   # as the paper has it
dataset: mine
template: llama3
cutoff_len: 512
packing: false
output_dir: out
per_device_train_batch_size: 8   # what fitted on the big card
gradient_accumulation_steps: 2
learning_rate: 1.0e-4
bf16: true
optim: adamw_torch
"""
AXOLOTL = """\
base_model: MODEL
load_in_4bit: true
adapter: qlora
sequence_len: 512
sample_packing: true
datasets:
  - path: data.jsonl
    type: alpaca
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
micro_batch_size: 8
gradient_accumulation_steps: 1
optimizer: adamw_bnb_8bit
learning_rate: 2e-4
bf16: auto
gradient_checkpointing: true
flash_attention: true
special_tokens: {pad_token: "<pad>"}
"""
TRL = """\
# trl sft --config this.yaml
model_name_or_path: MODEL
dataset_name: trl-lib/Capybara
dtype: bfloat16
max_length: 512
per_device_train_batch_size: 8
gradient_accumulation_steps: 1
gradient_checkpointing: false
loss_type: nll
"""
TORCHTUNE = """\
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_1b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: true   # the paper says so
  lora_rank: 64
  lora_alpha: 128
  lora_dropout: 0.0
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: ${output_dir}/tokenizer.model
  max_seq_len: 512
output_dir: /tmp/out
batch_size: 4
gradient_accumulation_steps: 2
optimizer:
  _component_: torch.optim.AdamW
  fused: true
  lr: 3e-4
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
dtype: bf16
enable_activation_checkpointing: false
compile: false
epochs: 1
"""
TRAINER = """\
{
  "output_dir": "out",
  "per_device_train_batch_size": 8,
  "gradient_accumulation_steps": 2,
  "optim": "adamw_torch_fused",
  "bf16": true
}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a configuration alone."""
    folder = tmp_path_factory.mktemp("model")
    SMALL.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def written(tmp_path, model):
    """A file with this text, MODEL replaced."""

    def make(text, name="config.yaml"):
        path = tmp_path / name
        path.write_text(text.replace("MODEL", model), encoding="utf-8")
        return path

    return make


def said(path, gpu="RTX 4090", gpus=1, peft=None):
    """(fields of a Setting, stage, notes) that the file's tool reads."""
    keys = Keys(read_document(path))
    tool = next(tool for tool in TOOLS if tool.knows(keys.document.values))
    fields, stage = tool.read(keys, card(gpu), gpus, peft)
    return tool.NAME, fields, stage, {note.key: note.effect for note in keys.notes}


# -- what a file says ------------------------------------------------------------------------------------------------


def test_a_file_is_read_as_its_tool_reads_it(written, model):
    name, fields, stage, notes = said(written(LLAMA_FACTORY))
    assert (name, stage, notes) == ("LLaMA-Factory", 0, {})
    assert Setting(**fields) == Setting(
        8, 2, gradient_checkpointing=True, model_id=model, peft="lora", sequence_length=512, precision="autocast_bf16",
        optimizer="adamw", lora_rank=16, lora_targets=("q_proj", "v_proj"), lora_dropout=0.0, padded=True,
        use_reentrant=True,
    )  # fmt: skip
    name, fields, stage, notes = said(written(AXOLOTL))
    assert (name, stage, notes) == ("axolotl", 0, {})
    assert Setting(**fields) == Setting(
        8, gradient_checkpointing=True, model_id=model, peft="qlora", sequence_length=512, precision="autocast_bf16",
        optimizer="adamw_8bit", lora_rank=32, lora_targets="all-linear", lora_dropout=0.05, rest_in_fp32=False,
        use_reentrant=True,
    )  # fmt: skip
    name, fields, stage, notes = said(written(TRL))
    assert (name, stage, notes) == ("TRL", 0, {})
    assert Setting(**fields) == Setting(
        8, model_id=model, sequence_length=512, precision="autocast_bf16", optimizer="adamw_fused", fused_lm_head=True,
        padded=True,
    )  # fmt: skip
    name, fields, stage, notes = said(written(TORCHTUNE))
    assert (name, stage, notes) == ("torchtune", 0, {"loss": "either"})
    targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert Setting(**fields) == Setting(
        4, 2, model_id="meta-llama/Llama-3.2-1B", peft="lora", sequence_length=512, precision="bf16",
        optimizer="adamw_fused", lora_rank=64, lora_targets=targets, lora_dropout=0.0, fused_lm_head=True,
        attention="sdpa_repeat_kv",
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [{}, {"bf16": True}, {"gradient_checkpointing": True, "optim": "adamw_bnb_8bit", "per_device_train_batch_size": 3}],
)
def test_training_arguments_are_read_as_from_the_object(arguments, written, tmp_path):
    theirs = Setting.from_training_arguments(
        TrainingArguments(str(tmp_path), use_cpu=True, **arguments), model="gpt2", sequence_length=64
    )
    fields = said(written(json.dumps(arguments | {"save_strategy": "no"}), "args.json"))[1]
    assert Setting(**fields, model_id="gpt2", sequence_length=64) == replace(theirs, padded=True)


def test_the_defaults_are_each_tool_s_own(written):
    fields = said(written("model_name_or_path: MODEL\nstage: sft\nbf16: true\n"))[1]  # LLaMA-Factory: LoRA
    assert (fields["peft"], fields["lora_targets"], fields["sequence_length"]) == ("lora", "all-linear", 2048)
    fields, _, notes = said(written("model_name_or_path: MODEL\nuse_peft: true\nload_in_4bit: true\n"))[1:]
    assert (fields["precision"], fields["lora_rank"], fields["sequence_length"]) == ("mixed_bf16", 16, 1024)  # TRL
    assert not fields["double_quantization"] and fields["gradient_checkpointing"] and not notes
    assert fields["fused_lm_head"]
    fields = said(written("base_model: MODEL\n"))[1]  # axolotl
    assert (fields["batch_size"], fields["sequence_length"], fields["gradient_checkpointing"]) == (1, 512, False)


def test_trl_before_its_fused_head_makes_logits_at_once(written, monkeypatch):
    monkeypatch.setattr("virtual_gpu.plan.start.trl.has_fused_head", lambda: False)
    fields, _, notes = said(written(TRL))[1:]
    assert not fields["fused_lm_head"] and notes == {"loss_type": "less"}


def test_trl_smooths_labels_on_all_logits(written):
    fields, _, notes = said(written(TRL + "label_smoothing_factor: 0.1\n"))[1:]
    assert not fields["fused_lm_head"] and notes == {"label_smoothing_factor": "more"}
    assert said(written(TRL.replace("nll", "dft") + "label_smoothing_factor: 0.1\n"))[1]["fused_lm_head"]
    with pytest.raises(NotSupported, match="loss_type: "):
        said(written(TRL.replace("nll", "banana")))


def test_an_sft_config_says_the_head_that_its_trainer_gives(tmp_path):
    from trl import SFTConfig

    for kind, fused in ((TrainingArguments, False), (SFTConfig, True)):
        arguments = kind(str(tmp_path), use_cpu=True, bf16=False)
        setting = Setting.from_training_arguments(arguments, model="gpt2", sequence_length=64)
        assert setting.fused_lm_head == fused


DPO = """\
# trl dpo --config this.yaml
model_name_or_path: MODEL
dataset_name: trl-lib/ultrafeedback_binarized
max_length: 512
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
beta: 0.1
loss_type: sigmoid
"""


@pytest.mark.parametrize("text, padded, notes", [
    (TRL + "packing: true\npacking_strategy: wrapped\n", False, {}),
    (TRL + "packing: true\n", False, {"packing": "more"}),
    (TRL + "padding_free: true\n", False, {"padding_free": "more"}),
    (TRL + "packing: true\nattn_implementation: flash_attention_2\n", False, {}),
    (LLAMA_FACTORY.replace("packing: false", "packing: true"), False, {}),
    (LLAMA_FACTORY.replace("packing: false\n", "").replace("stage: sft", "stage: pt"), False, {}),
    (LLAMA_FACTORY.replace("packing: false", "neat_packing: true"), False, {"neat_packing": "more"}),
    (AXOLOTL.replace("sample_packing: true", "sample_packing: false"), True, {}),
    (AXOLOTL.replace("sample_packing: true", "batch_flattening: auto"), False, {}),
    (AXOLOTL.replace("flash_attention: true", ""), False, {"sample_packing": "more"}),
    (DPO + "padding_free: true\n", True, {}),  # DPOTrainer pads whatever it is asked
])  # fmt: skip
def test_what_pads_a_micro_batch_is_read(text, padded, notes, written):
    fields, _, found = said(written(text))[1:]
    assert (fields["padded"], found) == (padded, notes)


def test_pairs_are_read_as_each_tool_trains_them(written, model):
    """TRL: tiles of the logits, a reference like the model. LLaMA-Factory: whole ones, and a reference in 16 bits."""
    trl = {"model_id": model, "sequence_length": 512, "optimizer": "adamw_fused", "objective": "dpo", "padded": True}
    name, fields, stage, notes = said(written(DPO))
    assert (name, stage, notes) == ("TRL", 0, {})
    assert Setting(**fields) == Setting(
        8, 2, gradient_checkpointing=True, precision="mixed_bf16", fused_lm_head=True, **trl
    )
    fields = said(written(DPO.replace("sigmoid", "[ipo, sft]\nprecompute_ref_log_probs: true")))[1]
    assert Setting(**fields).reference == "precomputed" and fields["fused_lm_head"]
    full = LLAMA_FACTORY.replace("stage: sft", "stage: dpo\npref_loss: hinge").replace("type: lora", "type: full")
    name, fields, stage, notes = said(written(full))
    assert (name, stage, notes) == ("LLaMA-Factory", 0, {})
    setting = Setting(**fields)
    assert (setting.objective, setting.reference, setting.fused_lm_head, setting.padded) == ("dpo", "half", False, True)
    assert said(written(LLAMA_FACTORY.replace("sft", "dpo")))[1]["objective"] == "dpo"


@pytest.mark.parametrize(
    "text, notes",
    [
        (
            DPO + "precompute_ref_log_probs: true\nprecompute_ref_batch_size: 64\n",
            {"precompute_ref_batch_size": "more"},
        ),
        (DPO + "disable_dropout: false\nsync_ref_model: true\n", {"disable_dropout": "more"}),
        (DPO + "assistant_only_loss: true\nbanana: 1\n", {"banana": "unknown"}),
        (DPO + "precompute_ref_batch_size: 64\nlabel_smoothing_factor: 0.1\nmax_prompt_length: 9\n", {}),
        (
            DPO + "reference_free: true\nforce_use_ref_model: true\n",
            {"reference_free": "less", "force_use_ref_model": "more"},
        ),
        (TRL + "sync_ref_model: false\n", {"sync_ref_model": "unknown"}),  # its loss is SFT's
    ],
)
def test_what_is_not_counted_of_pairs_is_said(text, notes, written):
    assert said(written(text))[3] == notes


def test_trl_s_other_trainers_and_losses_are_not_taken_for_it(written):
    for line in ("desirable_weight: 1.0", "cpo_alpha: 1.0", "loss_type: [sigmoid, nll]"):
        with pytest.raises(NotSupported, match=line.split(":")[0]):
            said(written(DPO.replace("loss_type: sigmoid\n", "") + line + "\n"))
    for line in (
        "beta: 0.04", "sync_ref_model: true", "precompute_ref_log_probs: true", "max_completion_length: 9",
        "num_generations: 8", "use_vllm: true",
    ):  # fmt: skip
        with pytest.raises(WrongValue, match=f"{line.split(':')[0]}: .*--objective"):  # GRPO's and KTO's or RLOO's too
            said(written(DPO.replace("beta: 0.1\nloss_type: sigmoid", line)))
    for line in ("use_peft: true", "precompute_ref_log_probs: true"):
        with pytest.raises(WrongValue, match=f"sync_ref_model: .*{line.split(':')[0]}"):
            said(written(DPO + f"sync_ref_model: true\n{line}\n"))
    with pytest.raises(NotSupported, match="pref_loss"):
        said(written(LLAMA_FACTORY.replace("sft", "dpo") + "pref_loss: orpo\n"))
    with pytest.raises(NotSupported, match="ref_model"):
        said(written(LLAMA_FACTORY.replace("sft", "dpo") + "ref_model: other\n"))
    with pytest.raises(NotSupported, match=r"fsdp: .*DPO"):
        said(written(LLAMA_FACTORY.replace("sft", "dpo") + "fsdp: full_shard\n"), gpus=2)


GRPO = """\
# trl grpo --config this.yaml
model_name_or_path: MODEL
dataset_name: mine
reward_funcs: [accuracy_reward]
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
num_generations: 4
max_completion_length: 64
loss_type: dapo
beta: 0.04
epsilon: 0.3
"""
COLOCATED = (
    GRPO
    + """\
use_vllm: true
vllm_gpu_memory_utilization: 0.3   # as it comes
vllm_max_model_length: 256
"""
)


def test_trl_s_grpo_is_read(written):
    """As GRPOConfig has it; a prompt's length is older TRL's, or the engine's longest text, or the caller's."""
    _, setting, stage, notes = said(written(GRPO))
    assert not notes and not stage
    expected = {"objective": "grpo", "completion_length": 64, "rollout": 8, "beta": 0.04}
    assert expected.items() <= setting.items() and setting["padded"] and setting["fused_lm_head"]
    assert setting["gradient_checkpointing"] and setting["precision"] == "mixed_bf16"
    assert said(written(GRPO + "max_prompt_length: 100\n"))[1]["sequence_length"] == 164
    setting = said(written(COLOCATED))[1]
    assert setting["vllm"] == "colocate" and setting["sequence_length"] == 256
    assert setting["engine"] == {"share": 0.3, "longest": 256}
    assert said(written(COLOCATED + "vllm_enable_sleep_mode: true\n"))[1]["vllm"] == "asleep"
    misspelt = said(written(COLOCATED + "vllm_gpu_memory_utilisation: 0.2\nvllm_importance_sampling_correction: no\n"))
    assert misspelt[3] == {"vllm_gpu_memory_utilisation": "unknown", "vllm_importance_sampling_correction": "less"}
    plain = GRPO.replace("loss_type: dapo\n", "")
    assert start_from(written(plain), "L4", length=256, objective="grpo").start.setting.completions.rows == 8
    with pytest.raises(WrongValue, match="--objective grpo"):
        said(written(plain))
    with pytest.raises(WrongValue, match="--length"):
        start_from(written(GRPO), "L4")
    for lines, error, key in (
        ("num_generations: 3\n", WrongValue, "num_generations"),
        ("steps_per_generation: 4\n", NotSupported, "steps_per_generation"),
        ("generation_batch_size: 16\n", NotSupported, "generation_batch_size"),
        ("generation_batch_size: 3\n", WrongValue, "generation_batch_size"),
        ("sync_ref_model: true\n", NotSupported, "sync_ref_model"),
        ("use_vllm: true\nuse_peft: true\nload_in_4bit: true\nvllm_max_model_length: 256\n", NotSupported, "use_vllm"),
        ("use_vllm: true\nvllm_tensor_parallel_size: 2\n", NotSupported, "vllm_tensor_parallel_size"),
        ("use_vllm: true\nvllm_gpu_memory_utilization: 0\n", WrongValue, "vllm_gpu_memory_utilization"),
        ("use_vllm: true\nvllm_mode: server\n", NotSupported, "vllm_mode"),
        ("fsdp: full_shard\n", NotSupported, "fsdp"),
    ):
        text = "\n".join(one for one in GRPO.splitlines() if not one.startswith(key)) + "\n" + lines
        with pytest.raises(error, match=key):
            said(written(text), gpus=2 if "fsdp" in lines else 1)


def test_the_lines_of_an_engine_are_changed_before_the_training(written, tmp_path):
    """What the training needs beside it is measured once; then the engine sleeps, or has less of the card."""
    gpu = "8GiB, 8.9"
    path = written(COLOCATED.replace("0.3 ", "0.9 "))
    found = start_from(path, gpu)
    alone = predict_need(found.start.setting, (8, 9))
    memory = found.room.memory.high
    assert not found.fits and found.start.reserved >= alone.card + int(0.9 * memory)
    assert [part.what for part in found.room.outside][-1] == "vLLM"
    assert {*found.lines} <= {"vllm_enable_sleep_mode", "vllm_gpu_memory_utilization"}
    engine = found.proposal.engine
    assert replace(found.proposal.setting, vllm="colocate") == found.start.setting and engine.share < 0.9
    assert found.room.verdict(found.proposal.reserved) == "fits"
    found.save(tmp_path / "changed.yaml")
    again = start_from(tmp_path / "changed.yaml", gpu)
    assert again.fits and again.start.reserved == found.proposal.reserved
    assert "# as it comes" in (tmp_path / "changed.yaml").read_text(encoding="utf-8")
    assert str(engine.share) in str(found)


FSDP = "fsdp: full_shard auto_wrap\nfsdp_config: {fsdp_version: 2, transformer_layer_cls_to_wrap: LlamaDecoderLayer}\n"


SYNCED = "accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}\n"


@pytest.mark.parametrize("batch, accumulation", [(1, 8), (8, 1)])
def test_sending_with_every_micro_batch_is_a_line_to_change(batch, accumulation, written, tmp_path):
    """It trains the same, so it comes before adapters; also where the file accumulates nothing yet."""
    text = f"model_name_or_path: Qwen/Qwen3-8B\nmax_length: 4096\nper_device_train_batch_size: {batch}\nbf16: true\n"
    text += f"gradient_accumulation_steps: {accumulation}\nfsdp: full_shard\nfsdp_config: {{fsdp_version: 2}}\n"
    found = start_from(written(text), "RTX 5090", 8)
    assert not found.fits and (found.waiting > 15 * 2**30) == (accumulation > 1)
    assert found.own_share in (0, pytest.approx(found.waiting / 4, rel=1e-6))
    batches = {"per_device_train_batch_size", "gradient_accumulation_steps"} if accumulation == 1 else set()
    assert found.lines.keys() == {"accelerator_config", *batches}
    assert found.lines["accelerator_config"] == {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    changed = start_from(found.save(tmp_path / "changed.yaml"), "RTX 5090", 8)
    assert changed.fits and not changed.waiting and changed.start.reserved == found.proposal.reserved


@pytest.mark.parametrize(
    "there, line",
    [
        ("accelerator_config:\n  split_batches: false\n", "  gradient_accumulation_kwargs: {sync_each_batch: true}"),
        (
            "accelerator_config:\n  gradient_accumulation_kwargs:\n    sync_each_batch: false  # why\n",
            "    sync_each_batch: true  # why",
        ),
        (
            "accelerator_config: {even_batches: true}\n",
            "accelerator_config: {even_batches: true, gradient_accumulation_kwargs: {sync_each_batch: true}}",
        ),
        ("accelerator_config: accelerator.json\n", None),
    ],
    ids=["beside others", "turned off", "on one line", "elsewhere"],
)
def test_that_line_goes_where_the_file_has_its_like(there, line, written):
    keys = Keys(read_document(written("max_length: 64\n" + there)))
    assert hugging_face.reduces_once(keys)
    changes = hugging_face.sends_each_batch(keys)
    assert bool(changes) == (line is not None)
    if line:
        text = keys.document.with_changes({place_of(key): value for key, value in changes.items()})
        assert line in text.splitlines()
        assert not hugging_face.reduces_once(Keys(read_document(written(text))))


def test_grpo_of_a_split_model_is_read(written, model, tmp_path):
    """With an engine on each card; what the file says fits as the plan of the same says."""
    text = COLOCATED.replace("beta: 0.04", "beta: 0.0") + FSDP
    once, text = text, text + SYNCED
    waits, sends = start_from(written(once), "L4", 4), start_from(written(text), "L4", 4)
    assert waits.waiting == 2 * count_elements(model) and "sync_each_batch" in str(waits)
    assert not sends.waiting and sends.start.reserved != waits.start.reserved
    found = start_from(written(text), "L4", 2)
    assert (found.stage, found.start.setting.vllm, found.start.setting.objective) == (3, "colocate", "grpo")
    given = {"length": 256, "batch": 16, "completion_length": 64, "generations": 4, "vllm": "colocate"}
    request = make_request(model, "L4", 2, objective="grpo", **given)
    recipe = Recipe("full", "mixed_bf16", "adamw_fused", 3, True, fused_lm_head=True, vllm="colocate")
    planned = measure(request, recipe, 4, 2)
    assert found.start.reserved == planned.engine.trained + int(0.3 * found.room.memory.high)
    asleep = start_from(written(text + "vllm_enable_sleep_mode: true\n"), "L4", 2)
    assert asleep.start.reserved < found.start.reserved
    with_a_reference = start_from(written(COLOCATED + FSDP + SYNCED + "dtype: bfloat16\n"), "L4", 2)
    assert with_a_reference.start.reserved > found.start.reserved
    assert {note.key: note.effect for note in with_a_reference.notes} == {"dtype": "less"}
    with pytest.raises(NotSupported, match=r"fsdp: .*FSDP1"):
        start_from(written((COLOCATED + FSDP).replace("fsdp_version: 2", "fsdp_version: 1")), "L4", 2)
    stage_3 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    for config, more, counted in (
        (stage_3, "", True),
        (stage_3, "use_peft: true\n", False),
        (stage_3, "beta: 0.04\n", False),
        ({"zero_optimization": {"stage": 2}}, "", False),
    ):
        (tmp_path / "ds.json").write_text(json.dumps(config), encoding="utf-8")
        path = written(
            text.replace(FSDP, "").replace("beta: 0.0\n", "") + more + f"deepspeed: {tmp_path / 'ds.json'}\n"
        )
        if counted:
            assert start_from(path, "L4", 2).stage == 3
        else:
            with pytest.raises(NotSupported, match="deepspeed"):
                start_from(path, "L4", 2)


def test_an_engine_that_is_in_no_log_is_not_counted(written):
    with pytest.raises(NotSupported, match=r"use_vllm: .*7\.0"):
        start_from(written(COLOCATED), "P100")
    many = COLOCATED.replace("per_device_train_batch_size: 4", "per_device_train_batch_size: 1024")
    with pytest.raises(NotSupported, match=r"use_vllm: .*1024"):
        start_from(written(many), "L4")


def test_an_engine_that_cannot_start_gets_shorter_texts_and_a_larger_share(written):
    path = written(COLOCATED.replace("0.3 ", "0.001 ").replace("vllm_max_model_length: 256", "max_prompt_length: 192"))
    found = start_from(path, "8GiB, 8.9")
    assert not found.fits and "vLLM" in found.impossible and "2,048" in found.impossible
    assert found.lines["vllm_max_model_length"] == 256 and found.lines["vllm_gpu_memory_utilization"] > 0.3
    assert json.loads(json.dumps(found.to_dict()))["with_changes"]["engine"]["longest"] == 256
    unsure = start_from(written(COLOCATED), "8GiB, 8.9")  # of 0.3 GiB more or less it is not known
    assert unsure.fits and any(note.key == "vllm_gpu_memory_utilization" for note in unsure.notes)
    assert not start_from(written(COLOCATED.replace("0.3 ", "0.4 ")), "8GiB, 8.9").notes


@pytest.mark.parametrize("lines, recipe", [
    ("", Recipe("full", "mixed_bf16", "adamw_fused", 3, True)),
    ("precompute_ref_log_probs: true\n", Recipe("full", "mixed_bf16", "adamw_fused", 3, True, reference="precomputed")),
    ("use_peft: true\ndtype: bfloat16\nlora_r: 8\n", Recipe("lora", "mixed_bf16", "adamw_fused", 3, True)),
], ids=["two models", "made first", "adapters"])  # fmt: skip
def test_pairs_that_a_file_splits_take_what_the_plan_takes(lines, recipe, written, model):
    """Of which the files were run (tests/test_pairs.py); DPOTrainer's defaults are the recipe's."""
    found = start_from(written(DPO + "fsdp: full_shard\n" + SYNCED + lines), "L4", 2)
    assert not found.notes and found.stage == 3
    request = make_request(model, "L4", 2, length=512, batch=32, objective="dpo", lora_rank=8)
    assert found.start.reserved == measure(request, recipe, 8, 2).needed_bytes


def test_a_reference_that_deepspeed_holds_is_not_counted(written):
    zero = DPO + "deepspeed: ds_z3_config.json\n"
    for text in (zero, zero + "use_peft: true\nprecompute_ref_log_probs: true\n"):
        with pytest.raises(NotSupported, match=r"deepspeed: .*fsdp"):
            said(written(text), gpus=2)
    assert said(written(zero + "use_peft: true\n"), gpus=2)[2] == 3
    half = written(DPO + "fsdp: full_shard\ndtype: bfloat16\n")  # the second model is loaded so, and stays so
    assert said(half, gpus=2)[2:] == (3, {"dtype": "less"})


def test_a_file_of_trl_may_not_say_what_it_is_for(written):
    plain = written(DPO.replace("beta: 0.1\nloss_type: sigmoid\n", ""))
    assert start_from(plain, "L4").start.setting.objective == "sft"
    dpo = start_from(plain, "L4", objective="dpo").start.setting
    assert (dpo.objective, dpo.reference, dpo.padded) == ("dpo", "same", True)
    with pytest.raises(WrongValue, match="kto"):
        start_from(plain, "L4", objective="kto")
    with pytest.raises(WrongValue, match="LLaMA-Factory"):
        start_from(written(LLAMA_FACTORY), "L4", objective="dpo")


def test_a_reference_that_finds_no_room_is_made_first(written, tmp_path, model):
    """All weights in fp32 twice, with gradients and states: what its own line takes away is one of the five."""
    text = DPO.replace("MODEL", "meta-llama/Llama-3.2-1B").replace("_size: 8", "_size: 1") + "packing: false\n"
    path = written(text)
    needed = start_from(path, "H100")
    assert needed.fits
    model_bytes = 4 * 1_235_814_400
    found = start_from(path, f"{(needed.start.reserved - model_bytes // 2) / GiB + 1.5:.2f}GiB, 9.0")
    assert not found.fits and found.lines == {"precompute_ref_log_probs": True}
    assert needed.start.reserved - found.proposal.reserved > 0.95 * model_bytes
    copy = found.save(tmp_path / "changed.yaml")
    assert copy.read_text(encoding="utf-8") == text + "precompute_ref_log_probs: true\n"
    again = start_from(copy, "H100")
    assert again.start == found.proposal
    size = f"{(needed.start.reserved - model_bytes // 2) / GiB + 1.5:.2f}GiB, 9.0"
    for line in ("sync_ref_model: true\n", "dataset_streaming: true\n"):  # DPOTrainer refuses that with it
        other = start_from(written(text + line), size)
        assert not other.fits and "precompute_ref_log_probs" not in other.lines
        assert "use_peft" not in other.lines or not line.startswith("sync")


def test_a_length_that_nothing_is_cut_to_is_asked_for(written):
    with pytest.raises(WrongValue, match="--length"):
        start_from(written(DPO.replace("512", "null")), "L4")


def test_axolotl_takes_fp16_where_the_card_has_no_bf16(written):
    text = "base_model: MODEL\nadapter: lora\nlora_r: 8\n"
    assert said(written(text), "T4")[1]["precision"] == "autocast_fp16"
    assert said(written(text), "L4")[1]["precision"] == "autocast_bf16"
    with pytest.raises(NotSupported, match="fp16"):  # all weights in fp16 under a GradScaler
        said(written("base_model: MODEL\n"), "T4")


@pytest.mark.parametrize(
    "line, notes",
    [
        ("use_unsloth: true", {"use_unsloth": "less"}),
        ("enable_liger_kernel: true", {"enable_liger_kernel": "either"}),
        ("enable_liger_kernel: false", {}),
        ("neftune_noise_alpha: 5", {"neftune_noise_alpha": "more"}),
        ("resize_vocab: true", {"resize_vocab": "more"}),
        ("torch_compile: true", {"torch_compile": "either"}),
        ("lora_rnak: 8", {"lora_rnak": "unknown"}),
        ("optim: paged_adamw_8bit", {}),
        ("logging_steps: 10", {}),
        ("eval_strategy: steps\nper_device_eval_batch_size: 64", {"per_device_eval_batch_size": "more"}),
    ],
)
def test_what_is_not_counted_is_said(line, notes, written):
    text = LLAMA_FACTORY.replace("optim: adamw_torch\n", "") + line + "\n"
    assert said(written(text))[3] == notes


OFFLOADING = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False, "offload": True},
}


@pytest.mark.parametrize(
    "change, offload",
    [
        ({}, True),
        ({"gradient_checkpointing": False}, False),
        ({"gradient_checkpointing_kwargs": None}, False),
        ({"gradient_checkpointing_kwargs": '{"offload": true}'}, True),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, False),
        ({"gradient_checkpointing_kwargs": None, "activation_checkpointing_kwargs": {"offload": True}}, True),
        ({"activation_checkpointing_kwargs": {"offload": False}}, False),
        ({"activation_checkpointing": False}, False),
    ],
)
def test_checkpoints_on_the_cpu_are_read(change, offload, written):
    fields = said(written(json.dumps(OFFLOADING | change), "args.json"))[1]
    assert Setting(**fields, model_id="gpt2", sequence_length=64).offload_checkpoints is offload


def test_checkpoints_on_the_cpu_of_arguments_and_of_ranks(written, tmp_path):
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, **OFFLOADING)
    one = Setting.from_training_arguments(arguments, model="gpt2", sequence_length=64)
    assert one.offload_checkpoints
    arguments.activation_checkpointing_kwargs = {"every_n_layers": 2}
    with pytest.raises(NotSupported, match="every_n_layers=2"):
        Setting.from_training_arguments(arguments, model="gpt2")
    found = {}
    for offload in (False, True):
        how = {"gradient_checkpointing_kwargs": {"use_reentrant": False, "offload": offload}, "fsdp": "full_shard"}
        path = written(json.dumps(OFFLOADING | how | {"bf16": True}), "args.json")
        found[offload] = start_from(path, "4 x L4", model="gpt2", length=1024).start.reserved
    assert found[True] < found[False]


@pytest.mark.parametrize("how", ["offload: true", "every_n_layers: 2"])
def test_what_a_tool_does_in_a_way_of_its_own_is_said(how, written):
    text = LLAMA_FACTORY + f"gradient_checkpointing_kwargs:\n  {how}\n"  # which checkpoints without being told
    _, fields, _, notes = said(written(text))
    assert not fields["offload_checkpoints"]
    assert notes == {"gradient_checkpointing_kwargs": "less" if "offload" in how else "more"}


def test_checkpoints_on_the_cpu_are_proposed_in_the_words_of_the_file(written, tmp_path):
    """A text so long that one sample does not fit otherwise; everything else in the file stays."""
    deep = SMALL.to_dict() | {"num_hidden_layers": 24, "layer_types": None, "max_position_embeddings": 65536}
    LlamaConfig(**deep).save_pretrained(tmp_path / "deep")
    for switch, how in (
        ("", ""),  # TRL's default; older transformers know one name, 5.23 both
        ("gradient_checkpointing", ""),
        ("activation_checkpointing", "{}_kwargs:\n  use_reentrant: false\n"),
    ):
        lines = "use_peft: true\nbf16: true\ndtype: bfloat16\nmax_length: 65536\n" + how.format(switch)
        lines += f"{switch}: true\n" if switch else ""
        path = written(f"model_name_or_path: {tmp_path}/deep\nper_device_train_batch_size: 1\n" + lines)
        setting = Setting(**said(path)[1] | {"padded": False})  # of one sample
        needs = [
            predict_memory(replace(setting, offload_checkpoints=on), gpu="RTX 4090").reserved_bytes
            for on in (False, True)
        ]
        assert needs[1] < needs[0]
        sizes = (f"{hundredths / 100}GiB, 8.9" for hundredths in range(100, 2400))
        gpu = next(size for size in sizes if room_on(card(size)).sure_bytes > sum(needs) / 2)
        found = start_from(path, gpu)
        assert not found.fits and found.proposal.setting.offload_checkpoints, found
        name = f"{switch or 'gradient_checkpointing'}_kwargs"
        assert "transformers 5.17" in str(found)
        assert found.lines == ({f"{name}.offload": True} if how else {name: {"use_reentrant": False, "offload": True}})
        saved = found.save(path.with_name("changed.yaml"), force=True)
        assert said(saved)[1]["offload_checkpoints"] and start_from(saved, gpu).fits


def test_no_key_is_both_free_and_counted():
    for tool in TOOLS:
        effects = getattr(tool, "_EFFECTS", hugging_face.EFFECTS)
        assert not free(tool.NAME) & {name for names in effects.values() for name in names}


@pytest.mark.parametrize("builder, name", [
    ("llama3_1_8b", "meta-llama/Llama-3.1-8B"), ("llama3_2_3b", "meta-llama/Llama-3.2-3B"),
    ("qwen2_5_0_5b", "Qwen/Qwen2.5-0.5B"), ("qwen3_1_7b_instruct", "Qwen/Qwen3-1.7B"), ("qwen3_32b", "Qwen/Qwen3-32B"),
    ("phi4_14b", "microsoft/phi-4"),
])  # fmt: skip
def test_torchtune_s_builders_stand_for_models(builder, name, written):
    assert torchtune._model(Keys(read_document(written(TORCHTUNE))), builder) == name


def test_sharding_is_read_from_its_sections(written, tmp_path):
    full = "model_name_or_path: MODEL\nstage: sft\nfinetuning_type: full\nbf16: true\n"
    assert said(written(full + "deepspeed: examples/deepspeed/ds_z3_config.json\n"), gpus=4)[2] == 3
    (tmp_path / "mine.json").write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}')
    _, _, stage, notes = said(written(full + "deepspeed: mine.json\n"), gpus=4)
    assert stage == 2 and notes == {"deepspeed": "less"}
    assert said(written(full + "fsdp: full_shard auto_wrap\n"), gpus=4)[2] == 3
    assert said(written(full + "fsdp: [shard_grad_op]\n"), gpus=4)[2] == 2
    assert said(written(full + "fsdp: full_shard\n"), gpus=1)[2:] == (0, {"fsdp": "either"})
    first = "fsdp: full_shard\nfsdp_config: {version: 1}\n"
    assert said(written(full + first), gpus=4)[2:] == (3, {"fsdp_config": "either"})
    assert said(written(full + first.replace("1", "2")), gpus=4)[2:] == (3, {})


# -- does it fit, and what to change ---------------------------------------------------------------------------------


def test_as_it_stands_it_needs_what_the_setting_needs(written):
    path = written(LLAMA_FACTORY)
    found = start_from(path, "RTX 4090")
    assert found.fits and not found.lines
    report = predict_memory(Setting(**said(path)[1]), gpu="RTX 4090", full=True)
    assert report.peak_bytes <= found.start.reserved < 1.1 * report.reserved_bytes


def test_of_padded_micro_batches_and_of_those_of_one_length_the_larger_counts(written, tmp_path):
    """Grouped heads: with a mask they are repeated; without one a T4's kernel makes matrices of length × length."""
    grouped = tmp_path / "grouped"
    LlamaConfig.from_dict(SMALL_GQA.to_dict() | {"vocab_size": 512}).save_pretrained(grouped)
    text = (
        LLAMA_FACTORY.replace("bf16: true", "fp16: true")
        .replace("size: 8", "size: 32")
        .replace("cutoff_len: 512", "cutoff_len: 2048")
    )

    def found(change="", gpu="T4", **options):
        return start_from(written(text.replace(*change) if change else text), gpu, model=str(grouped), **options)

    setting = Setting(**said(written(text))[1] | {"model_id": str(grouped)})
    for gpu, larger in (("T4", False), ("RTX 4090", True)):
        both = {one: predict_need(replace(setting, padded=one), card(gpu).compute_capability).card
                for one in (False, True)}  # fmt: skip
        assert both[larger] > both[not larger]
        start = found(gpu=gpu).start
        assert (start.with_padding, start.of_one_length) == (both[True], both[False])
        assert start.reserved == both[larger] and start.setting.padded and start.by_padding in str(found(gpu=gpu))
    assert found().to_dict()["as_it_stands"]["reserved_bytes_of_one_length"] == found().start.reserved
    # Repeated heads have room for both, and no line of the file says that.
    (repeated,) = found().in_code
    ways = [
        predict_need(replace(setting, padded=one, attention="sdpa_repeat_kv"), (7, 5)).card for one in (True, False)
    ]
    assert repeated.reserved == max(ways) < found().start.reserved and "use_gqa_in_sdpa = " in str(found())
    # On a card between the two they stand first, and the file may stay as it is.
    between = (max(ways) + found().start.reserved) / 2 / 2**30
    by_code = found(gpu=f"{between:.2f}GiB, 7.5")
    assert by_code.verdict == "does not fit" and by_code.fits_by_code and by_code.to_dict()["fits_by_code"]
    said_first = str(by_code)
    assert said_first.index("use_gqa_in_sdpa = ") < said_first.index("또는 바꿀 줄:")
    assert "파일은 그대로 두고도 들어간다" in said_first
    unsure = replace(by_code, notes=start_from(written(TRL + "packing: true\n"), "T4").notes)
    assert "파일은 그대로 두고도 센 것은 들어간다" in str(unsure)
    assert not found().fits_by_code and not found(gpu=f"{0.9 * max(ways) / 2**30:.2f}GiB, 7.5").fits_by_code
    (in_fp16,) = found(("fp16: true", "bf16: true")).in_code  # bf16 takes that kernel either way
    assert in_fp16.reserved == repeated.reserved and "(fp16일 때)" in in_fp16.why
    assert not found(gpu="RTX 4090").in_code
    assert not start_from(written(text), "T4").in_code  # whose heads are no groups
    # One sample is padded to a multiple of 8 tokens here, by TRL not at all.
    alone = found(("train_batch_size: 32", "train_batch_size: 1")).start
    assert alone.with_padding == predict_need(replace(setting, batch_size=1), (7, 5)).card
    trl = TRL.replace("batch_size: 8", "batch_size: 1").replace("dtype: bfloat16", "fp16: true")
    for more, pads in (("", False), ("pad_to_multiple_of: 64\n", True)):
        one = start_from(written(trl + more), "T4", model=str(grouped)).start
        assert (one.with_padding is not None) == one.setting.padded == pads
    # What is proposed has room for both.
    answer = found(gpu=f"{both[False] / GiB:.4f}GiB, 7.5")
    assert answer.proposal.setting.batch_size < 32 and answer.room.verdict(answer.proposal.reserved) == "fits"
    tried = answer.proposal
    assert tried.setting.batch_size == 1 or tried.reserved == max(tried.with_padding, tried.of_one_length)


CASES = {  # tool → (file, name, a card that it is too much for, keys that change)
    "LLaMA-Factory": (LLAMA_FACTORY, "config.yaml", "1.2GiB, 8.6",
                      {"per_device_train_batch_size", "gradient_accumulation_steps"}),
    "axolotl": (AXOLOTL, "config.yaml", "1.2GiB, 8.6", {"micro_batch_size", "gradient_accumulation_steps"}),
    "TRL": (TRL, "config.yaml", "1.3GiB, 8.6", {"per_device_train_batch_size", "gradient_accumulation_steps"}),
    "TrainingArguments": (TRAINER, "args.json", "2GiB, 8.6",
                          {"per_device_train_batch_size", "gradient_accumulation_steps"}),
}  # fmt: skip


@pytest.mark.parametrize("tool", CASES)
def test_the_smallest_change_is_written_into_the_reader_s_own_file(tool, written, tmp_path, model):
    text, name, gpu, keys = CASES[tool]
    path = written(text, name)
    more = {"model": model, "length": 512} if tool == "TrainingArguments" else {}
    found = start_from(path, gpu, **more)
    assert found.tool == tool and not found.fits and {*found.lines} == keys
    before, after = found.start.setting, found.proposal.setting
    samples = before.batch_size * before.gradient_accumulation_steps
    assert after.batch_size * after.gradient_accumulation_steps == samples
    assert (
        replace(after, batch_size=before.batch_size, gradient_accumulation_steps=before.gradient_accumulation_steps)
        == before
    )
    larger = min(size for size in range(after.batch_size + 1, before.batch_size + 1) if samples % size == 0)
    one = replace(after, batch_size=larger, gradient_accumulation_steps=samples // larger)
    ways = {one, replace(one, padded=False)}
    assert max(predict_need(way, (8, 6)).card for way in ways) > found.room.sure_bytes  # the next larger does not fit
    saved = found.save(tmp_path / f"changed{path.suffix}")
    old, new = path.read_text().splitlines(), saved.read_text().splitlines()
    changed = [line for line in difflib.ndiff(old, new) if line[0] in "+-"]
    assert len([line for line in changed if line[0] == "+"]) == len(keys)
    assert all(any(key in line for key in keys) for line in changed)
    for line in old:
        assert "#" not in line or any(line[line.index("#") :] in other for other in new)  # comments stay
    again = start_from(saved, gpu, **more)
    assert again.fits and again.start == found.proposal


def test_what_changes_training_least_is_proposed_first(written):
    path = written(TRL.replace("train_batch_size: 8", "train_batch_size: 1").replace("512", "1536"))
    seen = []
    found = start_from(path, "1GiB, 8.6", progress=lambda setting, needed: seen.append(setting))
    whole = [setting for setting in seen[1:] if setting.sequence_length == 1536]
    assert seen[1:][: len(whole)] == whole  # a shorter length comes last
    methods = [["full", "lora", "qlora"].index(setting.peft or "full") for setting in whole]
    assert methods == sorted(methods)
    assert found.proposal is None or found.room.verdict(found.proposal.reserved) == "fits"


def test_bf16_on_a_card_without_it(written):
    found = start_from(written(LLAMA_FACTORY), "T4")
    assert not found.fits and "bf16" in found.impossible
    assert "T4에는 bf16 연산 장치가 없다\n" in str(found)
    larger = replace(found, start=replace(found.start, reserved=40 * GiB))
    assert "없다. 메모리도 모자란다\n" in str(larger) and "가 든다(T4의 메모리는 14.56~14.76 GiB)\n" in str(larger)
    assert found.lines == {"bf16": False, "fp16": True} and found.proposal.setting.precision == "autocast_fp16"


QLORA = "model_name_or_path: MODEL\nmax_length: 64\nper_device_train_batch_size: 2\nuse_peft: true\n"


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
@pytest.mark.parametrize(
    "lines, gpu, changes",
    [
        ("fp16: true\n", "T4", {"fp16": False, "bf16": False}),
        ("fp16: true\n", "L4", {"fp16": False, "bf16": True}),
        ("fp16: true\nbf16: false\ndtype: float16\n", "T4", {"fp16": False, "dtype": "float32"}),
        ("fp16: true\nbf16: false\ndtype: float16\n", "L4", {"fp16": False, "bf16": True, "dtype": "bfloat16"}),
        ("", "T4", {"bf16": False}),
    ],
)
def test_trl_s_adapters_of_a_quantized_model_stop_fp16_s_scaler(lines, gpu, changes, bits, written, tmp_path):
    """They are in bf16 (`test_what_trl_proposes_runs`)."""
    found = start_from(written(QLORA + f"{bits}: true\n" + lines), gpu)
    assert not found.fits and found.verdict == "fits"
    assert ("GradScaler" if "fp16" in lines else "bf16") in found.impossible and found.lines == changes
    again = start_from(found.save(tmp_path / "changed.yaml"), gpu)
    assert again.fits and again.start == found.proposal
    setting = found.proposal.setting
    assert setting.precision == (("autocast_bf16" if "dtype" in lines else "mixed_bf16") if gpu == "L4" else "fp32")
    assert setting.trained_dtype == "bf16" and (rest_label() in setting.title) == (setting.precision == "autocast_bf16")
    assert len(found.in_code) == (gpu == "T4") == ("parameter.data.float()" in str(found))
    if found.in_code:
        own = replace(setting, precision="autocast_fp16", trained_dtype="", padded=True)
        ways = [predict_need(replace(own, padded=padded), (7, 5)).card for padded in (True, False)]
        assert found.in_code[0].reserved == max(ways)
        assert json.loads(json.dumps(found.to_dict()))["in_code"][0]["reserved_bytes"] == max(ways)


def test_what_else_scales_or_trains_in_fp16_is_let_be(written, tmp_path):
    """LLaMA-Factory's adapters are in fp32, DeepSpeed has a scaler of its own, and without AMP there is none."""
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}')
    bits = QLORA + "load_in_4bit: true\n"
    for text in (
        bits + "fp16: true\ndeepspeed: ds.json\n",
        bits + "fp16: false\nbf16: false\ndtype: float16\n",
        QLORA + "fp16: true\ndtype: float16\n",
        LLAMA_FACTORY.replace("bf16: true", "fp16: true\nquantization_bit: 4"),
    ):
        found = start_from(written(text), "T4")
        assert not found.impossible and not found.lines


def test_axolotl_s_dpo_of_a_quantized_model_is_trl_s(written, tmp_path):
    text = (
        "base_model: MODEL\nadapter: qlora\nload_in_4bit: true\nlora_r: 8\nlora_target_linear: true\nsequence_len: 64\n"
    )
    for gpu, lines, changes in (
        ("T4", "bf16: false\nfp16: true\n", {"fp16": False}),
        ("T4", "", {"bf16": False}),  # which is fp16 there
        ("L4", "bf16: false\nfp16: true\n", {"fp16": False, "bf16": True}),
    ):
        found = start_from(written(text + "rl: dpo\n" + lines), gpu)
        assert "GradScaler" in found.impossible and found.lines == changes and not found.in_code
        assert start_from(found.save(tmp_path / "changed.yaml", force=True), gpu).fits
    assert start_from(written(text + "fp16: true\nbf16: false\n"), "T4").fits  # SFT's are in fp32


def test_what_trl_proposes_runs(tmp_path):
    """As `trl sft --config` runs the files, on a virtual T4: the first ends as on a card, the second goes on."""
    model = tmp_path / "model"
    SMALL_GQA.save_pretrained(model)
    words = Tokenizer(WordLevel({"<eos>": 0, "a": 1, "b": 2}, unk_token="<eos>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>").save_pretrained(model)
    (tmp_path / "data").mkdir()
    sample = json.dumps({"prompt": "a " * 16, "completion": "b " * 80})
    (tmp_path / "data" / "train.jsonl").write_text(f"{sample}\n" * 8)
    path = tmp_path / "qlora.yaml"
    path.write_text(
        QLORA.replace("MODEL", str(model)) + f"load_in_4bit: true\nfp16: true\ndataset_name: {tmp_path / 'data'}\n"
        f"output_dir: {tmp_path / 'out'}\nreport_to: none\nlora_dropout: 0.05\n"
    )
    found = start_from(path, "T4")
    report = tmp_path / "report.json"
    for config, error in ((path, "BFloat16"), (found.save(tmp_path / "changed.yaml"), None)):
        command = ["-m", "virtual_gpu", "run", "--gpu", "T4", "--no-advise", "--force", "--report", str(report)]
        run_forked([*command, trl.scripts.sft.__file__, "--config", str(config)], folder=tmp_path)
        ran = json.loads(report.read_text())
        assert (error in ran["error"]) if error else (ran["status"], ran["error"]) == ("fits", None)
    assert ran["reserved"] == pytest.approx(found.proposal.reserved, rel=0.05)


@pytest.mark.parametrize(
    "text, line, without",
    [
        (AXOLOTL.replace("bf16: auto", "fp16: true\nbf16: false"), "flash_attention: true", "flash_attention: false"),
        (
            "base_model: MODEL\nadapter: lora\nlora_r: 8\nattn_implementation: flash_attention_2\n",
            "attn_implementation: flash_attention_2",
            "attn_implementation: sdpa",
        ),
        (
            LLAMA_FACTORY.replace("bf16: true", "fp16: true\nflash_attn: fa2"),
            "flash_attn: fa2",
            "flash_attn: sdpa",
        ),
        (
            TRL.replace("dtype: bfloat16", "fp16: true\nattn_implementation: flash_attention_2"),
            "attn_implementation: flash_attention_2",
            "attn_implementation: sdpa",
        ),
    ],
)
def test_flash_attention_on_a_card_before_ampere(text, line, without, written, tmp_path):
    path = written(text)
    found = start_from(path, "T4")
    assert not found.fits and found.verdict == "fits" and "flash-attn" in found.impossible
    name, value = without.split(": ")
    assert found.lines == {name: {"false": False}.get(value, value)}
    copy = found.save(tmp_path / "changed.yaml")
    assert copy.read_text() == path.read_text().replace(line, without)
    again = start_from(copy, "T4")
    assert again.start == found.proposal and not again.impossible
    assert [str(note) for note in again.notes] == [str(note) for note in found.notes]  # of masks that it had not
    ampere = start_from(path, "L4")
    assert not ampere.impossible and not ampere.lines


def test_of_several_reasons_each_is_said(written):
    found = start_from(written(LLAMA_FACTORY + "flash_attn: fa2\n"), "T4")
    assert "bf16" in found.impossible and "flash-attn" in found.impossible
    assert found.lines == {"bf16": False, "fp16": True, "flash_attn": "sdpa"}


def test_8_bit_adamw_is_counted_as_the_trainer_has_it(written, model):
    """`GlobalOptimManager` has nn.Embedding's state in fp32; torchtune's loop knows nothing of that."""
    arguments = '{"per_device_train_batch_size": 1, "bf16": true, "optim": "adamw_bnb_8bit"}'
    full = start_from(written(arguments, "args.json"), "L4", model=model, length=64)
    assert full.start.setting.fp32_embedding_state and not full.notes
    adapters = start_from(written(arguments, "args.json"), "L4", model=model, length=64, peft="lora")
    assert not adapters.start.setting.fp32_embedding_state  # no embedding is trained
    full = TORCHTUNE.replace("lora_llama3_2_1b", "llama3_2_1b").replace("  fused: true\n", "")
    for theirs, ours in (
        ("AdamW8bit", "adamw_8bit"),
        ("PagedAdamW8bit", "paged_adamw_8bit"),
        ("PagedAdamW", "paged_adamw"),
    ):
        text = full.replace("torch.optim.AdamW", f"bitsandbytes.optim.{theirs}")
        setting = said(written(text))[1]
        assert setting["optimizer"] == ours and "fp32_embedding_state" not in setting


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit"])
def test_8_bit_states_and_then_pages_are_one_line(optim, written):
    """What `replace` makes of AdamW's setting is the Trainer's 8 bits too."""
    arguments = '{"per_device_train_batch_size": 1, "bf16": true, "gradient_checkpointing": true, "optim": "OPTIM"}'
    file = written(arguments.replace("OPTIM", optim), "args.json")
    medium = {"model": "openai-community/gpt2-medium", "length": 128}
    for gpu, name in (("5.5 GiB, 8.0", "adamw_bnb_8bit"), ("4.3 GiB, 8.0", "paged_adamw_8bit")):
        found = start_from(file, gpu, **medium)
        if found.fits:
            assert (gpu, optim) == ("5.5 GiB, 8.0", name)
            continue
        assert found.lines == {"optim": name} and found.proposal.setting.fp32_embedding_state


def test_pages_are_told_of(written, model):
    arguments = '{"per_device_train_batch_size": 1, "bf16": true, "optim": "OPTIM"}'
    whole, paged = (
        start_from(written(arguments.replace("OPTIM", name), f"{name}.json"), "L4", model=model, length=64)
        for name in ("adamw_bnb_8bit", "paged_adamw_8bit")
    )
    assert paged.start.paged > 0 == whole.start.paged and paged.start.reserved < whole.start.reserved
    assert "페이지" in str(paged) and "페이지" not in str(whole)
    assert paged.to_dict()["as_it_stands"]["paged_bytes"] == paged.start.paged


def test_of_shards_only_adamw_is_counted(written, model):
    arguments = '{"per_device_train_batch_size": 1, "bf16": true, "optim": "OPTIM", "fsdp": "full_shard"}'
    for name, told, bound in (
        ("adamw_torch", [], "  "),
        ("paged_adamw_8bit", [("optim", "less")], "  많아야"),
        ("ademamix", [("optim", "more")], "  적어도"),  # three numbers a parameter, of which AdamW has two
    ):
        found = start_from(written(arguments.replace("OPTIM", name), f"{name}.json"), "L4", 2, model=model, length=64)
        assert [(note.key, note.effect) for note in found.notes] == told and f"\n{bound}" in str(found)


def test_what_steps_in_the_backward_is_of_one_gpu(written, model, monkeypatch):
    monkeypatch.setattr("virtual_gpu.step.own_code._LIBRARIES", {})  # as if LOMO's were there
    arguments = written('{"per_device_train_batch_size": 1, "bf16": true, "optim": "adalomo"}', "args.json")
    with pytest.raises(NotSupported, match=r"optim: .*GPU끼리"):
        start_from(arguments, "L4", 2, model=model, length=64)


def test_4_bit_weights_are_not_proposed_beside_a_library_s_own_code(written):
    text = TRL.replace("512", "64").replace("batch_size: 8", "batch_size: 1")
    adapters = written(text + "use_peft: true\noptim: rmsprop\n")
    found = start_from(adapters, "1GiB, 8.0", model="openai-community/gpt2-medium")
    assert not found.fits and found.proposal is None and found.start.setting.optimizer == "rmsprop"
    with pytest.raises(NotSupported, match="'rmsprop': 4비트"):
        replace(found.start.setting, peft="qlora")


def test_several_gpus(written):
    full = "model_name_or_path: MODEL\nstage: sft\nfinetuning_type: full\nbf16: true\ncutoff_len: 128\n"
    full += "per_device_train_batch_size: 1\ndeepspeed: ds_z3_config.json\n"
    sharded, alone = (start_from(written(full), "L4", gpus) for gpus in (4, 1))
    assert (sharded.stage, alone.stage) == (3, 0) and sharded.start.reserved < alone.start.reserved
    adapters = start_from(written(full.replace("full", "lora")), "L4", 2)
    assert adapters.stage == 3 and adapters.start.reserved < sharded.start.reserved
    several = full.replace("train_batch_size: 1", "train_batch_size: 4").replace("128", "1024")
    start = start_from(written(several), "L4", 4).start
    padded, even = (
        rank_step(
            start.setting.model_id, 4, batch_size=4, gpu="L4", exact=False, padded=one, gradient_checkpointing=True
        )
        for one in (True, False)
    )
    assert (start.with_padding, start.of_one_length) == (padded.card_bytes, even.card_bytes)
    assert padded.total - even.total >= 4 * 1024 * 1024  # the mask, a byte for each pair of tokens


# -- files that are not to be trusted, or not to be lost ------------------------------------------------------------


@pytest.mark.parametrize(
    "text, words",
    [
        ("a: &a [x, x]\nb: &b [*a, *a]\nbase_model: *b\n", "line 1|1번째"),
        ("base_model: !!python/object/apply:os.system ['touch pwned']\n", "python/object"),
        ("base_model: !include secret.yaml\n", "!include"),
        ("[" * 10_000, "line 1|1번째"),
        ("a: " + "{b: " * 5000, "line 1|1번째"),
        ("base_model: x\nbase_model: y\n", "line 2|2번째"),
        ("base_model: x\n1: y\n", "'1'"),
        ("base_model: x\nyes: y\n", "'yes'"),
        ("base_model: x\n---\nbase_model: y\n", "line 3|3번째|line 2|2번째"),
        ("- base_model\n", "mapping|key: value"),
        ("", "mapping|key: value"),
        ("just a text", "mapping|key: value"),
        ("base_model: [x\n", "line"),
        ("base_model: 2024-13-45\n", "month"),
        ("x: " + "9" * 5000, "digits"),
        ("a\tb: \x01", "config.yaml"),
        ("#" * (MOST_BYTES + 1), str(f"{MOST_BYTES:,}")),
    ],
)
def test_a_hostile_file_gets_one_clear_error(text, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(BadConfiguration, match=words):
        start_from("config.yaml", "T4")
    assert os.listdir(tmp_path) == ["config.yaml"]


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": 1, "a": 2}', "[" * 100_000, '{"x": NaN' + "}" * 2, "null"])
def test_a_hostile_json_too(text, tmp_path):
    (tmp_path / "args.json").write_text(text)
    with pytest.raises(BadConfiguration):
        start_from(tmp_path / "args.json", "T4")


@pytest.mark.parametrize(
    "change, words",
    [
        (("lora_rank: 16", "lora_rank: [16]"), "lora_rank"),
        (("lora_rank: 16", "lora_rank: -1"), "lora_rank"),
        (("lora_rank: 16", "lora_rank: 1.5"), "lora_rank"),
        (("bf16: true", "bf16: maybe"), "bf16"),
        (("bf16: true", "bf16: {a: 1}"), "bf16"),
        (("bf16: true", "bf16: true\nfp16: true"), "fp16"),
        (("bf16: true", "bf16: true\nlora_dropout: 2"), "lora_dropout"),
        (("bf16: true", "bf16: true\nquantization_bit: 3"), "quantization_bit"),
        (("cutoff_len: 512", "cutoff_len: 512000"), "512000"),
        (("cutoff_len: 512", "cutoff_len: '${x}'"), "cutoff_len"),
        (("finetuning_type: lora", "finetuning_type: freeze"), "finetuning_type"),
        (("stage: sft", "stage: ppo"), "stage"),
        (("stage: sft", "stage: [sft]"), "stage"),
        (("optim: adamw_torch", "optim: galore_adamw"), "optim"),
        (("optim: adamw_torch", "optim: lion"), "lion_32bit"),
        (("optim: adamw_torch", "optim: adamw_torhc"), "adamw_torch"),
        (("lora_target: q_proj, v_proj", "lora_target: 3"), "lora_target"),
        (("lora_target: q_proj, v_proj", "lora_target: nothing"), "nothing"),
        (("model_name_or_path: MODEL", "model_name_or_path: 7"), "model_name_or_path"),
        (("model_name_or_path: MODEL", "#"), "--model"),
        (("model_name_or_path: MODEL", "model_name_or_path: ../../etc/passwd"), "passwd"),
        (("bf16: true", "deepspeed: nowhere.json"), "deepspeed"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(change, words, written):
    text = LLAMA_FACTORY.replace(*change)
    with pytest.raises((WrongValue, BadConfiguration), match=words):
        start_from(written(text), "RTX 4090")


def test_what_is_no_file_or_no_configuration(tmp_path, written):
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in ("/dev/zero", tmp_path, tmp_path / "nothing.yaml", tmp_path / "pipe.yaml", "nul\0.yaml"):
        with pytest.raises(BadConfiguration):
            start_from(path, "T4")
    for path in (False, None, 3, b"args.json"):
        with pytest.raises(WrongValue, match="path="):
            start_from(path, "T4")
    with pytest.raises(NotSupported, match="axolotl"):
        start_from(written("services: {web: nginx}\n"), "T4")


def test_a_changed_file_goes_over_nothing(written, tmp_path):
    path = written(LLAMA_FACTORY)
    found = start_from(path, "1.2GiB, 8.6")
    precious = tmp_path / "precious.yaml"
    precious.write_text("mine")
    link = tmp_path / "link.yaml"
    link.symlink_to(precious)
    for there, force in ((precious, False), (link, False), (link, True), (path, False), (precious / "x.yaml", True)):
        with pytest.raises(ExistingFile):
            found.save(there, force)
    assert precious.read_text() == "mine" and "per_device_train_batch_size: 8" in path.read_text()
    found.save(path, force=True)  # one's own file, in so many words
    assert yaml.safe_load(path.read_text())["per_device_train_batch_size"] < 8


@pytest.mark.parametrize("text", [
    'base_model: "MODEL"\r\nadapter: lora\r\nlora_r: 8\r\nmicro_batch_size: 8\r\nsequence_len: 512\r\n',
    "base_model: MODEL\nadapter: lora\nlora_r: 8\nmicro_batch_size:\n  8\nsequence_len: 512",
    "{base_model: MODEL, adapter: lora, lora_r: 8, micro_batch_size: 8, sequence_len: 512}",
])  # fmt: skip
def test_other_ways_to_write_it(text, written, tmp_path, model):
    """Windows' line ends stay; what does not stand on a line of its own is changed by hand, and said to be."""
    path = written(text)
    path.write_bytes(text.replace("MODEL", model).encode())
    found = start_from(path, "1.2GiB, 8.6")
    assert {*found.lines} == {"micro_batch_size", "gradient_accumulation_steps"}
    if "\r" in text:
        saved = found.save(tmp_path / "changed.yaml")
        assert start_from(saved, "1.2GiB, 8.6").fits and saved.read_bytes().count(b"\r\n") == text.count("\r\n") + 1
    else:
        with pytest.raises(NotSupported, match=r"micro_batch_size|gradient_accumulation_steps"):
            found.save(tmp_path / "changed.yaml")


# -- the terminal ----------------------------------------------------------------------------------------------------


def test_the_terminal(written, tmp_path, capsys):
    path = written(LLAMA_FACTORY)
    assert main(["--from", str(path), "--gpu", "RTX 4090", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]
    copy = tmp_path / "copy.yaml"
    assert main(["--from", str(path), "--gpu", "1.2GiB, 8.6", "--save", str(copy)]) == 1
    out = capsys.readouterr().out
    assert "per_device_train_batch_size: 8 →" in out and copy.is_file()
    assert main(["--from", str(path), "--batch", "4"]) == 2 and "--batch" in capsys.readouterr().err
    assert main(["--from", str(path), "--save", str(copy)]) == 2 and "--force" in capsys.readouterr().err
    assert main(["--from", str(tmp_path)]) == 2 and str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("option", [
    "--context-parallel 2", "--replicas 2", "--tensor-parallel 2", "--no-sequence-parallel", "--selective",
    "--cpu-offload", "--prefer speed", "--price-per-hour 2",
])  # fmt: skip
def test_what_only_a_search_reads_is_refused(option, written, capsys):
    assert main(["--from", str(written(LLAMA_FACTORY)), "--gpu", "RTX 4090", *option.split()]) == 2
    assert f"{option.split()[0]}: --model" in capsys.readouterr().err


def test_every_error_is_ours(written):
    for text in ("base_model: 3\n", "model:\n  _component_: 5\n", "model: {_component_: x.y}\nbatch_size: 1\n"):
        with pytest.raises(VirtualGPUError):
            start_from(written(text), "T4")
