"""The only code that imports megatron: each file here adapts one part of it."""
