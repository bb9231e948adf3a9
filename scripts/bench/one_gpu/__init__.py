"""Parts of fused_one_gpu.py, each run in a process of its own."""
