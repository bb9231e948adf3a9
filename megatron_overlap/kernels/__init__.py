"""Triton kernels of the fused operations: tiles wait for flags, or store into the memory of peers."""
