"""Chapter 4: Gradient accumulation."""
