"""GRPO's step: completions that the model has generated, judged, and learned from, as TRL's GRPOTrainer does it.

Shao et al., "DeepSeekMath", 2024, arXiv 2402.03300. TRL 1.16, trainer/grpo_trainer.py: its own `_compute_loss` and
`_get_per_token_logps_and_entropies` are run, on a trainer that has the arguments' defaults and no data. What they ask
of values (metrics) is answered as in an optimizer's step. Of a mixture of experts they add the routers' loss.

Before the micro-batches of a step what was generated is put in a buffer, all of it at once: ids and masks of prompts
and completions, advantages, and where the loss asks for them the log probabilities that the model gave before
(`iterations` > 1) and those of the reference (`beta` > 0), a micro-batch at a time and without checkpointing. Of
completions from vLLM the model's own log probabilities are always asked for, beside the engine's
(`vllm_importance_sampling_correction`, on by default); what TRL makes of the two on the way to a number a completion,
a few times these two, is not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, dataclass, fields
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from ..models.depth import text_config
from ..models.fused_head import fused_head

# What GRPOTrainer asks of its head.
OF_THE_HEAD = ("log_probs", "entropy")
GENERATIONS = 8  # GRPOConfig's num_generations


@dataclass(frozen=True)
class Completions:
    """The completions of one generation on one GPU, `rows` of them: tokens of a `prompt` and of a `completion`.

    at_once: those of a micro-batch. beta: the weight of the KL term, without which there is no reference. iterations:
    GRPOConfig's num_iterations, optimizer steps on the same completions. vllm: an engine has made them.
    """

    rows: int
    at_once: int
    prompt: int
    completion: int
    beta: float = 0.0
    iterations: int = 1
    vllm: bool = False

    @property
    def steps(self) -> int:
        """Micro-batches that a generation is cut into (GRPOConfig's steps_per_generation)."""
        return self.rows // self.at_once


class Learner:
    """GRPOTrainer's loss of a model on a virtual GPU. forward: (model, inputs by name) → outputs, as is trained."""

    def __init__(
        self,
        gpu: Any,
        model: nn.Module,
        reference: nn.Module | None,
        completions: Completions,
        forward: Callable[..., Any],
        autocast: torch.dtype | None,
    ):
        from trl import GRPOTrainer

        self.gpu, self.model, self.reference, self.completions = gpu, model, reference, completions
        self.forward = forward
        self.trainer = GRPOTrainer.__new__(GRPOTrainer)
        vars(self.trainer).update(_state(gpu, model, completions, autocast))

    def buffer(self, scored: bool = True) -> list[dict[str, torch.Tensor]]:
        """The micro-batches that a generation leaves on the GPU, on which it then is trained.

        scored: without it the log probabilities are there, and no model has made them.
        """
        from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

        of = self.completions
        shapes = {"prompt_ids": of.prompt, "prompt_mask": of.prompt}
        shapes |= {"completion_ids": of.completion, "completion_mask": of.completion}
        made = {name: torch.ones(of.rows, length, dtype=torch.int64) for name, length in shapes.items()}
        # What was scored lies there in one piece until the micro-batches are cut from what was shuffled.
        ids = torch.cat([made["prompt_ids"], made["completion_ids"]], dim=1)
        mask = torch.cat([made["prompt_mask"], made["completion_mask"]], dim=1)
        made |= {"advantages": torch.zeros(of.rows), "num_items_in_batch": made["completion_mask"].sum()}
        if of.vllm:
            made["sampling_per_token_logps"] = torch.zeros(of.rows, of.completion)
            made["importance_sampling_ratio"] = torch.ones(of.rows, 1)
        if of.iterations > 1 or of.vllm:
            made["old_per_token_logps"] = self._scores(self.model, ids, mask) if scored else self._zeros()
        if of.beta:
            made["ref_per_token_logps"] = self._of_reference(ids, mask) if scored else self._zeros()
        return split_tensor_dict(shuffle_sequence_dict(made), of.steps)

    def loss(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a micro-batch."""
        with self._answering():
            return self.trainer._compute_loss(self._called(self.model), inputs)

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self.completions.rows, self.completions.completion)

    def _of_reference(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.reference is not None:
            return self._scores(self.reference, ids, mask)
        with self.model.disable_adapter():
            return self._scores(self.model, ids, mask)

    def _scores(self, model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        of, score = self.completions, self.trainer._get_per_token_logps_and_entropies
        with torch.no_grad(), without_checkpointing(model):
            return score(self._called(model), ids, mask, of.completion, batch_size=of.at_once)[0]

    def _called(self, model: nn.Module) -> Callable[..., Any]:
        return lambda **inputs: self.forward(model, **inputs)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Metrics are numbers that nobody reads here."""
        asked, self.gpu.in_step = self.gpu.in_step, True
        try:
            with mock.patch.multiple("trl.trainer.grpo_trainer", nanmin=torch.min, nanmax=torch.max):
                yield
        finally:
            self.gpu.in_step = asked


@contextmanager
def learning(gpu: Any, learner: Learner) -> Iterator[None]:
    """Inside, both models have TRL's head, which scores the completions' tokens alone."""
    of = learner.completions
    with ExitStack() as stack:
        stack.enter_context(fused_head(learner.model, True, OF_THE_HEAD, some=True))
        if learner.reference is not None:
            stack.enter_context(fused_head(learner.reference, True, some=True))
        gpu.answers.chosen = {of.at_once * (of.prompt + of.completion - 1): of.at_once * of.completion}
        try:
            yield
        finally:
            gpu.answers.chosen = {}


@contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """What is only scored or generated keeps nothing to compute again, so TRL switches checkpointing off for it."""
    switched = [part for part in model.modules() if getattr(part, "gradient_checkpointing", False)]
    for part in switched:
        part.gradient_checkpointing = False
    try:
        yield
    finally:
        for part in switched:
            part.gradient_checkpointing = True


def _state(gpu: Any, model: nn.Module, of: Completions, autocast: torch.dtype | None) -> dict[str, Any]:
    """What the two methods read of a GRPOTrainer, as `__init__` makes it of a GRPOConfig's defaults."""
    from trl import GRPOConfig

    args = SimpleNamespace(**{one.name: one.default for one in fields(GRPOConfig) if one.default is not MISSING})
    args.steps_per_generation = of.steps
    config = text_config(model.config)
    routed = hasattr(config, "output_router_logits")
    coefficient = getattr(config, "router_aux_loss_coef", 0.0) if routed else 0.0
    same = lambda tensor, **_: tensor  # noqa: E731
    accelerator = SimpleNamespace(
        autocast=lambda: gpu.autocast(autocast), gather=same, gather_for_metrics=same, reduce=same,
        num_processes=1, is_main_process=True, sync_gradients=True,
    )  # fmt: skip
    return {
        "args": args, "accelerator": accelerator, "model": SimpleNamespace(training=True),
        "state": SimpleNamespace(global_step=0), "beta": of.beta, "num_iterations": of.iterations,
        "max_completion_length": of.completion, "current_gradient_accumulation_steps": of.steps,
        "epsilon_low": args.epsilon, "epsilon_high": args.epsilon_high or args.epsilon,
        "importance_sampling_level": args.importance_sampling_level, "loss_type": args.loss_type,
        "off_policy_mask_threshold": args.off_policy_mask_threshold, "top_entropy_quantile": args.top_entropy_quantile,
        "use_vllm": of.vllm, "vllm_importance_sampling_correction": args.vllm_importance_sampling_correction,
        "_entropy_bonus_enabled": False, "aux_loss_enabled": bool(coefficient),
        "router_aux_loss_coef": coefficient, "_metrics": {"train": defaultdict(list)},
    }  # fmt: skip
