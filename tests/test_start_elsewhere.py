"""What other people's files say that ours do not: each was once read in another way, or not at all."""

import json
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from virtual_gpu.cards import card
from virtual_gpu.errors import NoSuchLayer, NotSupported, WrongValue
from virtual_gpu.models.attention import REPEATED
from virtual_gpu.plan.start import start_from
from virtual_gpu.plan.start.answer import TOOLS
from virtual_gpu.plan.start.document import read_document
from virtual_gpu.plan.start.keys import EITHER, LESS, MORE, Keys
from virtual_gpu.step.predict import predict_memory, predict_need
from virtual_gpu.step.setting import Setting

SMALL = LlamaConfig(
    vocab_size=32000, hidden_size=768, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048,
    max_position_embeddings=2048, dtype="bfloat16",
)  # fmt: skip
AXOLOTL = "base_model: MODEL\nsequence_len: 512\nmicro_batch_size: 8\nbf16: true\n"
FLASH = AXOLOTL + "flash_attention: true\n"
LLAMA_FACTORY = "model_name_or_path: MODEL\nstage: sft\ndo_train: true\ncutoff_len: 512\nbf16: true\n"
FULL = LLAMA_FACTORY + "finetuning_type: full\nper_device_train_batch_size: 8\n"
TRL = "model_name_or_path: MODEL\nmax_length: 512\nper_device_train_batch_size: 8\nbf16: true\n"
UNCHECKED = TRL + "gradient_checkpointing: false\n"
ARGUMENTS = "per_device_train_batch_size: 8\nbf16: true\n"
TORCHTUNE = """model:
  _component_: torchtune.models.llama3_2.KINDllama3_2_1b
  lora_attn_modules: [q_proj, v_proj]
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 512}
batch_size: 2
optimizer: {_component_: torch.optim.AdamW, fused: true}
loss: {_component_: torchtune.modules.loss.LOSS}
dtype: bf16
"""


@pytest.fixture
def written(tmp_path):
    """A file with this text; MODEL is a small Llama's folder."""
    SMALL.save_pretrained(tmp_path / "model")

    def make(text, name="config.yaml"):
        path = tmp_path / name
        path.write_text(text.replace("MODEL", str(tmp_path / "model")), encoding="utf-8")
        return path

    return make


def read(path, gpus=1, objective=None):
    """(fields, stage, key → effect of each note)."""
    keys = Keys(read_document(path))
    tool = next(tool for tool in TOOLS if tool.knows(keys.document.values))
    fields, stage = tool.read(keys, card("RTX 4090"), gpus, None, objective)
    return fields, stage, {note.key: note.effect for note in keys.notes}


def torchtune(kind="", loss="LinearCrossEntropyLoss"):
    return TORCHTUNE.replace("KIND", kind).replace("LOSS", loss)


@pytest.mark.parametrize("gpu, dtype, capability", [("T4", "fp32", (7, 5)), ("RTX 4090", "bf16", (8, 9))])
def test_torchtune_repeats_grouped_heads_by_itself(gpu, dtype, capability, written):
    path = written(torchtune().replace("max_seq_len: 512", "max_seq_len: 1024").replace("bf16", dtype))
    found = start_from(path, gpu)
    ways = [
        predict_need(replace(found.start.setting, attention=attention), capability).card
        for attention in ("sdpa", REPEATED)
    ]
    assert found.start.reserved == ways[1] and not found.in_code
    assert (ways[0] > ways[1]) == (gpu == "T4")  # the math kernel's matrices; elsewhere the copies are more


def test_torchtune_on_a_real_card(written):
    """60.0 GiB of tensors on an A100, "+ packed dataset" in the table of its README at bd2a0fc (BSD-3-Clause).

    The pack's mask, 32 MiB, is not in it. Without the heads' copies it would be 57.9.
    """
    text = torchtune(loss="CEWithChunkedOutputLoss").replace("llama3_2_1b", "llama3_2_3b").replace("512", "4096")
    setting = start_from(written(text), "A100-80GB").start.setting
    assert (setting.model_id, setting.batch_size) == ("meta-llama/Llama-3.2-3B", 2)
    assert predict_memory(setting, gpu="A100-80GB").peak_bytes == pytest.approx(60.0 * 2**30, rel=0.01)


