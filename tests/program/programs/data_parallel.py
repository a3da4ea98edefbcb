"""The Trainer with a model on one card, of which it sees all: `nn.DataParallel`."""

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained("openai-community/gpt2"),
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
trainer.train()
