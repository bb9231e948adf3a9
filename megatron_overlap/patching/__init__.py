"""Replaces attributes of other packages: reads, plans everything, applies all or nothing, reverts exactly.

Imports neither torch nor megatron: targets are found by name, and judged by their source text.
"""