# -- how it is split -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, stage",
    [
        (FULL + "fsdp: full_shard\n", 3),
        (FULL + "fsdp: ''\nfsdp_config: {min_num_params: 0, xla: false}\n", 0),  # as transformers 4 wrote it
        (FULL + "fsdp_config: {reshard_after_forward: true}\n", 0),
        (AXOLOTL + "fsdp_config: {reshard_after_forward: true}\n", 3),
        (AXOLOTL + "fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}\n", 2),
        (AXOLOTL + "fsdp_config: {fsdp_sharding_strategy: NO_SHARD}\n", 0),
        (AXOLOTL + "fsdp_config: {fsdp_reshard_after_forward: false}\n", 2),
        (AXOLOTL + "fsdp: []\n", 0),
        (torchtune("lora_"), 3),
        (torchtune("qlora_") + "fsdp_reshard_after_forward: true\n", 3),
        (torchtune() + "fsdp_reshard_after_forward: false\n", 2),
    ],
)
def test_fsdp_is_on_where_its_tool_turns_it_on(text, stage, written):
    assert read(written(text), 4)[1] == stage
    _, alone, notes = read(written(text))
    assert alone == 0 and ({"fsdp", "fsdp_config"} & {*notes} != set()) == (stage > 0 and "_component_" not in text)


def test_fsdp_s_own_file_is_read(written, tmp_path, monkeypatch):
    (tmp_path / "fsdp.json").write_text('{"reshard_after_forward": false, "fsdp_offload_params": true}')
    text = FULL + "fsdp: full_shard\nfsdp_config: NAME\n"
    monkeypatch.chdir(tmp_path.parent)
    for name in ("fsdp.json", f"{tmp_path.name}/fsdp.json"):
        assert read(written(text.replace("NAME", name)), 4)[1:] == (2, {"fsdp": LESS})
    with pytest.raises(WrongValue, match=r"fsdp_config: 'nowhere\.json'"):
        read(written(text.replace("NAME", "nowhere.json")), 4)


