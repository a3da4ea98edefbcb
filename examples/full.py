"""All of a 1.3B model: `virtual-gpu run --gpu T4 examples/full.py --fp16 True --per_device_train_batch_size 1`."""

from dataclasses import dataclass

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Options:
    length: int = 512
    lora: bool = False


options, arguments = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_pretrained("EleutherAI/polyglot-ko-1.3b", dtype="float32")
if options.lora:
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))
texts = [{"input_ids": [1] * options.length, "labels": [1] * options.length}] * 64
Trainer(model, arguments, train_dataset=texts).train()
