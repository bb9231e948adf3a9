"""Imports the parts of Triton's Gluon that the Hopper kernels use, under the same names for all supported versions.

Tested by compilation with Triton 3.6.0, 3.7.1, 3.8.0 and 3.9.0. Gluon is experimental: Triton 3.8 renamed the copy of
a tile to `async_load`, and 3.9 has no other name. `UNSUPPORTED_REASON` is one line if Gluon is missing, else empty.
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
    UNSUPPORTED_REASON = ""
except (ImportError, AttributeError) as error:
    UNSUPPORTED_REASON = f"Triton {triton.__version__} has no Gluon for Hopper ({error}); use 3.6 to 3.9"

__all__ = [
    "UNSUPPORTED_REASON",
    "TensorDescriptor",
    "fence_async_shared",
    "gl",
    "jit",
    "load_tile",
    "mbarrier",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