def test_a_file_for_deepspeed_is_found_from_the_working_folder(written, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.json").write_text('{"zero_optimization": {"stage": 2}}')
    path = written(FULL + "deepspeed: elsewhere/mine.json\n", "here.yaml")
    (tmp_path / "deeper").mkdir()
    deeper = path.rename(tmp_path / "deeper" / path.name)
    monkeypatch.chdir(tmp_path)
    assert read(deeper, 4)[1:] == (2, {})
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(WrongValue, match="elsewhere/mine"):
        read(deeper, 4)


@pytest.mark.parametrize(
    "text, on",
    [
        (AXOLOTL + "fsdp_config: {activation_checkpointing: true}\n", True),
        (AXOLOTL + "fsdp_config: {fsdp_activation_checkpointing: true}\n", True),
        (AXOLOTL + "fsdp_config: {activation_checkpointing: false}\n", False),
        (
            TRL + "gradient_checkpointing: false\nfsdp: full_shard\nfsdp_config: {activation_checkpointing: true}\n",
            True,
        ),
        (TRL + "gradient_checkpointing: false\nfsdp_config: {activation_checkpointing: true}\n", False),  # fsdp is off
        (ARGUMENTS + "fsdp: full_shard\nfsdp_config: {activation_checkpointing: true}\n", True),
        (ARGUMENTS, False),
    ],
)
def test_fsdp_checkpoints_too(text, on, written):
    assert read(written(text), 4)[0]["gradient_checkpointing"] is on


def test_adapters_of_torchtune_are_split_over_the_cards(written):
    """Its distributed recipes shard whatever is trained: one card of four holds less than the whole."""
    path = written(torchtune("lora_"))
    whole, split = start_from(path, "RTX 4090"), start_from(path, "RTX 4090", 4)
    assert split.stage == 3 and split.start.reserved < 0.8 * whole.start.reserved


# -- the loss --------------------------------------------------------------------------------------------------------


CUT = "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n"
LIGER = "plugins: [axolotl.integrations.liger.LigerPlugin]\n"


@pytest.mark.parametrize(
    "text, fused, notes",
    [
        (AXOLOTL + CUT, True, {"plugins": EITHER}),
        (AXOLOTL + CUT + "cut_cross_entropy: false\n", False, {}),
        (AXOLOTL + LIGER, False, {}),
        (AXOLOTL + LIGER + "liger_fused_linear_cross_entropy: true\n", True,
         {"liger_fused_linear_cross_entropy": EITHER}),
        (AXOLOTL + "plugins: [mine.Plugin]\n", False, {"plugins": EITHER}),
        (FULL + "enable_liger_kernel: true\n", True, {"enable_liger_kernel": EITHER}),
        (FULL.replace("sft", "dpo") + "enable_liger_kernel: true\n", False, {"enable_liger_kernel": LESS}),
        (ARGUMENTS + "use_liger_kernel: true\n", True, {"use_liger_kernel": EITHER}),
        (torchtune(), True, {"loss": EITHER}),
        (torchtune(loss="CEWithChunkedOutputLoss"), False, {"loss": LESS}),
    ],
)  # fmt: skip
def test_a_loss_from_tiles_is_counted_as_one(text, fused, notes, written):
    fields, _, found = read(written(text))
    assert fields.get("fused_lm_head", False) is fused
    assert {key: effect for key, effect in found.items() if key in {*notes} | {"plugins", "loss"}} == notes


PAIRS = FLASH + "rl: dpo\nrl_beta: 0.1\n"


@pytest.mark.parametrize(
    "more, fields",
    [
        ("", {"peft": None, "reference": "same", "trained_dtype": ""}),
        ("adapter: lora\n", {"peft": "lora", "reference": "same", "trained_dtype": ""}),
        ("adapter: qlora\nload_in_4bit: true\n", {"peft": "qlora", "trained_dtype": "bf16", "rest_in_fp32": False}),
        ("adapter: lora\nload_in_8bit: true\n", {"load_in_8bit": True, "trained_dtype": "bf16"}),
        ("adapter: lora\nprecompute_ref_log_probs: true\n", {"reference": "precomputed"}),
        ("gradient_checkpointing: true\n", {"gradient_checkpointing": True, "use_reentrant": False}),
        ("gradient_checkpointing:\n", {"gradient_checkpointing": True}),
        ("adapter: lora\nload_in_8bit: true\ngradient_checkpointing: true\n", {"use_reentrant": False}),
        ("liger_cross_entropy: true\nchunked_cross_entropy: true\n", {"fused_lm_head": False}),
        # The loss of pairs is made from the model's logits, which these plugins leave as they are.
        (LIGER + "liger_fused_linear_cross_entropy: true\n", {"fused_lm_head": False}),
        (CUT, {"fused_lm_head": False}),
    ],
)
def test_axolotl_s_dpo_is_that_of_its_trl(more, fields, written):
    found, stage, notes = read(written(PAIRS + more))
    fields |= {"objective": "dpo", "logits_by_row": True, "padded": True}
    assert stage == 0 and not notes and {name: found[name] for name in fields} == fields
    ipo, *_ = read(written(PAIRS.replace("dpo", "ipo") + more))
    assert ipo == found


def test_of_all_weights_axolotl_keeps_the_reference(written):
    found, _, notes = read(written(PAIRS + "precompute_ref_log_probs: true\n"))
    assert found["reference"] == "same" and notes == {"precompute_ref_log_probs": LESS}


@pytest.mark.parametrize("more", ["sample_packing: true\n", "dpo_loss_type: [sigmoid]\n"])
def test_what_axolotl_itself_refuses_is_said(more, written):
    with pytest.raises(WrongValue, match=more.split(":")[0]):
        read(written(PAIRS.replace("dpo", "ipo") + more))


@pytest.mark.parametrize(
    "text, gpus, key",
    [
        (AXOLOTL + "rl: grpo\n", 1, "rl"),
        (AXOLOTL + "rl: kto\n", 1, "rl"),
        (PAIRS + "dpo_loss_type: [sigmoid, sft]\n", 1, "dpo_loss_type"),
        (PAIRS + "dpo_use_liger_kernel: true\n", 1, "dpo_use_liger_kernel"),
        (PAIRS + "adapter: lora\nrl_adapter_ref_model: true\n", 1, "rl_adapter_ref_model"),
        (PAIRS + "deepspeed:\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n", 4, "fsdp_config"),
    ],
)
def test_what_of_axolotl_s_preferences_is_not_counted_is_refused(text, gpus, key, written):
    with pytest.raises(NotSupported, match=key):
        read(written(text), gpus)


def test_a_proposal_for_axolotl_s_dpo_is_what_its_file_says(written):
    """Of all weights a second model lies beside; adapters are scored without them."""
    path = written(PAIRS.replace("512", "2048"))
    answer = start_from(path, "RTX 3060")
    found = answer.proposal.setting
    assert not answer.fits and found.objective == "dpo" and found.logits_by_row
    changed = answer.save(path.with_name("changed.yaml"))
    assert start_from(changed, "RTX 3060").start.setting == found


@pytest.mark.parametrize("gpus", [1, 4])
def test_it_takes_less(gpus, written):
    text = FULL + ("fsdp: full_shard\n" if gpus > 1 else "")
    whole, tiles = (start_from(written(text + more), "RTX 4090", gpus) for more in ("", "enable_liger_kernel: true\n"))
    assert whole.start.reserved - tiles.start.reserved > 8 * 512 * 32000 * 4
    assert "tiles" not in str(whole) and tiles.start.setting.fused_lm_head


# -- a proposal is what its file says ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, gpu",
    [
        (LLAMA_FACTORY + "lora_rank: 64\nper_device_train_batch_size: 1\n", "1.15GiB, 8.9"),
        (AXOLOTL + "adapter: lora\nlora_r: 64\nlora_dropout: 0.1\nlora_target_linear: true\n", "1.25GiB, 8.9"),
        (TRL + "torch_dtype: float32\nlora_r: 64\nlora_target_modules: all-linear\n", "1.25GiB, 8.9"),
        (FULL + "pure_bf16: true\nlora_rank: 4\n", "1.25GiB, 8.9"),
    ],
    ids=["LLaMA-Factory", "axolotl", "TRL", "pure bf16"],
)
def test_another_method_is_measured_as_the_changed_file_has_it(text, gpu, written, tmp_path):
    found = start_from(written(text), gpu)
    assert not found.fits and {"quantization_bit", "load_in_4bit", "use_peft", "finetuning_type"} & {*found.lines}
    again = start_from(found.save(tmp_path / "changed.yaml"), gpu)
    assert again.fits and again.start.reserved == found.proposal.reserved
    assert again.start.setting == found.proposal.setting


