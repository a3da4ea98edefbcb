"""LoRA of a model whose layers lie on all cards: `two_cards.py [--four]`."""

import argparse

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--four", action="store_true")
args = parser.parse_args()

how = {"dtype": torch.float16, "device_map": "auto"}
if args.four:  # so small, "auto" would put all of it on one card
    last = torch.cuda.device_count() - 1
    layers = {f"model.layers.{n}": last * (n > 11) for n in range(24)}
    how = {
        "quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16),
        "device_map": {"model.embed_tokens": 0, **layers, "model.norm": last, "model.rotary_emb": 0, "lm_head": 0},
    }
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", **how)
places = {parameter.device.index for parameter in model.parameters()}
assert places == {*range(torch.cuda.device_count())}, places
model = prepare_model_for_kbit_training(model) if args.four else model
model = get_peft_model(model, LoraConfig(r=8, task_type="CAUSAL_LM", target_modules="all-linear"))
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "out",
        per_device_train_batch_size=2,
        max_steps=2,
        fp16=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=[{"input_ids": [1] * 128, "labels": [1] * 128}] * 8,
)
assert trainer.args.n_gpu == 1
trainer.train()
