"""The plain programs that define the overlapped linear operations, in torch collectives and autograd."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_overlap.schedules import SequenceLayout

Collective = Callable[[torch.Tensor], torch.Tensor]


class LinearMap(torch.autograd.Function):
    """`run(x)` for a linear `run` on all ranks; backward is `adjoint(grad)`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, run: Collective, adjoint: Collective) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.adjoint = adjoint
        return run(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[no-untyped-def]
        return ctx.adjoint(grad), None, None


def gather(own: torch.Tensor, group: dist.ProcessGroup, layout: SequenceLayout) -> torch.Tensor:
    """`all_gather(own)` in sequence order; backward is `reduce_scatter(grad)` of the own rows."""
    return LinearMap.apply(own, lambda x: gather_rows(x, group, layout), lambda grad: scatter_sum(grad, group, layout))


def sum_over_ranks(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`all_reduce(partial)`."""
    total = partial.clone()
    dist.all_reduce(total, group=group)
    return total


def gather_rows(own: torch.Tensor, group: dist.ProcessGroup, layout: SequenceLayout) -> torch.Tensor:
    """`all_gather(own)`: the rows of all ranks in sequence order."""
    whole = own.new_zeros(layout.num_rows, *own.shape[1:])
    rank = dist.get_rank(group)
    for place, run in zip(layout.runs[rank], layout.local_runs(rank), strict=True):
        whole[slice(*place)] = own[slice(*run)]
    dist.all_reduce(whole, group=group)
    return whole


def scatter_sum(full: torch.Tensor, group: dist.ProcessGroup, layout: SequenceLayout) -> torch.Tensor:
    """`reduce_scatter(full)`: the own rows of the sum over ranks."""
    return own_rows(sum_over_ranks(full, group), layout, dist.get_rank(group))


def own_rows(whole: torch.Tensor, layout: SequenceLayout, rank: int) -> torch.Tensor:
    """The rows that `rank` holds."""
    return torch.cat([whole[slice(*run)] for run in layout.runs[rank]])


def all_gather_linear(
    x_shard: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    num_rows: int | None = None,
) -> torch.Tensor:
    """`all_gather(x_shard) @ w.T + bias`."""
    size = dist.get_world_size(group)
    rows = size * x_shard.shape[0] if num_rows is None else num_rows
    y = gather(x_shard, group, SequenceLayout.contiguous(rows, size)) @ w.t()
    return y if bias is None else y + bias


def linear_reduce_scatter(
    x: torch.Tensor, w_shard: torch.Tensor, bias: torch.Tensor | None = None, *, group: dist.ProcessGroup
) -> torch.Tensor:
    """`reduce_scatter(x @ w_shard.T) + bias`."""
    layout = SequenceLayout.contiguous(x.shape[0], dist.get_world_size(group))
    y = LinearMap.apply(
        x @ w_shard.t(), lambda full: scatter_sum(full, group, layout), lambda grad: gather_rows(grad, group, layout)
    )
    return y if bias is None else y + bias


def linear_all_reduce(
    x: torch.Tensor, w_shard: torch.Tensor, bias: torch.Tensor | None = None, *, group: dist.ProcessGroup
) -> torch.Tensor:
    """`all_reduce(x @ w_shard.T) + bias`; `y` and its gradient are the same on all ranks."""
    # The gradient is the same on all ranks, so the adjoint of the sum is the identity.
    y = LinearMap.apply(x @ w_shard.t(), lambda partial: sum_over_ranks(partial, group), lambda grad: grad)
    return y if bias is None else y + bias


def copy_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, *, group: dist.ProcessGroup
) -> torch.Tensor:
    """`x @ w.T + bias`, where `x` is the same on all ranks: its gradient is the sum over them."""
    copied = LinearMap.apply(x, lambda same: same.view_as(same), lambda grad: sum_over_ranks(grad, group))
    y = copied @ w.t()
    return y if bias is None else y + bias