def test_keys_keep_the_names_that_the_file_has(written):
    text = TRL.replace("max_length", "max_seq_length") + "torch_dtype: float32\n"
    keys = Keys(read_document(written(text)))
    trl = next(tool for tool in TOOLS if tool.NAME == "TRL")
    old = Setting(**trl.read(keys, card("RTX 4090"), 1, None)[0])
    new = Setting(**{**vars(old), "precision": "autocast_bf16", "sequence_length": 256})
    assert trl.write(keys, old, new) == {"max_seq_length": 256, "torch_dtype": "bfloat16"}


def test_a_method_that_cannot_be_is_no_error_of_a_file_that_does_not_ask(written, tmp_path):
    """peft puts no dropout on the experts of a mixture, and axolotl's file without adapters has none."""
    config = {"model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8,
              "num_experts_per_tok": 2, "vocab_size": 4096, "max_position_embeddings": 1024}  # fmt: skip
    (tmp_path / "mixture").mkdir()
    (tmp_path / "mixture" / "config.json").write_text(json.dumps(config))
    found = start_from(written(AXOLOTL.replace("MODEL", str(tmp_path / "mixture"))), "1GiB, 8.9")
    assert not found.fits


def test_a_prompt_and_its_completion_are_not_made_shorter(written):
    """Where nothing else fits there is nothing to propose, and no error."""
    text = TRL.replace("max_length", "max_completion_length") + "max_prompt_length: 256\nnum_generations: 8\n"
    found = start_from(written(text), "1GiB, 8.9", objective="grpo")
    assert not found.fits and not found.lines


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_a_pattern_names_whole_layers(written):
    pattern = r"'model\.layers\.[01]\.self_attn\.(q|k|v|o)_proj'"
    found = start_from(written(AXOLOTL + f"adapter: lora\nlora_target_modules: {pattern}\n"), "RTX 4090")
    ends = start_from(written(AXOLOTL + "adapter: lora\nlora_target_modules: [q_proj, k_proj, v_proj, o_proj]\n"))
    assert found.start.setting.lora_targets == pattern.strip("'")
    assert found.start.reserved < ends.start.reserved  # two layers of eight
    with pytest.raises(NoSuchLayer, match="vision"):
        start_from(written(AXOLOTL + "adapter: lora\nlora_target_modules: 'vision.*'\n"), "RTX 4090")
    with pytest.raises(WrongValue, match="lora_target_modules"):
        start_from(written(AXOLOTL + "adapter: lora\nlora_target_modules: 'model.(layers'\n"), "RTX 4090")


