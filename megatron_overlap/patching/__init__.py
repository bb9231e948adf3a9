"""Replaces attributes of Megatron and torch: plans all patches, applies all or none, reverts exactly.

Imports neither torch nor megatron: a target is a name, and its source text is judged.
"""
