"""TRL's trainers as programs, for the cases: what the notebook's own cells do."""

from __future__ import annotations

from tempfile import TemporaryDirectory

from virtual_gpu.units import choose, positive_int

from .engine import Engine
from .made import MODEL, QUIET, length_of, pairs, prompts, tokenizer
from .phases import Phase, phases_of

BILLION = "meta-llama/Llama-3.2-1B"
REFERENCES = ("copy", "precompute", "adapter")


def train_dpo(batch: int = 4, reference: str = "copy") -> None:
    """Two steps of DPOTrainer with Llama-3.2-1B, 256 tokens of prompt and of answers; reference: one of REFERENCES.

    "adapter" trains a LoRA and switches it off for the reference; the others train all weights.
    """
    from trl import DPOConfig, DPOTrainer

    batch, reference = positive_int(batch, "batch"), choose(reference, REFERENCES, "reference")
    lora = None
    if reference == "adapter":
        from ...models import lora_config

        lora = lora_config()
    with TemporaryDirectory() as folder:
        arguments = DPOConfig(
            folder, per_device_train_batch_size=batch, max_steps=2, fp16=True,
            precompute_ref_log_probs=reference == "precompute", **QUIET,
        )  # fmt: skip
        trainer = DPOTrainer(
            BILLION, args=arguments, train_dataset=pairs(256, 256), processing_class=tokenizer(), peft_config=lora
        )
        trainer.train()


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