def test_phi_s_layers_are_one_in_transformers(written):
    text = torchtune("lora_").replace("llama3_2.lora_llama3_2_1b", "phi4.lora_phi4_14b")
    fields, _, _ = read(written(text + "enable_activation_checkpointing: true\n"))
    assert fields["model_id"] == "microsoft/phi-4" and fields["lora_targets"] == ("qkv_proj",)


# -- what is refused, and how sure an answer is ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, words",
    [
        ("zero_optimization: {stage: 3}\nbf16: {enabled: auto}\n", "DeepSpeed"),
        ("distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n", "accelerate"),
        ("merge_method: slerp\nbase_model: MODEL\ndtype: bfloat16\n", "mergekit"),
        ("model_name_or_path: MODEL\ntemplate: llama3\ninfer_backend: vllm\n", "infer_backend"),
        ("model_name_or_path: MODEL\ntemplate: llama3\nexport_dir: out\n", "export_dir"),
        (torchtune(loss="..rlhf.loss.DPOLoss"), "loss._component_"),
        (torchtune() + "teacher_model: {_component_: torchtune.models.llama3_2.llama3_2_3b}\n", "teacher_model"),
        (AXOLOTL + "optimizer: came_pytorch\n", "optimizer"),
    ],
)
def test_what_is_no_training_of_these_is_refused_by_name(text, words, written):
    with pytest.raises(NotSupported, match=words):
        start_from(written(text), "RTX 4090", model="gpt2", length=128)


def test_4_bits_without_adapters_are_refused(written):
    with pytest.raises(WrongValue, match=r"load_in_4bit.*use_peft"):
        start_from(written(TRL + "load_in_4bit: true\n"), "RTX 4090")


def test_a_model_that_torchtune_builds_and_nobody_here_knows_is_asked_for(written):
    path = written(torchtune().replace("llama3_2.llama3_2_1b", "mine.mine_1b"))
    with pytest.raises(WrongValue, match="--model"):
        start_from(path, "RTX 4090")
    assert start_from(path, "RTX 4090", model="gpt2").fits


def test_a_verdict_says_where_what_is_not_counted_may_turn_it(written):
    more = start_from(written(LLAMA_FACTORY + "upcast_layernorm: true\n"), "RTX 4090")
    assert more.fits and {note.effect for note in more.notes} == {MORE} and "센 것은 들어간다" in str(more)
    less = start_from(written(FULL + "use_unsloth: true\n"), "2GiB, 8.9")
    assert not less.fits and {note.effect for note in less.notes} == {LESS} and "들어갈 수도" in str(less)
    sure = str(start_from(written(FULL), "RTX 4090"))
    assert "그대로 들어간다" in sure and "세지 않은" not in sure


def test_what_a_file_leaves_empty_is_not_told_of(written):
    assert read(written(FLASH + "debug:\nsomething_new: null\nfsdp:\nfsdp_config:\n"), 4)[1:] == (0, {})
    assert read(written(FLASH + "something_new: 1\n"))[2] == {"something_new": "unknown"}


INT8 = FLASH + "adapter: lora\nload_in_8bit: true\nlora_target_linear: true\n"


