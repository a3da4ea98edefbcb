"""Chapter 8: LoRA and QLoRA."""
