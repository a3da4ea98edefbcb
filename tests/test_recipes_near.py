"""The programs behind PEFT's grid, litgpt's tables, Raschka's GPT-2 and xMem's runs: their settings and mechanisms."""

import json

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.recipes import litgpt_finetune, not_run, peft_metamathqa, raschka_speed, xmem
from benchmarks.recipes.loading import loaded
from benchmarks.recipes.recipe import Refused
from virtual_gpu.allocator import round_size
from virtual_gpu.program.context import cuda

SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"num_hidden_layers": 2, "vocab_size": 1024, "tie_word_embeddings": True}
LORA = "lora--llama-3.2-3B-rank"


def peft_row(method=f"{LORA}32", metric="max_memory_reserved over the run", **settings):
    settings = {"method": method, "vintage": "2026-07", "transformers": "5.13.1", **settings}
    return {"model": "meta-llama/Llama-3.2-3B", "gpu": "NVIDIA L40S", "metric": metric, "settings": settings}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(peft_metamathqa, "load_config", lambda _: LlamaConfig(**SMALL))
    peft_metamathqa._run.cache_clear()
    yield
    peft_metamathqa._run.cache_clear()


# -- PEFT -------------------------------------------------------------------------------------------------------------


def test_lengths_of_a_bucket():
    lengths = peft_metamathqa.batch_lengths(longest=696, mean=209.9)
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0], lengths[10], lengths[-1]) == (445, 198, 115)
    assert peft_metamathqa.batch_lengths(longest=209.9, mean=209.9) == [210] * 20  # all of one length


def test_trained_numbers_take_16_bytes_each(small):
    """fp32 weight, gradient and AdamW's two states, of what rank 64 has more than rank 32: query and value."""
    found = {rank: peft_metamathqa._run(f"{LORA}{rank}", "2026-07", "L40S") for rank in (32, 64)}
    more = 2 * 32 * ((256 + 256) + (256 + 128))
    assert found[64]["allocated"] - found[32]["allocated"] == 16 * more
    assert found[32]["allocated"] < found[32]["mean"] <= found[32]["most"]
    row = peft_row(metric="difference of memory_allocated averages, steps 1-250") | {"model": "LoRA q,v r64 minus r32"}
    assert peft_metamathqa.predict(row) == 16 * more


def test_what_lora_fa_froze_gets_gradients_again(small):
    """Leaving `disable_adapter` (July 2026) makes every adapter trainable again."""
    before, after = (peft_metamathqa._run(f"{LORA}32-lorafa", vintage, "L40S") for vintage in ("2026-01", "2026-07"))
    frozen = 2 * 2 * 32 * 256  # A of query and value in two layers
    assert after["allocated"] - before["allocated"] == 4 * frozen


def test_every_adapter_is_one_that_peft_knows_or_is_refused():
    kinds = {method[0].get("peft_type") for method in peft_metamathqa.METHODS.values()}
    refused = set()
    for kind in kinds - {None, *peft_metamathqa.BY_VALUES}:
        given = next(method[0] for method in peft_metamathqa.METHODS.values() if method[0].get("peft_type") == kind)
        try:
            peft_metamathqa.peft_config(given)
        except Refused as why:
            refused.add((kind, str(why)))
    assert all("does not have" in why for _, why in refused)
    assert {"LORA", "ADALORA", "IA3", "OFT", "VERA"} <= kinds - {kind for kind, _ in refused}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (peft_row("lora--none"), "not among the source's experiments"),
        (peft_row("shira--llama-3.2-3B-lr_0.0003-random_seed_42"), "values"),
        (peft_row(vintage="2019-01"), "no release of peft"),
        (peft_row(compile=True), "compile=True: the program here takes False"),
    ],
)
def test_what_peft_s_recipe_refuses(row, why):
    [recipe] = peft_metamathqa.RECIPES
    with pytest.raises(Refused, match=why):
        recipe.predict(recipe.of(row))


def test_libraries_of_the_time():
    assert peft_metamathqa.packages(peft_row()) == ("transformers==5.13.1", "peft==0.20.0")
    assert peft_metamathqa.packages(peft_row(vintage="2019-01")) == ()


# -- loading ----------------------------------------------------------------------------------------------------------


