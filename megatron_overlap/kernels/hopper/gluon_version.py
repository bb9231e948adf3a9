"""Triton's Gluon, where the installed Triton has what the Hopper kernels need; in one spelling.

Compiled with Triton 3.6.0, 3.7.1, 3.8.0 and 3.9.0. Gluon is called experimental and changes: 3.8 calls the copy of a
tile `async_load`, and 3.9 has that name only.
"""

from __future__ import annotations

import triton

try:
    from triton.experimental.gluon import jit
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
    _MISSING = ""
except (ImportError, AttributeError) as error:
    _MISSING = f"Triton {triton.__version__} has no Gluon for Hopper ({error}); 3.6 to 3.9 have"

__all__ = [
    "GluonASTSource",
    "TensorDescriptor",
    "available",
    "fence_async_shared",
    "gl",
    "jit",
    "load_tile",
    "mbarrier",
    "objection",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]


def objection() -> str:
    """Why Gluon cannot be had, in one line; empty where it can."""
    return _MISSING


def available() -> bool:
    """Whether the modules that are written in Gluon can be imported."""
    return not _MISSING
