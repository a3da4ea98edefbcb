"""Chapter 7: LoRA and QLoRA."""
