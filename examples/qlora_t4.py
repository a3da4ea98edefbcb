"""QLoRA on one T4: `python qlora_t4.py --model Qwen/Qwen3-4B --text my_text.txt`. Without a GPU: in fp32 on the CPU."""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-4B")
parser.add_argument("--text", required=True)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--accumulate", type=int, default=16)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--lr", type=float, default=2e-4)
parser.add_argument("--output", default="adapter")
args = parser.parse_args()

on_gpu = torch.cuda.is_available()
bf16 = on_gpu and torch.cuda.get_device_capability() >= (8, 0)  # a T4 is (7, 5)
dtype = torch.bfloat16 if bf16 else torch.float16 if on_gpu else torch.float32

tokenizer = AutoTokenizer.from_pretrained(args.model)
ids = tokenizer(Path(args.text).read_text(encoding="utf-8"))["input_ids"]
blocks = [ids[i : i + args.length] for i in range(0, len(ids) - args.length + 1, args.length)]
if not blocks:
    raise SystemExit(f"{args.text}: {len(ids)} tokens, fewer than --length {args.length}.")
dataset = Dataset.from_list([{"input_ids": block, "labels": block} for block in blocks])

model = AutoModelForCausalLM.from_pretrained(
    args.model,
    dtype=dtype,
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    ),
    device_map={"": 0 if on_gpu else "cpu"},
)
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # Trainer turns it on
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))

arguments = TrainingArguments(
    args.output,
    per_device_train_batch_size=args.batch,
    gradient_accumulation_steps=args.accumulate,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    fp16=on_gpu and not bf16,
    bf16=bf16,
    learning_rate=args.lr,
    lr_scheduler_type="cosine",
    warmup_steps=args.steps // 10,
    max_steps=args.steps,
    logging_steps=10,
    save_strategy="no",
    report_to="none",
)
Trainer(model, arguments, train_dataset=dataset).train()
model.save_pretrained(args.output)
