"""The second meter: the RAM of the machine that the GPU is in."""
