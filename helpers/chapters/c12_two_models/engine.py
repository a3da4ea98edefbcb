"""A rollout engine on the card of the training, as the memory that it takes: vLLM is not run here.

Sources: vLLM's documentation, `gpu_memory_utilization` (the fraction of the card for the whole engine: weights,
activations and KV cache, taken when it starts) and "Sleep Mode" (level 1: weights to RAM, KV cache discarded; level 2:
both discarded); TRL 1.16, trl/generation/vllm_generation.py: with `vllm_enable_sleep_mode` the engine sleeps at level 2
after each rollout, and `empty_cache()` goes before it wakes.
"""

from __future__ import annotations

from typing import Any

import torch

from virtual_gpu.errors import WrongValue
from virtual_gpu.language import tr
from virtual_gpu.units import boolean, positive_int


def share(value: Any) -> float:
    """A part of a card, more than 0 and at most 1; WrongValue for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise WrongValue(
            tr(
                ko=f"fraction={value!r:.80}: 0보다 크고 1 이하인 수다.",
                en=f"fraction={value!r:.80}: more than 0, at most 1.",
            )
        )
    return float(value)


class Engine:
    """`GRPOTrainer(rollout_func=Engine(…))`: a block of `fraction` of the card, and completions of a given length.

    sleeps: the block is given back to the driver after each rollout; else it stays for good. WrongValue says what
    cannot be.
    """

    def __init__(self, fraction: float, completion: int, sleeps: bool):
        self.fraction = share(fraction)
        self.completion, self.sleeps = positive_int(completion, "completion"), boolean(sleeps, "sleeps")
        self._block: torch.Tensor | None = None

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list]:
        """What TRL asks a rollout function for: token ids of prompts and completions."""
        if self._block is None:
            torch.cuda.empty_cache()
            taken = int(torch.cuda.get_device_properties(0).total_memory * self.fraction)
            self._block = torch.empty(taken, dtype=torch.uint8, device="cuda")
        if self.sleeps:
            self._block = None
            torch.cuda.empty_cache()
        ids = trainer.processing_class(prompts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": [[1] * self.completion] * len(prompts), "logprobs": None}
