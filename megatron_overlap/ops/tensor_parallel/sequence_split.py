"""Own rows of both parts of a sequence, from own rows of the whole sequence, and back.

Under sequence parallelism rank r of R owns rows `[r S / R, (r + 1) S / R)` of the sequence. The first part has the rows
before `R F`, the second part the rest. Rank r owns block r of the R blocks of each part.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def split_rows(x: torch.Tensor, group: dist.ProcessGroup, num_first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Own rows of both parts. Equals `all_gather(x).split([R F, S - R F])`, each cut into R blocks.

    Args:
        x: `[S/R, ...]` own rows.
        group: the R ranks.
        num_first: F, own rows of the first part, the same on all ranks.

    Returns:
        `[F, ...]` and `[S/R - F, ...]`. Backward is `join_rows` of the gradients.

    Raises:
        ValueError: a part has no rows.
    """
    if not 0 < num_first < x.shape[0]:
        raise ValueError(f"num_first: {num_first} of {x.shape[0]} rows: each part needs a row")
    rows: torch.Tensor = _Exchange.apply(x, group, num_first, False)
    first, second = rows.split([num_first, x.shape[0] - num_first])
    return first, second


def join_rows(first: torch.Tensor, second: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Own rows `[S/R, ...]` of the sequence from own rows of its parts: the inverse of `split_rows`."""
    rows: torch.Tensor = _Exchange.apply(torch.cat((first, second)), group, first.shape[0], True)
    return rows


class _Exchange(torch.autograd.Function):
    """Own rows: of the sequence to those of its parts, one after the other, or `back`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup, num_first: int, back: bool) -> torch.Tensor:
        ctx.group, ctx.num_first, ctx.back = group, num_first, back
        return _exchanged(rows, group, num_first, back)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchanged(grads[0], ctx.group, ctx.num_first, not ctx.back), None, None, None


def _exchanged(rows: torch.Tensor, group: dist.ProcessGroup, num_first: int, back: bool) -> torch.Tensor:
    rank, size, num_rows = dist.get_rank(group), group.size(), rows.shape[0]

    def runs(owner: int, receiver: int) -> Iterator[slice]:
        """Rows that `owner` has of the sequence, and `receiver` of its parts, as slices of the rows of `owner`."""
        begin, length = receiver * num_first, num_first
        for _ in range(2):
            start, stop = (min(max(row - owner * num_rows, 0), num_rows) for row in (begin, begin + length))
            yield slice(start, stop)
            begin, length = size * num_first + receiver * (num_rows - num_first), num_rows - num_first

    def count(owner: int, receiver: int) -> int:
        return sum(run.stop - run.start for run in runs(owner, receiver))

    in_parts = [count(rank, peer) for peer in range(size)]
    in_sequence = [count(peer, rank) for peer in range(size)]
    # The rows of the parts are in the order of their owners in the sequence; the rows of the sequence are not in the
    # order of their owners in the parts.
    of_peers = [run for peer in range(size) for run in runs(rank, peer)]
    sent = rows if back else torch.cat([rows[run] for run in of_peers])
    received = torch.empty_like(sent, memory_format=torch.contiguous_format)
    num_received, num_sent = (in_parts, in_sequence) if back else (in_sequence, in_parts)
    dist.all_to_all_single(received, sent.contiguous(), num_received, num_sent, group=group)
    if not back:
        return received
    result = torch.empty_like(received)
    for run, part in zip(of_peers, received.split([run.stop - run.start for run in of_peers]), strict=True):
        result[run] = part
    return result
