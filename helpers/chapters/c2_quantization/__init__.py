"""Chapter 2: Quantization."""