def test_loading_warms_the_allocator_up():
    """Every weight is small; the one large segment is that of the block that transformers takes and frees."""
    with cuda("L40S"):
        model = loaded(LlamaConfig(**SMALL), torch.bfloat16)
        assert max(p.numel() * 2 for p in model.parameters()) <= 2**20
        stats = torch.cuda.memory_stats()
        assert stats["allocated_bytes.large_pool.current"] == 0
        assert stats["reserved_bytes.large_pool.current"] == 20 * 2**20


def test_a_tied_head_takes_no_room_when_loaded(tmp_path):
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]})
    )
    with cuda("L40S"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cuda", dtype=torch.bfloat16)
        held = sum(round_size(t.numel() * t.element_size()) for t in {*model.parameters(), *model.buffers()})
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == held


# -- litgpt -----------------------------------------------------------------------------------------------------------


def test_programs_of_litgpt_s_two_tables():
    hub = {"note": "config_hub/finetune/falcon-7b/qlora.yaml", "model": "falcon-7b", "settings": {"micro_batch": 1}}
    program = litgpt_finetune.program_of(hub)
    assert (program.checkpoint, program.method, program.batch, program.length) == ("falcon-7b", "lora", 1, 512)
    assert (program.quantize, program.longest_first, dict(program.lora)["lora_r"]) == ("bnb.nf4", False, 32)
    settings = {"method": "Finetuning with Adapter v2 on 1 GPU", "quantize": "None", "micro_batch": 1}
    table = {"model": "Llama 2 7 B", "settings": settings | {"longest_seq": 1304}}
    found = litgpt_finetune.program_of(table)
    assert found == litgpt_finetune.Program("Llama-2-7b-hf", "adapter_v2", 1, 1304, "", True)
    for row in (table | {"model": "GPT-9"}, {"note": "", "model": "falcon-7b", "settings": {}}):
        with pytest.raises(Refused):
            litgpt_finetune.program_of(row)


@pytest.mark.parametrize("double", [False, True])
def test_bitsandbytes_042_keeps_the_input_until_the_graph_is_gone(double):
    with cuda("A10G"):
        linear = torch.nn.Linear(256, 512, bias=False, device="meta", dtype=torch.bfloat16)
        layer = litgpt_finetune.Linear4bit(linear, double).to_empty(device="cuda")
        x = torch.ones(4, 256, dtype=torch.bfloat16).cuda().requires_grad_()
        # an intermediate that nothing but the product holds
        loss = layer(x * 1).sum()
        loss.backward()
        with_graph = torch.cuda.memory_allocated()
        loss = None
        assert with_graph - torch.cuda.memory_allocated() == 4 * 256 * 2 + 512  # it, and the loss itself


# -- Raschka, xMem, the rest ------------------------------------------------------------------------------------------


def test_fused_attention_reserves_less_than_the_mask(monkeypatch):
    monkeypatch.setattr(raschka_speed, "LAYERS", 1)
    monkeypatch.setattr(raschka_speed, "NEW_TOKENS", 1)
    row = {"gpu": "NVIDIA A100", "metric": "memory_reserved end of epoch", "model": "GPT-2"}
    given = {"batch": 2, "seq": 256, "dropout": 0.1}
    raschka_speed._run.cache_clear()
    names = ("00_orig", "7 FlashAttention")
    found = [raschka_speed.predict(row | {"settings": {**given, "variant": name}}) for name in names]
    raschka_speed._run.cache_clear()
    assert found == sorted(found, reverse=True) and found[-1] < found[0]
    assert all(nbytes % 2**21 == 0 for nbytes in found)
    with pytest.raises(Refused, match="batch"):
        raschka_speed.predict(row | {"settings": {**given, "variant": "10 bigger batch"}})


def test_nvml_s_count_is_a_range():
    settings = {"batch": 1, "optimizer": "SGD", "dtype": "float32 random init"}
    row = {"gpu": "NVIDIA RTX 3060 12 GB", "model": "facebook/opt-125m", "metric": "NVML", "settings": settings}
    found = xmem.predict(row)
    assert found.low == found.nbytes < found.high
    with pytest.raises(Refused, match="no configuration"):
        xmem.predict(row | {"model": "nobody/nothing"})


def test_sources_without_a_program_say_why():
    for source in not_run.WHY:
        with pytest.raises(Refused):
            not_run.predict({"source": source})
