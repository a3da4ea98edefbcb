"""A GPU that you do not have: programs run on fake tensors whose every request goes through CUDA's allocator."""
