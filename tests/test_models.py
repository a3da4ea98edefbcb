"""Architectures with the published parameter counts, LoRA and QLoRA, names, no network, and the way out offline."""

import importlib.util
import json
import logging
import socket
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from helpers.models import byte_tokenizer, load_model_and_tokenizer
from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.errors import BadConfiguration, VirtualGPUError
from virtual_gpu.language import set_language
from virtual_gpu.models import adapters, bundled, configs
from virtual_gpu.models.build import build_model, count_parameters
from virtual_gpu.models.bundled import variants
from virtual_gpu.models.configs import architectures, checkpoint_dtype, load_config, resolve_model_id
from virtual_gpu.models.depth import with_depth
from virtual_gpu.step.predict import virtual_run
from virtual_gpu.step.setting import Setting

POLYGLOT = "EleutherAI/polyglot-ko-1.3b"

# Counts that were published to the last parameter; for the rest, what was published and rounded.
EXACT = {
    "EleutherAI/polyglot-ko-1.3b": 1_331_810_304,
    "EleutherAI/polyglot-ko-3.8b": 3_809_974_272,
    "EleutherAI/polyglot-ko-5.8b": 5_885_059_072,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "google/gemma-3-270m": 268_098_176,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen3.5-0.8B": 873_438_784 - 100_592_896 - 20_452_864,
    "Qwen/Qwen3.5-2B": 2_274_069_824 - 331_416_576 - 60_828_160,
    "Qwen/Qwen3.5-4B": 4_659_865_088 - 333_514_240 - 120_599_552,
    "Qwen/Qwen3.5-9B": 9_653_104_368 - 456_010_480 - 243_290_624,
    "Qwen/Qwen3.5-27B": 27_781_427_952 - 460_730_096 - 424_699_392,
    "Qwen/Qwen3.5-35B-A3B": 35_951_822_704 - 446_571_248 - 844_640_768,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "allenai/OLMo-2-0325-32B": 32_234_279_936,
}
ROUNDED = {
    "EleutherAI/polyglot-ko-12.8b": 12.9e9,
    "openai-community/gpt2": 124e6,
    "openai-community/gpt2-medium": 355e6,
    "openai-community/gpt2-large": 774e6,
    "openai-community/gpt2-xl": 1.558e9,
    "meta-llama/Llama-3.2-1B": 1.23e9,
    "meta-llama/Llama-3.2-3B": 3.21e9,
    "Qwen/Qwen2.5-0.5B": 0.49e9,
    "Qwen/Qwen2.5-1.5B": 1.54e9,
    "Qwen/Qwen2.5-7B": 7.61e9,
    "Qwen/Qwen2.5-72B": 72.7e9,
    "Qwen/Qwen3-0.6B": 0.6e9,
    "Qwen/Qwen3-1.7B": 1.72e9,
    "Qwen/Qwen3-4B": 4.0e9,
    "Qwen/Qwen3-8B": 8.2e9,
    "Qwen/Qwen3-14B": 14.8e9,
    "Qwen/Qwen3-32B": 32.8e9,
    "google/gemma-3-1b-pt": 302e6 + 698e6,
    "google/gemma-3-4b-pt": 675e6 + 3_209e6,
    "google/gemma-3-27b-pt": 1_416e6 + 25_600e6,
    "LGAI-EXAONE/EXAONE-4.0-1.2B": 1.28e9,
    "LGAI-EXAONE/EXAONE-4.0-32B": 32.0e9,
    "kakaocorp/kanana-nano-2.1b-base": 2.085e9,
    "K-intelligence/Midm-2.0-Mini-Instruct": 2.305e9,
    "upstage/SOLAR-10.7B-v1.0": 10.7e9,
    "upstage/Solar-Open-100B": 102.6e9,
    "skt/A.X-K1": 519e9,
    "google/gemma-3n-E4B": 6.87e9,
    "google/gemma-4-E2B": 4.63e9,
    "google/gemma-4-E4B": 7.46e9,
    "google/gemma-4-26B-A4B": 25.2e9,
    "google/gemma-4-31B": 30.7e9,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": 107.77e9,
    "deepseek-ai/DeepSeek-V3": 671e9,
}


@pytest.fixture
def gpu():
    return VirtualGPU(CATALOG["T4"])


