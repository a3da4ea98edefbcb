"""An ordinary Trainer: `virtual-gpu run --gpu T4 examples/train.py --per_device_train_batch_size 16`."""

from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("EleutherAI/polyglot-ko-1.3b", dtype="float16")
texts = [{"input_ids": [1] * 256, "labels": [1] * 256}] * 64
(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
Trainer(model, arguments, train_dataset=texts).train()
