"""Which rows a rank holds: in attention where the plan puts them; in linear layers as many as others, if that pays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_overlap.schedules.varlen.plan import Piece, Plan
from megatron_overlap.schedules.varlen.rebalance import Remap, remap, remap_to


def to_linear(plan: Plan, index: int = 0) -> Remap:
    """From the rows of attention in a pass to those of linear layers: even ones, where to move them pays.

    It pays where the linear layers of the rank that holds most are faster by more than the messages of the busiest
    rank take, there and back, as if nothing hid them. Otherwise nothing moves: to be a few tokens more even is not
    worth a message. Every rank decides alike.
    """
    tokens, cost, topology = plan.tokens(index), plan.cost, plan.topology
    even = remap(tokens, topology)
    direct = replace(topology, routing=False)  # moved rows take one card
    saved_fs = (max(tokens) - max(even.after)) * cost.linear_fs
    takes_fs = [0] * topology.ranks
    for move in even.moves:
        inter = topology.node_of(move.source) != topology.node_of(move.to)
        # Queries, keys, values and results: with as many key heads as query heads twice keys and values.
        both_fs = cost.ring_fs(2 * move.rows, 2, direct, inter=inter)
        takes_fs[move.source] += both_fs
        takes_fs[move.to] += both_fs
    return even if saved_fs > max(takes_fs) else remap_to(tokens, tokens, topology)


def linear_layout(plan: Plan, index: int = 0) -> tuple[Remap, tuple[tuple[Piece, ...], ...]]:
    """The layout of linear layers in a pass.

    Returns:
        The remap from attention to linear layers, and for every rank its tokens there, in the order of its rows.
    """
    move = to_linear(plan, index)
    return move, moved_pieces([list(plan.pieces(index, rank)) for rank in range(plan.topology.ranks)], move)


def moved_pieces(pieces: Sequence[Sequence[Piece]], move: Remap) -> tuple[tuple[Piece, ...], ...]:
    """What every rank holds after a remap, given what each held before, both in the order of their rows."""
    held = [
        list(cut(mine, 0, min(before, after)))
        for mine, before, after in zip(pieces, move.before, move.after, strict=True)
    ]
    for step in sorted(move.moves, key=lambda step: (step.to, step.at)):
        held[step.to] += cut(pieces[step.source], step.start, step.stop)
    return tuple(map(tuple, held))


def cut(pieces: Sequence[Piece], start: int, stop: int) -> Iterator[Piece]:
    """Rows `start` to `stop` of pieces that lie one behind the other."""
    at = 0
    for piece in pieces:
        length = piece.stop - piece.start
        first, last = max(start - at, 0), min(stop - at, length)
        if first < last:
            yield Piece(piece.document, piece.start + first, piece.start + last)
        at += length
