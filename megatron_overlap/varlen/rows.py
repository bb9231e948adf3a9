"""Which rows a rank holds: in attention, where the plan puts them, and in linear layers, after the remap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_overlap.varlen.plan import Piece, Plan
from megatron_overlap.varlen.remap import Remap, remap


def linear_layout(plan: Plan, index: int = 0) -> tuple[Remap, tuple[tuple[Piece, ...], ...]]:
    """The token-balanced layout of a pass.

    Returns:
        The remap from attention to linear layers, and for every rank its tokens there, in the order of its rows.
    """
    move = remap(plan.tokens(index), plan.topology)
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
