"""TRL's head: the loss from tiles of the logits, with the models whose logits it makes and no others."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    InklingTextConfig,
    Llama4TextConfig,
    LlamaConfig,
    ModernBertDecoderConfig,
    Qwen3Config,
    RecurrentGemmaConfig,
    T5Config,
)

import virtual_gpu
from virtual_gpu.errors import WrongValue
from virtual_gpu.models.adapters import add_adapters
from virtual_gpu.models.build import build_model
from virtual_gpu.models.fused_head import can_fuse_head, fused_head
from virtual_gpu.plan import search
from virtual_gpu.plan.request import make_request
from virtual_gpu.step.flops import training_flops
from virtual_gpu.step.predict import predict_memory

SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 1, "head_dim": 32}
MADE = [
    LlamaConfig(**SIZES),
    Qwen3Config(**GROUPED, tie_word_embeddings=True),
    GPTNeoXConfig(**SIZES),
    GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    Gemma2Config(**GROUPED, final_logit_softcapping=5.0),
    GraniteConfig(**SIZES, logits_scaling=7.0),
]
OTHERS = [
    ModernBertDecoderConfig(**SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2),
    RecurrentGemmaConfig(**SIZES, logits_soft_cap=5.0, lru_width=64, num_key_value_heads=1),
    Llama4TextConfig(**GROUPED, intermediate_size_mlp=64, num_local_experts=2),
    InklingTextConfig(num_hidden_layers=2),  # on the meta device its size is nothing
]


def kind(config):
    return config.model_type


@pytest.mark.parametrize("config", MADE, ids=kind)
def test_the_loss_and_its_gradients_are_the_model_s_own(config):
    torch.manual_seed(0)
    model = build_model(config, torch.float32, device="cpu").train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(300, (2, 17))
    plain = model(input_ids=ids, labels=ids, use_cache=False).loss
    plain.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with fused_head(model, virtual=False):
        fused = model(input_ids=ids, labels=ids, fused_lm_head=True).loss
    fused.backward()
    assert abs(fused - plain) < 1e-5 * plain and plain > 1
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("config", OTHERS, ids=kind)
def test_a_model_that_makes_its_logits_otherwise_is_refused(config):
    model = build_model(config, torch.float32)
    assert not can_fuse_head(model)
    with pytest.raises(WrongValue, match=type(model).__name__), fused_head(model, virtual=True):
        pass
    assert not make_request(config, "T4", length=32, batch=1).can_fuse_head


def test_an_encoder_decoder_is_refused():
    t5 = T5Config(vocab_size=300, d_model=64, d_ff=64, num_layers=2, num_heads=2, d_kv=32)
    with pytest.raises(WrongValue, match="T5ForConditionalGeneration"):
        predict_memory(gpu="T4", model_id=t5, batch_size=1, sequence_length=8, fused_lm_head=True)
    assert not make_request(t5, "T4", length=32, batch=1).can_fuse_head


def test_a_forward_that_was_there_comes_back():
    model = build_model(MADE[0], torch.float32)
    model.forward = ours = lambda **_: None
    with fused_head(model, virtual=True):
        assert model.forward is not ours
    assert model.forward is ours


@pytest.mark.slow
@pytest.mark.parametrize("peft", [None, "lora"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt_neox"])
def test_a_program_that_calls_it_takes_what_is_predicted(kind, peft):
    sizes = {**SIZES, "vocab_size": 50_000, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    config = Qwen3Config(**sizes, num_key_value_heads=2) if kind == "qwen3" else GPTNeoXConfig(**sizes)
    batch, length = 8, 64
    setting = {"precision": "autocast_fp16", "peft": peft} if peft else {"precision": "mixed_fp16"}
    report = predict_memory(
        gpu="L4", model_id=config, batch_size=batch, sequence_length=length, fused_lm_head=True, full=True,
        optimizer="adamw_fused", **setting,
    )  # fmt: skip
    with virtual_gpu.cuda("L4", limited=False):
        from transformers import AutoModelForCausalLM
        from trl.trainer import add_fused_lm_head

        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16 if peft else torch.float32).cuda()
        add_fused_lm_head(model)
        model = (add_adapters(model) if peft else model).train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer, scaler = torch.optim.AdamW(trained, fused=True), torch.amp.GradScaler("cuda")
        for _ in range(2):
            ids = torch.randint(1000, (batch, length)).cuda()
            with torch.autocast("cuda", torch.float16):
                loss = model(input_ids=ids, labels=ids, fused_lm_head=True).loss
            scaler.scale(loss).backward()
            del loss
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    # On a card the hidden states that have a loss are copied, here all of them: a segment at most.
    assert abs(allocated - report.peak_bytes) < 2**16 and abs(reserved - report.reserved_bytes) <= 2 * 2**20


def test_the_logits_are_computed_once_more():
    """Forward, again in backward, and the gradients of hidden states and head: four products instead of three."""
    config = LlamaConfig(**SIZES | {"vocab_size": 5000})
    plain, fused = (training_flops(model_id=config, batch_size=2, sequence_length=17, fused_lm_head=f).total
                    for f in (False, True))  # fmt: skip
    product = 2 * 64 * 5000
    assert fused - plain == product * (4 * 2 * 16 - 3 * 2 * 17)  # the last token of a sample has no label


# -- the planner ------------------------------------------------------------------------------------------------------


def test_what_fails_with_it_alone_leaves_the_rest(monkeypatch):
    measured = search.measure

    def broken(request, recipe, *way):
        if recipe.fused_lm_head:
            raise RuntimeError("no such head")
        return measured(request, recipe, *way)

    asked = {"length": 64, "batch": 4, "methods": ("lora",), "prefer": "margin"}
    plans = search.plan_training(LlamaConfig(**SIZES), "T4", **asked)
    monkeypatch.setattr(search, "measure", broken)
    rest = search.plan_training(LlamaConfig(**SIZES), "T4", **asked)
    assert {plan.recipe for plan in rest} == {plan.recipe for plan in plans if not plan.recipe.fused_lm_head}
    assert sum("no such head" in why for _, why in rest.skipped) == 3  # off, on, and on with checkpoints on the CPU


def test_cheapest_takes_it_where_nothing_fits_without():
    config = LlamaConfig(**SIZES | {"vocab_size": 300_000, "max_position_embeddings": 2048})
    request = make_request(config, "1.2GiB, 7.5", length=1024, batch=2, methods=("lora",))
    plan = search.cheapest(request)
    assert plan.recipe.fused_lm_head
    without = search.measure(request, replace(plan.recipe, fused_lm_head=False), 1, 2)
    assert not without.fits and plan.needed_bytes < without.needed_bytes


def test_heads_that_differ_by_layer_stop_no_search():
    assert make_request("google/gemma-4-31B", "T4", length=64, batch=1).repeats_kv
    assert not make_request("google/gemma-4-31B", "H200", length=64, batch=1).repeats_kv
