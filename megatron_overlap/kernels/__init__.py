"""Triton kernels of the fused operations: GEMM tiles wait for flags or store into peer memory."""
