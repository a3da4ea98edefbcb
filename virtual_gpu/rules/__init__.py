"""What CUDA does otherwise than a CPU."""