@pytest.fixture
def no_network(monkeypatch):
    """Whoever asks for the network fails the test's way; who asked is noted."""
    asked = []

    def refuse(*args, **kwargs):
        asked.append(args[:1])
        raise OSError("no network")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    return asked


@pytest.fixture
def small(monkeypatch):
    """A bundled architecture that is small: "small/neox"."""
    config = {
        "model_type": "gpt_neox",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 512,
    }
    known = architectures() | {"small/neox": {"config": config, "dtype": "float16"}}
    monkeypatch.setattr(configs, "architectures", lambda: known)
    return "small/neox"


# -- architectures ----------------------------------------------------------------------------------------------------


def test_every_architecture_is_tested():
    assert set(EXACT) | set(ROUNDED) == set(architectures())


@pytest.mark.parametrize("model_id", architectures())
def test_the_published_number_of_parameters(model_id, no_network):
    model = build_model(load_config(model_id), torch.float16)
    count = count_parameters(model)
    if model_id in EXACT:
        assert count == EXACT[model_id]
        assert f"{count:,}" in architectures()[model_id]["published_parameters"]
    else:
        assert count == pytest.approx(ROUNDED[model_id], rel=0.01)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert not no_network


def test_every_architecture_says_where_it_is_from():
    for model_id, entry in architectures().items():
        assert "huggingface.co/" in entry["source"] or "github.com/" in entry["source"], model_id
        assert isinstance(getattr(torch, entry["dtype"]), torch.dtype), model_id


# The hub's safetensors metadata, of those that are not altogether their bases; of Gemma 3 the report's table 1 has
# 10,759M beside the embedding.
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-chat-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B-Instruct": 70_553_706_496,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-Instruct-v0.2": 7_241_732_096,
}


@pytest.mark.parametrize("model_id", variants())
def test_a_variant_has_its_base_s_architecture(model_id, no_network):
    """Known without the hub and its gate; but for what is said to be other, the same configuration."""
    said = json.loads((Path(bundled.__file__).parent / "variants.json").read_text(encoding="utf-8"))["models"][model_id]
    one, base = load_config(model_id).to_dict(), load_config(said["of"]).to_dict()
    other = {key for key in one if one[key] != base.get(key)} - {"_name_or_path", "name_or_path"}
    assert other <= {*said.get("changes", {}), "rope_parameters", "rope_theta", "layer_types"}
    assert ("rope_parameters" in other) <= bool({"rope_scaling", "rope_theta"} & {*said.get("changes", {})})
    if model_id in PUBLISHED:
        assert count_parameters(build_model(load_config(model_id), torch.float16)) == PUBLISHED[model_id]
    short = resolve_model_id(model_id.split("/")[-1].lower())
    named = {"_name_or_path": short, "name_or_path": short}
    copied = one | {key: named[key] for key in one.keys() & named} == load_config(short).to_dict()
    assert short == model_id or (model_id.startswith("NousResearch/") and copied)
    assert model_id not in architectures()
    its, base_s = (checkpoint_dtype(name, None) for name in (model_id, said["of"]))
    assert its == (getattr(torch, said["dtype"]) if "dtype" in said else base_s)
    assert not no_network


def test_building_leaves_the_config_as_it_was():
    config = load_config("gpt2")
    before = config.to_dict()
    build_model(config, torch.float16, "eager")
    assert config.to_dict() == before


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("gpt2", "openai-community/gpt2"),
        ("GPT2-XL", "openai-community/gpt2-xl"),
        ("polyglot-ko-1.3b", POLYGLOT),
        ("eleutherai/POLYGLOT-ko-1.3B", POLYGLOT),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("someone/else", "someone/else"),
    ],
)
def test_short_names(short, full):
    assert resolve_model_id(short) == full


def test_the_dtype_of_the_checkpoint():
    assert checkpoint_dtype("polyglot-ko-1.3b", None) == torch.float16
    assert checkpoint_dtype("Qwen3-0.6B", None) == torch.bfloat16
    assert checkpoint_dtype("someone/else", SimpleNamespace(dtype="bfloat16")) == torch.bfloat16
    assert checkpoint_dtype("someone/else", SimpleNamespace(dtype=None)) == torch.float32


# -- on a virtual GPU -------------------------------------------------------------------------------------------------


