"""Cases of the comparisons of p2p operations with their references: ranks, dtype, pattern and transport."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LATE = {"gloo": False, "late": True}


def equal_cases(patterns: Sequence[str]) -> list[object]:
    """`num_ranks`, `dtype`, `pattern` and `late`: every combination on four ranks, and fewer on two ranks and one."""
    return [
        *(_case(4, *each) for each in product(_DTYPES, patterns, _LATE)),
        *(_case(2, "bf16", pattern, "late") for pattern in patterns),
        # One rank has no messages.
        *(_case(1, dtype, patterns[0], "gloo") for dtype in _DTYPES),
    ]


def _case(num_ranks: int, dtype: str, pattern: str, transport: str) -> object:
    name = f"{num_ranks}-{dtype}-{pattern}-{transport}"
    return pytest.param(num_ranks, _DTYPES[dtype], pattern, _LATE[transport], id=name)