def test_weights_in_8_bits_are_read_as_each_tool_says_them(written):
    """And that axolotl and LLaMA-Factory checkpoint reentrantly, where these keep less."""
    fields = read(written(INT8 + "gradient_checkpointing: true\n"))[0]
    setting = Setting(**fields)
    assert (setting.peft, setting.load_in_8bit, setting.use_reentrant, setting.rest_in_fp32) == (
        "lora", True, True, False
    )  # fmt: skip
    kwargs = "gradient_checkpointing_kwargs: {use_reentrant: false}\n"
    assert not Setting(**read(written(INT8 + "gradient_checkpointing: true\n" + kwargs))[0]).use_reentrant
    fields = read(written(LLAMA_FACTORY + "quantization_bit: 8\n"))[0]
    assert fields["load_in_8bit"] and fields["use_reentrant"] and fields["peft"] == "lora"
    assert not read(written(LLAMA_FACTORY + "quantization_bit: 8\nuse_reentrant_gc: false\n"))[0]["use_reentrant"]
    fields = read(written(TRL + "use_peft: true\nload_in_8bit: true\n"))[0]
    assert fields["load_in_8bit"] and not fields.get("use_reentrant") and fields["peft"] == "lora"
    four = read(written(TRL + "use_peft: true\nload_in_8bit: true\nload_in_4bit: true\n"))[0]  # as TRL asks first
    assert not four["load_in_8bit"] and four["peft"] == "qlora"


def test_weights_in_8_bits_are_not_trained_nor_split(written):
    for text in (FLASH + "load_in_8bit: true\n", TRL + "load_in_8bit: true\n"):
        with pytest.raises(WrongValue, match="load_in_8bit"):
            start_from(written(text), "RTX 4090")
    for text, key in (
        (INT8 + "fsdp: [full_shard, auto_wrap]\n", "load_in_8bit"),
        (LLAMA_FACTORY + "quantization_bit: 8\nfsdp: full_shard\n", "quantization_bit"),
    ):
        with pytest.raises(NotSupported, match=key):
            start_from(written(text), "RTX 4090", gpus=2)
    assert start_from(written(INT8), "RTX 4090", gpus=2).stage == 0


def test_4_bits_are_proposed_for_8(written):
    text = INT8.replace("size: 8", "size: 1") + "gradient_checkpointing: true\n"
    changed = {"adapter": "qlora", "load_in_4bit": True, "load_in_8bit": False}
    found = start_from(written(text), "5.8GiB, 8.9", model="Qwen/Qwen3-4B")
    assert not found.fits and found.lines == changed and found.proposal.setting.peft == "qlora"
    text = text.replace("adapter: lora", "adapter: qlora\nload_in_4bit: true").replace("8bit: true", "8bit: false")
    assert start_from(written(text), "5.8GiB, 8.9", model="Qwen/Qwen3-4B").start.reserved == found.proposal.reserved


def test_reentrant_checkpointing_is_proposed_where_it_keeps_less(written):
    text = TRL + "use_peft: true\nload_in_8bit: true\nlora_target_modules: all-linear\ndtype: bfloat16\n"
    text, asked = text.replace("size: 8", "size: 1"), "gradient_checkpointing_kwargs: {use_reentrant: true}\n"
    start, less = (
        start_from(written(text + more), "RTX 4090", model="Qwen/Qwen3-4B", length=4096).start for more in ("", asked)
    )
    assert less.reserved < 0.8 * start.reserved
    room = f"{(less.reserved + start.reserved) / 2 / 2**30:.3f}GiB, 8.9"
    found = start_from(written(text), room, model="Qwen/Qwen3-4B", length=4096)
    assert not found.fits and [*found.lines.values()] == [{"use_reentrant": True}]
    assert found.proposal.reserved == less.reserved