def test_the_books_model_weighs_what_it_must(gpu, no_network, capsys):
    model, tokenizer = load_model_and_tokenizer(POLYGLOT, gpu=gpu)
    assert count_parameters(model) == 1_331_810_304
    parameters = [block for block in gpu.meter.live_blocks().values() if block.category == "parameters"]
    assert sum(block.nbytes for block in parameters) == 2_663_620_608
    assert capsys.readouterr().out == f"{POLYGLOT}: 구조만 만들었다. 가중치는 내려받지 않는다 (가상 T4).\n"
    assert tokenizer.eos_token == "<|endoftext|>"
    assert not no_network
    del model
    assert gpu.memory_allocated() == 0


@pytest.mark.filterwarnings("ignore")
def test_lora_on_the_books_model(gpu, no_network, capsys):
    model, _ = load_model_and_tokenizer("polyglot-ko-1.3b", peft="LoRA", gpu=gpu, quiet=True)
    assert capsys.readouterr().out == ""
    assert count_parameters(model) == 1_333_383_168
    assert count_parameters(model, trainable_only=True) == 1_572_864  # 24 layers × 8 × (2048 + 3 × 2048)
    trained = {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"query_key_value"}
    assert model.peft_config["default"].lora_alpha == 32
    assert model.peft_config["default"].lora_dropout == 0.05
    assert not no_network


@pytest.mark.filterwarnings("ignore")
def test_qlora_on_the_books_model(gpu, no_network):
    model, _ = load_model_and_tokenizer("polyglot-ko-1.3b", peft="qlora", gpu=gpu, quiet=True)
    # 4-bit weights count as the numbers they stand for.
    assert count_parameters(model) == 1_333_383_168
    assert count_parameters(model, trainable_only=True) == 1_572_864
    packed = sum(p.numel() for p in model.parameters() if p.dtype == torch.uint8)
    assert packed == 24 * (4 * 2048**2 + 2 * 2048 * 8192) // 2
    # What is not 4-bit was cast to fp32: embeddings, head, norms, biases.
    assert {p.dtype for p in model.parameters()} == {torch.uint8, torch.float32}
    assert not no_network


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("peft", ["lora", "qlora"])
@pytest.mark.parametrize("model_id", ["gpt2", "Llama-3.2-1B", "Qwen2.5-0.5B", "Qwen3-0.6B", "gemma-3-270m"])
def test_adapters_on_every_family(model_id, peft, gpu):
    model, _ = load_model_and_tokenizer(model_id, peft=peft, gpu=gpu, quiet=True)
    adapters = [name for name, p in model.named_parameters() if p.requires_grad]
    assert adapters and all("lora_" in name for name in adapters)
    assert all(gpu.owns(tensor) for tensor in (*model.parameters(), *model.buffers()))
    assert any(p.dtype == torch.uint8 for p in model.parameters()) is (peft == "qlora")


def test_a_family_that_peft_does_not_know():
    layer = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("q_proj", "k_proj", "v_proj", "mlp")})
    model = nn.Sequential(layer)
    model.prepare_inputs_for_generation = None  # which peft takes from every causal language model
    model = adapters.add_adapters(model)
    assert {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad} == {"q_proj", "v_proj"}
    with pytest.raises(ValueError, match=r"LoRA를 붙일 층을 찾지 못했다: q_proj, v_proj\. 이 모델의 선형층: head, mix"):
        adapters.add_adapters(nn.ModuleDict({"mix": nn.Linear(4, 4), "head": nn.Linear(4, 4)}))


