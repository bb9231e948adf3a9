"""Own rows of both parts of a sequence, from own rows of the whole sequence, and back.

Under sequence parallelism rank r of R owns rows `[r S / R, (r + 1) S / R)`. Of each half of the sequence it owns the
same share: block r of the R blocks of that half.
"""

from typing import Any

import torch
import torch.distributed as dist


def split_rows(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Own rows of the first and of the second half. Equals `all_gather(x).chunk(2)`, each cut into R blocks.

    Args:
        x: `[S/R, ...]` own rows, an even number.
        group: the R ranks.

    Returns:
        `[S/2R, ...]` of each half. Backward is `join_rows` of the gradients.

    Raises:
        ValueError: the number of rows is odd.
    """
    if x.shape[0] % 2:
        raise ValueError(f"x: {x.shape[0]} rows: must be even to be split into two parts")
    blocks: torch.Tensor = _Exchange.apply(x.view(2, -1, *x.shape[1:]), group, False)
    first, second = blocks.unbind()
    return first, second


def join_rows(first: torch.Tensor, second: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Own rows `[S/R, ...]` of the sequence from own rows of its parts: the inverse of `split_rows`."""
    blocks: torch.Tensor = _Exchange.apply(torch.stack((first, second)), group, True)
    return blocks.flatten(0, 1)


class _Exchange(torch.autograd.Function):
    """Two blocks of rows of every rank: from the layout of the sequence to that of its parts, or `back`."""

    @staticmethod
    def forward(ctx: Any, blocks: torch.Tensor, group: dist.ProcessGroup, back: bool) -> torch.Tensor:
        ctx.group, ctx.back = group, back
        return _exchanged(blocks, group, back)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchanged(grads[0], ctx.group, not ctx.back), None, None


def _exchanged(blocks: torch.Tensor, group: dist.ProcessGroup, back: bool) -> torch.Tensor:
    size, rank = group.size(), dist.get_rank(group)
    # Ranks of the other layout that own the two blocks of this rank.
    in_sequence = [2 * rank % size, (2 * rank + 1) % size]
    in_parts = [rank // 2, (size + rank) // 2]
    targets, sources = (in_parts, in_sequence) if back else (in_sequence, in_parts)
    # A collective orders blocks by rank.
    sent = blocks if targets[0] <= targets[1] else blocks.flip(0)
    received = torch.empty_like(sent, memory_format=torch.contiguous_format)
    num_received, num_sent = ([sides.count(peer) for peer in range(size)] for sides in (sources, targets))
    dist.all_to_all_single(received, sent.contiguous(), num_received, num_sent, group=group)
    return received if sources[0] <= sources[1] else received.flip(0)
