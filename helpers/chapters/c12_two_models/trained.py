"""The cases' programs: what the notebook's own cells do."""

from __future__ import annotations

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch

from virtual_gpu.models.configs import load_config
from virtual_gpu.step.setting import Setting, check_size
from virtual_gpu.units import choose, positive_int

from .made import MODEL, QUIET, length_of, prompts, tokenizer
from .phases import Phase, phases_of

FOUR_BILLION, ONE_BILLION = "Qwen/Qwen3-4B", "meta-llama/Llama-3.2-1B"
WAYS = ("sft", "dpo")


def scores(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All logits in fp32, and each token's log probability."""
    logits = model(ids, use_cache=False).logits.float()
    return logits, logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])


def whole_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """DPO's, as LLaMA-Factory, src/llamafactory/train/dpo/trainer.py, orders it, without what has one number a token.

    The policy's logits are kept for a metric while the reference's are made, and let go before the backward pass.
    """
    kept, policy = scores(model, ids)
    with torch.no_grad(), model.disable_adapter():
        reference = scores(model, ids)[1]
    del kept
    return (policy - reference).sum()


def reference_first(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The same loss; of the reference only its log probabilities are left when the policy's logits are made."""
    with torch.no_grad(), model.disable_adapter():
        reference = scores(model, ids)[1]
    return (scores(model, ids)[1] - reference).sum()


def train_whole(way: str = "dpo", batch: int = 1, length: int = 2048) -> None:
    """A forward and a backward pass of Qwen3-4B with LoRA of rank 8 and checkpointing, which makes all logits.

    way: "sft" (batch: sequences) or "dpo" (batch: pairs, `whole_loss`). length: tokens of a sequence.
    """
    from ...models import adapted_on_card

    way, batch, length = choose(way, WAYS, "way"), positive_int(batch, "batch"), positive_int(length, "length")
    check_size(batch, length)
    Setting(1, model_id=FOUR_BILLION, sequence_length=length).check_length(load_config(FOUR_BILLION))
    model = adapted_on_card(FOUR_BILLION, 8)
    if way == "sft":
        ids = torch.ones(batch, length, dtype=torch.int64).cuda()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return
    ids = torch.ones(2 * batch, length, dtype=torch.int64).cuda()
    whole_loss(model, ids).backward()


def train_pairs(loss: Callable[[Any, torch.Tensor], torch.Tensor], batch: int = 4, length: int = 512) -> None:
    """A forward and a backward pass of a loss of pairs: Llama-3.2-1B in fp16 with LoRA and checkpointing."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from ...models import lora_config

    model = AutoModelForCausalLM.from_pretrained(ONE_BILLION, dtype="float16", device_map="cuda")
    model.gradient_checkpointing_enable()
    model = get_peft_model(model, lora_config()).train()
    loss(model, torch.ones(2 * batch, length, dtype=torch.int64).cuda()).backward()


def tiny_pairs() -> tuple[Any, torch.Tensor]:
    """A model of a few numbers on the CPU, its adapter not zero, and four sentences: what a loss is compared on."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
        adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        return get_peft_model(model, adapter).train(), torch.randint(64, (4, 12))


def train_grpo(found: list[Phase], fraction: float = 0.3, sleeps: bool = False, batch: int = 8) -> None:
    """Two steps of GRPOTrainer with Qwen3-0.6B and an engine on the same card; batch: completions of a training step.

    Eight completions of 512 tokens of a prompt of 256; the phases go to `found`.
    """
    from trl import GRPOConfig, GRPOTrainer

    batch = positive_int(batch, "batch")
    with TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            folder, per_device_train_batch_size=batch, gradient_accumulation_steps=max(1, 8 // batch),
            num_generations=8, max_completion_length=512, max_steps=2, fp16=True, use_vllm=True,
            vllm_gpu_memory_utilization=fraction, vllm_enable_sleep_mode=sleeps, vllm_max_model_length=768, **QUIET,
        )  # fmt: skip
        trainer = GRPOTrainer(
            MODEL, length_of, args=arguments, train_dataset=prompts(256), processing_class=tokenizer()
        )
        with phases_of(trainer, found):
            trainer.train()
