"""Ordinary LoRA: `virtual-gpu run --gpu T4 examples/train.py --fp16 True --per_device_train_batch_size 16`."""

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("EleutherAI/polyglot-ko-1.3b", dtype="float16")
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.05))
texts = [{"input_ids": [1] * 512, "labels": [1] * 512}] * 64
(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
Trainer(model, arguments, train_dataset=texts).train()
