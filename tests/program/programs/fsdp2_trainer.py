"""transformers' Trainer with FSDP2 and adapters: METHOD (lora, qlora), MODULES (to save), STORAGE of 4-bit weights."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

model, out, method, modules, storage = sys.argv[1:]
arguments = TrainingArguments(
    out, per_device_train_batch_size=1, bf16=True, max_steps=2, save_strategy="no", report_to="none",
    gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, fsdp="full_shard auto_wrap",
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "reshard_after_forward": True},
)  # fmt: skip
four_bits = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=getattr(torch, storage),
)  # fmt: skip
more = {"quantization_config": four_bits} if method == "qlora" else {}
model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, **more)
lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.05, task_type="CAUSAL_LM",
                  modules_to_save=[name for name in modules.split(",") if name] or None)  # fmt: skip
text = {"input_ids": [1] * 128, "labels": [1] * 128}
Trainer(get_peft_model(model, lora), arguments, train_dataset=[text] * 32).train()
