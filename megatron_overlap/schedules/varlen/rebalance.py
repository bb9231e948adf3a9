"""Rebalancing between the attention layout and the linear layout (Zeppelin, arXiv 2509.21841, section 4.3).

The attention layout gives ranks different numbers of tokens. In the linear layout, that of the linear layers, all ranks
have the same number up to one, if moving the rows pays off. Only surplus rows move, inside their node first. This is
the optimum of a transport problem with two costs, inside and between nodes: the number of rows that move is the sum of
the surpluses, and as many of them stay inside their node as its surplus and its need allow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from megatron_overlap.schedules.varlen.plan import Piece, Plan
from megatron_overlap.schedules.varlen.topology import Topology


@dataclass(frozen=True, slots=True)
class Move:
    """Rows `start` to `stop` of `source` become the rows of `to` that begin at row `at`."""

    source: int
    to: int
    start: int
    stop: int
    at: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Rebalance:
    """Two layouts of the same tokens, and the rows that move from one to the other.

    A rank keeps its first `min(before, after)` rows in place.

    Attributes:
        before: rows of every rank in the source layout.
        after: rows of every rank in the destination layout.
        moves: ordered by source, then by rows.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    moves: tuple[Move, ...]

    def inverse(self) -> Self:
        """The moves that return every row; also those of the gradients."""
        moves = [
            replace(move, source=move.to, to=move.source, start=move.at, stop=move.at + move.rows, at=move.start)
            for move in self.moves
        ]
        moves.sort(key=lambda move: (move.source, move.start))
        return replace(self, before=self.after, after=self.before, moves=tuple(moves))


def rebalance(tokens: Sequence[int], topology: Topology) -> Rebalance:
    """The cheapest rebalancing from the `tokens` of each rank to numbers that differ by at most one.

    The ranks with one token more are chosen such that the fewest rows move.
    """
    target = _even_targets(tokens, topology)
    in_place = [min(held, goal) for held, goal in zip(tokens, target, strict=True)]
    surplus = [held - keep for held, keep in zip(tokens, in_place, strict=True)]
    need = [goal - keep for goal, keep in zip(target, in_place, strict=True)]
    size = topology.devices_per_node
    pairs: list[tuple[int, int, int]] = []
    for first in range(0, topology.ranks, size):
        pairs += _match(range(first, first + size), surplus, need)
    pairs += _match(range(topology.ranks), surplus, need)
    sent, filled = list(in_place), list(in_place)
    moves = []
    for source, to, rows in sorted(pairs):
        moves.append(Move(source, to, sent[source], sent[source] + rows, filled[to]))
        sent[source] += rows
        filled[to] += rows
    return Rebalance(tuple(tokens), tuple(target), tuple(moves))


def rebalance_to_linear(plan: Plan, index: int = 0) -> Rebalance:
    """The rebalancing from the attention layout of pass `index` to the linear layout, the same on every rank.

    It moves rows only if the time saved in the linear layers of the fullest rank exceeds the message time of the
    busiest rank, in both directions and without overlap. Otherwise it has no moves.
    """
    tokens, cost, topology = plan.tokens(index), plan.cost, plan.topology
    even = rebalance(tokens, topology)
    direct = replace(topology, routing=False)  # moves use one NIC each
    saved_fs = (max(tokens) - max(even.after)) * cost.linear_fs
    message_fs = [0] * topology.ranks
    for move in even.moves:
        # Queries, keys, values and results: with as many key heads as query heads, twice the bytes of keys and values.
        both_fs = cost.ring_fs(2 * move.rows, 2, direct, inter=topology.is_inter(move.source, move.to))
        message_fs[move.source] += both_fs
        message_fs[move.to] += both_fs
    return even if saved_fs > max(message_fs) else Rebalance(even.before, even.before, ())


def linear_layout(plan: Plan, index: int = 0) -> tuple[tuple[Piece, ...], ...]:
    """The tokens of every rank in the linear layout of a pass, in row order."""
    pieces = [list(plan.pieces(index, rank)) for rank in range(plan.topology.ranks)]
    return rebalanced_pieces(pieces, rebalance_to_linear(plan, index))


def rebalanced_pieces(pieces: Sequence[Sequence[Piece]], moves: Rebalance) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of every rank after a rebalancing, given those before it, both in row order."""
    held = [
        list(slice_pieces(own, 0, min(before, after)))
        for own, before, after in zip(pieces, moves.before, moves.after, strict=True)
    ]
    for move in sorted(moves.moves, key=lambda move: (move.to, move.at)):
        held[move.to] += slice_pieces(pieces[move.source], move.start, move.stop)
    return tuple(map(tuple, held))


def slice_pieces(pieces: Sequence[Piece], start: int, stop: int) -> Iterator[Piece]:
    """Rows `start` to `stop` of consecutive pieces."""
    at = 0
    for piece in pieces:
        length = piece.stop - piece.start
        first, last = max(start - at, 0), min(stop - at, length)
        if first < last:
            yield Piece(piece.document, piece.start + first, piece.start + last)
        at += length


def _match(ranks: Sequence[int], surplus: list[int], need: list[int]) -> list[tuple[int, int, int]]:
    """Moves (source, to, rows) between these ranks until no surplus or no need is left; subtracts them from both."""
    pairs = []
    takers = [rank for rank in reversed(ranks) if need[rank]]
    for source in ranks:
        while surplus[source] and takers:
            rows = min(surplus[source], need[takers[-1]])
            pairs.append((source, takers[-1], rows))
            surplus[source] -= rows
            need[takers[-1]] -= rows
            if not need[takers[-1]]:
                takers.pop()
    return pairs


def _even_targets(tokens: Sequence[int], topology: Topology) -> list[int]:
    """Even counts. Nodes with a surplus get the remainder first, then ranks with a surplus, one token each."""
    share, extra = divmod(sum(tokens), topology.ranks)
    size = topology.devices_per_node
    target = [share] * topology.ranks
    excess = [sum(tokens[first : first + size]) - share * size for first in range(0, topology.ranks, size)]
    # "node" saves a move between nodes, "rank" saves a move inside a node.
    for saves in ("node", "rank", "none"):
        for rank in sorted(range(topology.ranks), key=lambda rank: (tokens[rank] <= share, rank)):
            node = topology.node_of(rank)
            fits = {"node": excess[node] > 0, "rank": tokens[rank] > share, "none": True}
            if extra and target[rank] == share and fits[saves]:
                target[rank] += 1
                excess[node] -= 1
                extra -= 1
    return target
