"""Records in Triton's interpreter how a kernel reads and sets flags."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def watched(flags: torch.Tensor, looks: torch.Tensor, raised: Callable[[int], None] | None = None) -> Iterator[None]:
    """While open, count each read of `flags` in `looks`, and report each flag that a kernel sets.

    Args:
        flags: int32, own memory, flags that kernels wait for.
        looks: int32, of the same length, in shared memory.
        raised: called with the address of a flag after the kernel sets it and before the kernel continues.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    original = InterpreterBuilder.create_atomic_rmw
    first, last = flags.data_ptr(), flags.data_ptr() + 4 * flags.numel()

    def create_atomic_rmw(self, op, ptr, val, mask, sem, scope):  # type: ignore[no-untyped-def]
        result = original(self, op, ptr, val, mask, sem, scope)
        address = int(ptr.data.reshape(-1)[0])
        if "ADD" in str(op) and int(val.data.reshape(-1)[0]) == 0 and first <= address < last:
            looks[(address - first) // 4] += 1
        if "XCHG" in str(op) and "RELEASE" in str(sem) and raised is not None:
            raised(address)
        return result

    InterpreterBuilder.create_atomic_rmw = create_atomic_rmw
    try:
        yield
    finally:
        InterpreterBuilder.create_atomic_rmw = original