def test_english(gpu, small, capsys):
    set_language("en")
    try:
        load_model_and_tokenizer(small, gpu=gpu)
    finally:
        set_language("ko")
    assert capsys.readouterr().out == ("small/neox: the architecture alone; no weights are downloaded (virtual T4).\n")


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_id", "near"),
    [
        ("polyglot-ko-1.4b", "EleutherAI/polyglot-ko-1.3b"),
        ("EleutherAI/polyglot-ko-13b", "EleutherAI/polyglot-ko-1.3b"),
        ("gtp2", "openai-community/gpt2"),
        ("someone/Meta-Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B"),
        ("mistralai/Mistral-7B-Instruct-v0.4", "mistralai/Mistral-7B-Instruct-v0.3"),
        ("LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct", "LGAI-EXAONE/EXAONE-4.0-1.2B"),
        ("nobody/nothing-like-it", None),
        ("", None),
        (None, None),
        (3, None),
    ],
)
def test_an_unknown_model(model_id, near, gpu, no_network, capfd):
    with pytest.raises(ValueError, match="모르는 모델 이름이다") as caught:
        load_model_and_tokenizer(model_id, gpu=gpu)
    message = str(caught.value)
    assert "허브에서도 찾지 못했다" in message
    assert near is None or f"혹시 {near}" in message or f", {near}" in message.split("허브 없이 아는 모델")[0]
    assert "python -m virtual_gpu.models" in message and "Qwen/Qwen3-8B" not in message  # not all of their names
    assert capfd.readouterr() == ("", "")  # one message, and no library's retries
    assert gpu.memory_allocated() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"peft": "lorra"}, "'lorra': 모르는 peft 이름이다. 혹시 lora"),
        ({"attention": "flash"}, "'flash': 모르는 어텐션 이름이다"),
    ],
)
def test_unknown_names(arguments, message, gpu, small):
    with pytest.raises(ValueError, match=message):
        load_model_and_tokenizer(small, gpu=gpu, **arguments)


@pytest.mark.parametrize(("peft", "missing"), [("lora", "peft"), ("qlora", "peft"), ("qlora", "bitsandbytes")])
def test_a_missing_library(peft, missing, gpu, small, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(ImportError, match=rf"{missing}이\(가\) 없다. 'pip install {missing}'로 설치"):
        load_model_and_tokenizer(small, peft=peft, gpu=gpu)
    assert gpu.memory_allocated() == 0


def test_that_own_code_is_slower_is_not_said_of_what_is_not_computed():
    """And stays to be said: transformers says it once."""
    said, log = [], logging.getLogger("transformers.integrations.hub_kernels")
    level, handler = log.level, logging.Handler()
    handler.emit = said.append
    log.addHandler(handler)
    log.setLevel(logging.WARNING)  # whatever another test has set for all of transformers
    transformers.utils.logging.warning_once.cache_clear()
    config = with_depth(load_config("Qwen/Qwen3.5-0.8B"), 4)
    try:
        with configs.running("another"):
            pass
        virtual_run(Setting(1, model_id="Qwen/Qwen3.5-0.8B", sequence_length=64), config, CATALOG["L4"])
        assert not said
        model = build_model(config, torch.float32).to_empty(device="cpu")
        model(input_ids=torch.ones(1, 2, dtype=torch.int64))
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
    assert said and "falling back" in said[0].getMessage()


def test_kernels_that_are_not_run_are_named(monkeypatch):
    """Where a library's kernels would run in place of transformers' own code, that is why a model fails."""
    with pytest.raises(BadConfiguration) as without, configs.running("qwen"):
        raise RuntimeError("0 active drivers")
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    with pytest.raises(BadConfiguration, match=r"0 active drivers \(fla.*virtual-gpu run"), configs.running("qwen"):
        raise RuntimeError("0 active drivers")
    assert "virtual-gpu run" not in str(without.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "읽을 수 없다"),
        ("{", "읽을 수 없다"),
        ("42", "객체"),
        ("null", "객체"),
        ("{}", "model_type"),
        ('{"model_type": "llama", "hidden_size": "64"}', "실행할 수 없다"),
        ('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 0}', "config|num_attention_heads"),
        ('{"model_type": "llama", "num_hidden_layers": 0}', "num_hidden_layers=0"),
        ('{"model_type": "llama", "num_hidden_layers": -3}', "num_hidden_layers=-3"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000}', "num_hidden_layers=1000000"),
        ('{"model_type": "llama", "num_labels": 1000000000}', "num_labels=1000000000"),
        ('{"model_type": "gemma3", "text_config": {"num_labels": 1e9}}', "num_labels=1000000000"),
        ('{"model_type": "llama", "intermediate_size": 0}', "intermediate_size=0"),
        ('{"model_type": "llama", "vocab_size": 999999999999}', "vocab_size"),
        ('{"model_type": "llama", "dtype": "float7"}', "float7"),
        ('{"model_type": "vit"}', "토큰"),
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}}', "실행할 수 없다"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}', "fp8"),
    ],
)
def test_a_folder_with_a_bad_configuration_is_one_clear_error(text, words, tmp_path, no_network):
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "evil.py").write_text("raise SystemExit('code of the folder ran')")
    with pytest.raises(VirtualGPUError, match=words) as caught:
        checkpoint_dtype(str(tmp_path), load_config(tmp_path))
    assert "모르는 모델 이름" not in str(caught.value)
    assert not no_network


