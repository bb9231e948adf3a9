"""Fused GEMM kernels in Triton whose tiles wait for, or write to, peers' memory. They never choose peers."""
