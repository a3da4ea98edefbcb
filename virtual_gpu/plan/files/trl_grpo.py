"""TRL's GRPOTrainer: a short script with a GRPOConfig, and an accelerate configuration for several GPUs.

TRL 1.16: the log probabilities come from tiles of the logits of the completions, which transformers' `generate` or vLLM
makes, those of an optimizer step at once. With `beta` of all weights a reference is loaded in the model's type, while
adapters are switched off for it. Prompts that are longer than the plan's are left out: TRL does not cut them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import NotSupported
from ...language import tr
from ..engine import ASLEEP
from .settings import head, of_launch
from .trl_sft import arguments_of, beside_a_reference, of_trainer, with_launch

if TYPE_CHECKING:
    from ..plans import Plan


def files(plan: Plan) -> dict[str, str]:
    """name → text: train.py, and for several GPUs accelerate.yaml."""
    request, arguments = plan.request, arguments_of(plan)
    del arguments["max_length"]
    own = {"max_completion_length": "COMPLETION", "num_generations": request.generations}
    own |= {"beta": request.beta} if request.beta else {}
    own |= {"num_iterations": request.iterations} if request.iterations > 1 else {}
    own |= _engine(plan)
    script = _SCRIPT.format(
        head=head(plan, _PROMPTS, "prompt with its completion", "completions"),
        completion=request.completion_length,
        arguments="".join(f"    {name}={value},\n" for name, value in (own | arguments).items()),
        **of_launch(plan.recipe),
        **of_trainer(plan),
        **beside_a_reference(plan),
    )
    return with_launch(plan, script)


def _engine(plan: Plan) -> dict[str, object]:
    """The arguments of a GRPOConfig for completions of vLLM's, without which a rehearsal is; none for `generate`."""
    if not plan.recipe.vllm:
        return {}
    if plan.engine is None:
        raise NotSupported(tr(ko=f"{plan.title}: 들어가지 않는다", en=f"{plan.title}: does not fit"))
    own = {"use_vllm": "not args.cpu", "vllm_mode": '"colocate"'}
    own |= {"vllm_gpu_memory_utilization": plan.engine.share(plan.request), "vllm_max_model_length": "LENGTH"}
    return own | ({"vllm_enable_sleep_mode": True} if plan.recipe.vllm == ASLEEP else {})


_PROMPTS = '"--prompts", required=True, help="JSON lines, each with prompt and answer"'
_SCRIPT = '''"""{title}

{command} train.py --prompts my_prompts.jsonl

What it takes on the card:
{asked} train.py --prompts my_prompts.jsonl
"""

import argparse
{functools}{modules}
import torch
{of_place}from datasets import load_dataset
{peft}from transformers import AutoModelForCausalLM, AutoTokenizer{bits}
{of_transformers}from trl import GRPOConfig, GRPOTrainer

COMPLETION = {completion}  # of these tokens the completion has at most so many
{head}

def reward(completions, answer, **columns):
    """Whether the answer is in the completion. Put your own here."""
    return [float(right in text) for text, right in zip(completions, answer)]


{launched}# Before the model: it sets up the process that this rank is.
arguments = GRPOConfig(
    args.output,
{arguments})
{place}dtype = torch.float32 if args.cpu else torch.{dtype}  # of the weights

tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
dataset = load_dataset("json", data_files=args.prompts, split="train")
# A prompt has at most what the completion leaves of LENGTH.
dataset = dataset.filter(lambda row: len(tokenizer(row["prompt"])["input_ids"]) <= LENGTH - COMPLETION)

{model}{again}{adapters}trainer = GRPOTrainer(
    model,
    reward,
    args=arguments,
    train_dataset=dataset,
    processing_class=tokenizer,
{peft_config})
{upcast}trainer.train()
trainer.save_model(args.output)
'''