def test_a_configuration_that_cannot_be_built_is_one_clear_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_embd": 65, "n_head": 4}')
    with pytest.raises(BadConfiguration):
        build_model(load_config(tmp_path), torch.float16)


# -- a real GPU (a stand-in on the CPU) -------------------------------------------------------------------------------


@pytest.fixture
def cpu():
    return SimpleNamespace(
        is_virtual=False, name="CPU", device=torch.device("cpu"), place=lambda thing: thing.to("cpu")
    )


@pytest.fixture
def hub_is_silent(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("the hub does not answer")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("peft", [None, "lora", "qlora"])
def test_without_the_hub_the_weights_are_random(peft, cpu, small, hub_is_silent, capsys):
    model, tokenizer = load_model_and_tokenizer(small, peft=peft, gpu=cpu)
    assert capsys.readouterr().out == (
        "small/neox: 허브에 닿지 않아(the hub does not answer) 같은 구조에 무작위 가중치를 썼다.\n"
    )
    floats = [p for p in model.parameters() if p.is_floating_point()]
    assert floats and all(torch.isfinite(p).all() for p in floats)
    assert all(t.device == cpu.device for t in (*model.parameters(), *model.buffers()))
    embedding = model.get_input_embeddings().weight
    assert 0.01 < embedding.float().std() < 0.03  # as the architecture initialises it
    outputs = model(**tokenizer("안녕", return_tensors="pt", return_token_type_ids=False))
    assert torch.isfinite(outputs.logits).all()
    # Buffers that no checkpoint has are those of a model that was built with values.
    rotary = next(buffer for name, buffer in model.named_buffers() if name.endswith("rotary_emb.inv_freq"))
    whole = transformers.AutoModelForCausalLM.from_config(load_config(small))
    assert torch.equal(rotary, whole.gpt_neox.rotary_emb.inv_freq)


def test_an_unknown_model_without_the_hub(cpu, hub_is_silent):
    with pytest.raises(ValueError, match=r"혹시 EleutherAI/polyglot-ko-1\.3b"):
        load_model_and_tokenizer("EleutherAI/polyglot-ko-1.2b", gpu=cpu)


def test_only_the_cache_is_asked_where_the_hub_is_out_of_reach(monkeypatch, no_network):
    from huggingface_hub import constants

    monkeypatch.setattr(configs, "getproxies", dict)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert configs.hub_argument() == {"local_files_only": True}
    assert len(no_network) == 1
    monkeypatch.setattr(configs, "getproxies", lambda: {"https": "http://proxy"})
    assert configs.hub_argument() == {}  # through a proxy the library finds out itself
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert configs.hub_argument() == {"local_files_only": True}
    assert len(no_network) == 1


def test_a_folder_is_not_asked_of_the_hub_and_a_name_only_once(monkeypatch, no_network, tmp_path):
    from huggingface_hub import constants
    from transformers import AutoConfig

    monkeypatch.setattr(configs, "getproxies", dict)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    load_config("gpt2").save_pretrained(tmp_path)
    load_config(str(tmp_path))
    assert no_network == []
    folder, asked = AutoConfig.from_pretrained, []
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda name, **_: asked.append(name) or folder(tmp_path))
    first, second = load_config("nobody/nothing"), load_config("nobody/nothing")
    assert asked == ["nobody/nothing"] and len(no_network) == 1
    assert first is not second  # whoever changes one leaves the other alone
    configs._config_from_hub.cache_clear()


# -- the tokenizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "안녕하세요, 작은 GPU로 큰 모델을!",
        "Hello, world",
        " two  spaces\n\ttab",
        "🙂 ½ ∑",
        "힣가\u200b",
        "a" * 1000,
        "",
    ],
)
def test_the_tokenizer_gives_the_text_back(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())  # a token a byte
    assert all(2 <= i < 258 for i in ids)
    assert tokenizer.decode(ids) == text


def test_the_tokenizer_pads():
    batch = byte_tokenizer()(["가", "나다"], padding=True, return_tensors="pt")
    assert batch["input_ids"].shape == (2, 6)
    assert batch["attention_mask"].sum(dim=1).tolist() == [3, 6]
    assert batch["input_ids"][0, -1] == byte_tokenizer().pad_token_id == 0
