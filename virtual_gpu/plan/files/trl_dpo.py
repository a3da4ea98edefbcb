"""TRL's DPOTrainer: a short script with a DPOConfig, and an accelerate configuration for several GPUs.

TRL 1.16: the log probabilities come from tiles of the logits, dropout is off, and a reference is loaded in the model's
type, unless adapters are there to be switched off or its log probabilities are made first. Where FSDP2 splits it
(`shards.second_model`), it is loaded to make those first too, and by every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .settings import head, of_launch
from .trl_sft import arguments_of, beside_a_reference, of_trainer, with_launch

if TYPE_CHECKING:
    from ..plans import Plan


def files(plan: Plan) -> dict[str, str]:
    """name → text: train.py, and for several GPUs accelerate.yaml."""
    precomputed = {"precompute_ref_log_probs": "True"} if plan.recipe.reference == "precomputed" else {}
    script = _SCRIPT.format(
        head=head(plan, _PAIRS, "prompt with one answer", "pairs of answers"),
        arguments="".join(f"    {name}={value},\n" for name, value in (arguments_of(plan) | precomputed).items()),
        **of_launch(plan.recipe),
        **of_trainer(plan),
        **beside_a_reference(plan),
    )
    return with_launch(plan, script)


_PAIRS = '"--pairs", required=True, help="JSON lines, each with prompt, chosen and rejected"'
_SCRIPT = '''"""{title}

{command} train.py --pairs my_pairs.jsonl

What it takes on the card:
{asked} train.py --pairs my_pairs.jsonl
"""

import argparse
{functools}{modules}
import torch
{of_place}from datasets import load_dataset
{peft}from transformers import AutoModelForCausalLM, AutoTokenizer{bits}
{of_transformers}from trl import DPOConfig, DPOTrainer

{head}
{launched}# Before the model: it sets up the process that this rank is.
arguments = DPOConfig(
    args.output,
{arguments})
{place}dtype = torch.float32 if args.cpu else torch.{dtype}  # of the weights

tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
dataset = load_dataset("json", data_files=args.pairs, split="train")

{model}{again}{adapters}trainer = DPOTrainer(
    model,
    args=arguments,
    train_dataset=dataset,
    processing_class=tokenizer,
{peft_config})
{upcast}trainer.train()
trainer.save_model(args.output)
'''
