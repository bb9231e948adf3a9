"""Replaces attributes of Megatron and torch: plans all patches, applies all or none, reverts exactly.

Imports neither torch nor megatron: targets are found by name and judged by their source text.
"""
