"""Chapter 5: Gradient checkpointing."""
