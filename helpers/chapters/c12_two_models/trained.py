"""The cases' programs: what the notebook's own cells do."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import torch

from virtual_gpu.models.configs import load_config
from virtual_gpu.step.setting import Setting, check_size
from virtual_gpu.units import choose, positive_int

from .engine import Engine
from .made import MODEL, QUIET, length_of, prompts, tokenizer
from .phases import Phase, phases_of

FOUR_BILLION = "Qwen/Qwen3-4B"
WAYS = ("sft", "dpo")


def train_whole(way: str = "dpo", batch: int = 1, length: int = 2048) -> None:
    """A forward and a backward pass of Qwen3-4B with LoRA of rank 8 and checkpointing, which makes all logits.

    way: "sft" (batch: sequences) or "dpo" (batch: pairs, as LLaMA-Factory, src/llamafactory/train/dpo/trainer.py: the
    policy's logits in fp32 are kept for a metric while the reference's are made, and let go before the backward pass).
    length: tokens of a sequence.
    """
    from ...models import adapted_on_card

    way, batch, length = choose(way, WAYS, "way"), positive_int(batch, "batch"), positive_int(length, "length")
    check_size(batch, length)
    Setting(1, model_id=FOUR_BILLION, sequence_length=length).check_length(load_config(FOUR_BILLION))
    model = adapted_on_card(FOUR_BILLION, 8)

    def scores(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(ids, use_cache=False).logits.float()
        return logits, logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])

    if way == "sft":
        ids = torch.ones(batch, length, dtype=torch.int64).cuda()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return
    ids = torch.ones(2 * batch, length, dtype=torch.int64).cuda()
    kept, policy = scores(ids)
    with torch.no_grad(), model.disable_adapter():
        reference = scores(ids)[1]
    del kept
    (policy - reference).sum().backward()


def train_grpo(found: list[Phase], fraction: float = 0.3, sleeps: bool = False, batch: int = 8) -> None:
    """Two steps of GRPOTrainer with Qwen3-0.6B and an engine on the same card; batch: completions of a training step.

    Eight completions of 512 tokens of a prompt of 256; the phases go to `found`.
    """
    from trl import GRPOConfig, GRPOTrainer

    batch = positive_int(batch, "batch")
    with TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            folder, per_device_train_batch_size=batch, gradient_accumulation_steps=max(1, 8 // batch),
            num_generations=8, max_completion_length=512, max_steps=2, fp16=True, **QUIET,
        )  # fmt: skip
        trainer = GRPOTrainer(
            MODEL, length_of, args=arguments, train_dataset=prompts(256), processing_class=tokenizer(),
            rollout_func=Engine(fraction, 512, sleeps),
        )  # fmt: skip
        with phases_of(trainer, found):
            trainer.train()
