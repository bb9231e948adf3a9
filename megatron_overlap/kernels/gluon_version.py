"""Imports the parts of Triton's Gluon that the Hopper kernels use, under the same names for all supported versions.

Tested by compilation with Triton 3.6.0, 3.7.1, 3.8.0 and 3.9.0. Gluon is experimental: Triton 3.8 renamed the copy of
a tile to `async_load`, and 3.9 has no other name.
"""

import triton

try:
    from triton.experimental.gluon import jit
    from triton.experimental.gluon import language as gl
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
    _MISSING = f"Triton {triton.__version__} has no Gluon for Hopper ({error}); use 3.6 to 3.9"

__all__ = [
    "TensorDescriptor",
    "fence_async_shared",
    "gl",
    "jit",
    "load_tile",
    "mbarrier",
    "unsupported_reason",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]


def unsupported_reason() -> str:
    """Return in one line why Gluon is not available, or an empty string."""
    return _MISSING