def test_what_is_trained_whole_is_counted(written):
    """In fp32 by LLaMA-Factory, but in pure bf16; the others leave it in the type of the weights."""
    ends = ("embed_tokens", "lm_head")
    lora = FLASH + "adapter: lora\nlora_target_linear: true\n"
    setting = Setting(**read(written(lora + "lora_modules_to_save: [embed_tokens, lm_head]\n"))[0])
    assert setting.modules_to_save == ends and not setting.trained_dtype
    setting = Setting(**read(written(TRL + "use_peft: true\nlora_modules_to_save: [lm_head]\n"))[0])
    assert setting.modules_to_save == ("lm_head",)
    fields, _, notes = read(written(LLAMA_FACTORY + "additional_target: embed_tokens,lm_head\n"))
    assert Setting(**fields).modules_to_save == ends and Setting(**fields).trained_dtype == "fp32" and notes == {}
    pure = LLAMA_FACTORY.replace("bf16: true", "pure_bf16: true") + "additional_target: lm_head\n"
    assert not Setting(**read(written(pure))[0]).trained_dtype
    without, whole = (
        start_from(written(LLAMA_FACTORY + more), "RTX 4090").start.reserved
        for more in ("", "additional_target: embed_tokens,lm_head\n")
    )
    assert whole - without > 12 * 2 * 32000 * 768  # fp32 weights, gradients and two moments of each, less a copy
    with pytest.raises(NoSuchLayer, match="embed_tokens, lm_head"):
        start_from(written(lora + "lora_modules_to_save: [embed_token]\n"), "RTX 4090")
    split = start_from(written(lora + "fsdp: [full_shard]\nlora_modules_to_save: [lm_head]\n"), "RTX 4090", gpus=2)
    assert split.stage == 3 and split.start.setting.modules_to_save == ("lm_head",)


def test_embeddings_that_axolotl_keeps_in_fp32_are_told_of_where_it_does(written):
    def told(more):
        return "base_model" in read(written(AXOLOTL + more), 2)[2]

    assert told("") and told("attn_implementation: sdpa\n") and told("eager_attention: true\n")
    for more in (
        "flash_attention: true\n", "flex_attention: true\n", "attn_implementation: flex_attention\n",
        "fsdp: [full_shard]\n", "fsdp_config: {fsdp_version: 2}\n", "cut_cross_entropy: true\n",
        "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n", "adapter: lora\n",
    ):  # fmt: skip
        assert not told(more), more


def test_what_trl_trains_beside_quantized_weights_is_bf16(written):
    """Adapters and copies, whatever the weights lie in; LLaMA-Factory's are fp32, also beside split 4-bit weights."""
    ends = "lora_modules_to_save: [embed_tokens, lm_head]\n"
    for bits in ("load_in_4bit: true\n", "load_in_8bit: true\n"):
        setting = Setting(**read(written(TRL + "use_peft: true\n" + bits + ends))[0])
        assert setting.trained_dtype == "bf16"
    assert not Setting(**read(written(TRL + "use_peft: true\n" + ends))[0]).trained_dtype
    split = LLAMA_FACTORY + "quantization_bit: 4\nfsdp: full_shard\nadditional_target: embed_tokens,lm_head\n"
    pure = split.replace("bf16: true", "bf16: true\npure_bf16: true")
    in_fp32, in_bf16 = (start_from(written(text), "RTX 4090", gpus=2).start.reserved for text in (split, pure))
    assert in_fp32 - in_bf16 > 5.9 * 2 * 32000 * 768 / 2  # weights and two moments: twice as wide


def test_a_tied_head_that_is_trained_whole_is_refused_by_what_splits_it(written, tmp_path):
    tied = LlamaConfig(**SMALL.to_dict() | {"tie_word_embeddings": True})
    lora = FLASH + "adapter: lora\nlora_target_linear: true\nlora_modules_to_save: [NAME]\n"
    for more, words in (
        ("fsdp: [full_shard]\n", "FSDP2"),
        ("deepspeed: {zero_optimization: {stage: 2}}\n", "deepspeed"),
    ):
        path = written((lora + more).replace("NAME", "lm_head"))
        tied.save_pretrained(tmp_path / "model")
        with pytest.raises(NotSupported, match=words):
            start_from(path, "RTX 4090", gpus=2)
    path = written((lora + "fsdp: [full_shard]\n").replace("NAME", "norm"))
    tied.save_pretrained(tmp_path / "model")
    assert start_from(path, "RTX 4090", gpus=2).start.setting.modules_to_save == ("norm",)


def test_completions_by_an_engine_and_modules_that_are_trained_whole(written):
    text = TRL + "use_peft: true\nuse_vllm: true\nvllm_mode: colocate\nlora_modules_to_save: [lm_head]\n"
    with pytest.raises(NotSupported, match="lora_modules_to_save"):
        read(written(text + "max_prompt_length: 128\nnum_generations: 8\n"), objective="grpo")
