"""The plain programs that define the overlapped attention and expert operations, in torch collectives and autograd."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from megatron_overlap.ops import MLPExperts
from megatron_overlap.ops.reference import LinearMap, gather, linear_reduce_scatter, own_rows
from megatron_overlap.schedules import SequenceLayout
from megatron_overlap.schedules.expert_parallel import Counts
from megatron_overlap.schedules.varlen import Plan as BatchPlan
from megatron_overlap.schedules.varlen.rebalance import Rebalance


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, softmax_scale: float | None = None
) -> torch.Tensor:
    """`softmax(softmax_scale * q @ k.T + mask) @ v` per head, `[S, B, heads, D]`, with all scores in memory."""
    grouped = [tensor.repeat_interleave(q.shape[2] // k.shape[2], dim=2).permute(1, 2, 0, 3) for tensor in (k, v)]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = q.permute(1, 2, 0, 3) @ grouped[0].transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool().to(q.device), float("-inf"))
    return (scores.softmax(-1) @ grouped[1]).permute(2, 0, 1, 3)


def attention_linear_reduce_scatter(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    w_shard: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    causal: bool = True,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """`reduce_scatter(attention(q, k, v) @ w_shard.T)`."""
    context = attention(q, k, v, causal=causal, softmax_scale=softmax_scale).flatten(2)
    return linear_reduce_scatter(context, w_shard, group=group)


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    causal: bool = True,
    softmax_scale: float | None = None,
    layout: SequenceLayout | None = None,
) -> torch.Tensor:
    """`own_rows(attention(all_rows(q), all_rows(k), all_rows(v)))`."""
    size = dist.get_world_size(group)
    layout = layout or SequenceLayout.contiguous(q.shape[0] * size, size)
    whole = (gather(tensor, group, layout) for tensor in (q, k, v))
    y = attention(*whole, causal=causal, softmax_scale=softmax_scale)
    return own_rows(y, layout, dist.get_rank(group))


def all_to_all(x: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """`all_to_all_single(x)` of rows; backward is the opposite one."""

    def exchange(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        y = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(y, rows.contiguous(), received, sent, group=group)
        return y

    y: torch.Tensor = LinearMap.apply(
        x, lambda rows: exchange(rows, sent, received), lambda grad: exchange(grad, received, sent)
    )
    return y


def expert_parallel(
    x: torch.Tensor,
    probs: torch.Tensor,
    sent: Counts,
    received: Counts,
    experts: MLPExperts,
    *,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """`all_to_all(experts(sort(all_to_all(x)), sort(all_to_all(probs))))`, each expert with the rows of all ranks."""
    splits = [sum(counts) for counts in sent], [sum(counts) for counts in received]
    sizes = [count for counts in received for count in counts]
    pieces = [all_to_all(tensor, *splits, group).split(sizes) for tensor in (x, probs)]
    num = len(experts.fc1)
    results: list[torch.Tensor] = [x] * len(sizes)
    for expert in range(num):
        rows, weights = (torch.cat(each[expert::num]) for each in pieces)
        activated = experts.activation(rows @ experts.fc1[expert].weight.t(), weights)
        results[expert::num] = (activated @ experts.fc2[expert].weight.t()).split(sizes[expert::num])
    return all_to_all(torch.cat(results), *splits[::-1], group)


def document_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float) -> torch.Tensor:
    """Causal attention of one document, `[L, heads, D]`."""
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    place = torch.arange(q.shape[0], device=q.device)
    later = place > place[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v)


def places_of(plan: BatchPlan, index: int) -> tuple[SequenceLayout, dict[int, torch.Tensor]]:
    """The layout of the rows of pass `index` in order of rank, and the row numbers of the tokens of each document."""
    counts = plan.tokens(index)
    parts: dict[int, list[tuple[int, torch.Tensor]]] = {}
    row = 0
    for rank in range(len(counts)):
        for document, start, stop in plan.pieces(index, rank):
            parts.setdefault(document, []).append((start, torch.arange(row, row + stop - start)))
            row += stop - start
    places = {document: torch.cat([rows for _, rows in sorted(found)]) for document, found in parts.items()}
    return layout_of_lengths(counts), places


def layout_of_lengths(lengths: Sequence[int]) -> SequenceLayout:
    """One run per rank, in rank order, of the given lengths."""
    return SequenceLayout(tuple((run,) for run in pairwise(accumulate(lengths, initial=0))))


def balanced_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: BatchPlan,
    *,
    index: int = 0,
    group: dist.ProcessGroup,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """`own_rows(y)`: `y` is the causal attention of each document of pass `index` in `all_gather(q)`, k and v alike."""
    layout, places = places_of(plan, index)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    whole = [gather(tensor, group, layout) for tensor in (q, k, v)]
    y = torch.zeros_like(whole[0])
    for rows in places.values():
        document = document_attention(*(tensor[rows] for tensor in whole), softmax_scale=scale)
        y = y.index_copy(0, rows, document)
    return own_rows(y, layout, dist.get_rank(group))


def move_rows(x: torch.Tensor, moves: Rebalance, *, group: dist.ProcessGroup) -> torch.Tensor:
    """`all_gather(x)[rows]`, where `moves` defines the rows of this rank."""
    rank = dist.get_rank(group)
    layout, after = layout_of_lengths(moves.before), moves.after[rank]
    starts = [start for ((start, _),) in layout.runs]
    picked = torch.zeros(after, dtype=torch.int64)
    num_own = min(moves.before[rank], after)
    picked[:num_own] = torch.arange(starts[rank], starts[rank] + num_own)
    for move in (move for move in moves.moves if move.to == rank):
        first = starts[move.source]
        picked[move.at : move.at + move.rows] = torch.arange(first + move.start, first + move.stop)
    return gather(x, group, layout)[picked.to(x.device)]
