"""Bounds that follow from the arithmetic, not from what happened to pass."""

from __future__ import annotations

import torch


def assert_close_to_exact(
    name: str, got: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, terms: int
) -> None:
    """`got` is as near to `exact` as the unfused `reference` is, plus the error of summing in another order.

    Args:
        exact: the result in float64.
        reference: the unfused result, in the dtype of the data.
        magnitude: the same sum over absolute values, `|A| @ |B|`, in float64.
        terms: number of terms of each sum, K: rounding errors add up like sqrt(K) * eps * |A| @ |B|.
    """
    assert got.shape == exact.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    assert torch.isfinite(got).all(), f"{name}: {(~torch.isfinite(got)).sum()} values are not finite"
    if got.numel() == 0:
        return
    # Partial results travel, and narrow products are added, rounded to the dtype of the data: half an eps of each term.
    # Their sum is rounded once more; of few elements the reference may have rounded every one the lucky way.
    own_rounding = torch.finfo(reference.dtype).eps / 2 * (magnitude + exact.abs())
    order = terms**0.5 * torch.finfo(torch.float32).eps * magnitude
    allowed = (reference.double() - exact).abs().max() + order + own_rounding
    excess = (got.double() - exact).abs() - allowed
    assert (excess <= 0).all(), f"{name}: off by {(got.double() - exact).abs().max():.3e}, {excess.max():.3e} too much"
