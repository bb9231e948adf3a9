"""The GEMMs of experts in pieces of rows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_overlap.ops import MLPExperts
from megatron_overlap.ops.call import Projection
from megatron_overlap.schedules.expert_parallel import Segment


class GemmRows(TorchDispatchMode):
    """Records the rows of each GEMM, and fills new memory with NaN, which no GEMM may read."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            assert args[0].isfinite().all()
            self.rows.append(args[0].shape[0])
        result = func(*args, **(kwargs or {}))
        return result.fill_(float("nan")) if func is torch.ops.aten.new_empty.default else result


def computed_rows(rows: int, whole: int, dtype: torch.dtype) -> list[int]:
    """Rows of both GEMMs of a forward of `rows` of the `whole` rows of an expert."""
    fc1, fc2 = Projection(torch.rand(6, 8).to(dtype)), Projection(torch.rand(8, 6).to(dtype))
    experts = MLPExperts((fc1,), (fc2,), lambda hidden, probs: hidden * probs[:, None])
    x, probs, y = (
        torch.rand(rows, 8).to(dtype),
        torch.rand(rows).to(dtype),
        torch.full((rows, 8), float("nan")).to(dtype),
    )
    with GemmRows() as gemms:
        experts.forward((Segment(0, 0, rows),), [whole], x, probs, y, keep_output=False)
    reference = (x.double() @ fc1.weight.double().t() * probs[:, None]) @ fc2.weight.double().t()
    torch.testing.assert_close(y.double(), reference, rtol=0.02, atol=1e-3)
    return gemms.rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_any_rows_need_few_sizes_of_a_gemm_whose_kernels_are_compiled_for_each(dtype: torch.dtype) -> None:
    sizes = set()
    draw = random.Random(1)
    for rows in (1, 31, 32, 33, 2048, 2049, *(draw.randrange(1, 8192) for _ in range(100))):
        computed = computed_rows(rows, 8192, dtype)
        assert len(computed) == 2
        for size in computed:
            assert rows <= size < rows + max(32, rows / 32 + 1)
            sizes.add(size)
    assert len(sizes) <= 80


def test_other_gemms_compute_the_rows_alone() -> None:
    assert computed_rows(33, 64, torch.float32) == [33, 33]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_few_rows_take_the_kernel_of_the_whole_expert(dtype: torch.dtype) -> None:
    assert computed_rows(1, 3, dtype) == [3, 3]
    assert computed_rows(2, 2, dtype) == [2, 2]
    assert min(computed_rows(1, 64, dtype)) >= 4
