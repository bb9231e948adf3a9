"""Token-balanced linear layers beside an attention layout that is not (Zeppelin, arXiv 2509.21841, section 4.3).

Attention leaves every rank with some number of tokens; linear layers want the same number everywhere. Only a surplus
moves, inside its node first. As a transport problem with two costs, inside and between nodes, this is the least: the
tokens that move at all are the sum of the surpluses, and as many of them stay in their node as its surplus and its need
allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_overlap.schedules.varlen.topology import Topology


@dataclass(frozen=True, slots=True)
class Move:
    """Rows `start` to `stop` of what `source` holds become the rows of `to` from `at` on."""

    source: int
    to: int
    start: int
    stop: int
    at: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Remap:
    """Two layouts of the same tokens, and the rows that go from one to the other.

    A rank keeps the first `min(before, after)` of its rows where they are, row for row.

    Attributes:
        before: rows of every rank in the layout that is left.
        after: rows of every rank in the layout that is reached.
        moves: by source, then by rows.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    moves: tuple[Move, ...]

    def sends(self, rank: int) -> tuple[Move, ...]:
        return tuple(move for move in self.moves if move.source == rank)

    def receives(self, rank: int) -> tuple[Move, ...]:
        return tuple(move for move in self.moves if move.to == rank)

    def back(self) -> Remap:
        """The way back, and the way of gradients: every row returns to where it was."""
        moves = [
            replace(move, source=move.to, to=move.source, start=move.at, stop=move.at + move.rows, at=move.start)
            for move in self.moves
        ]
        return Remap(self.after, self.before, tuple(sorted(moves, key=lambda move: (move.source, move.start))))

    def moved(self, topology: Topology) -> tuple[int, int]:
        """Rows that move inside nodes, and between nodes."""
        inside = sum(m.rows for m in self.moves if topology.node_of(m.source) == topology.node_of(m.to))
        return inside, sum(m.rows for m in self.moves) - inside


def remap(tokens: Sequence[int], topology: Topology) -> Remap:
    """From an attention layout to the balanced layout that costs least to reach.

    Args:
        tokens: tokens that each rank holds, as of `Plan.tokens`.
        topology: tells which ranks share a node.

    Returns:
        A remap after which ranks differ by one token at most. Which ranks get one more is chosen for the fewest
        transfers.

    Raises:
        ValueError: there are not as many counts as ranks, or one is negative.
    """
    _check(tokens, topology)
    return remap_to(tokens, _targets(tokens, topology), topology)


def remap_to(tokens: Sequence[int], wanted: Sequence[int], topology: Topology) -> Remap:
    """From one layout to another given one, at least cost.

    Args:
        tokens: tokens that each rank holds.
        wanted: tokens that each rank is to hold; the same sum.
        topology: tells which ranks share a node.

    Raises:
        ValueError: the sums differ, there are not as many counts as ranks, or one is negative.
    """
    _check(tokens, topology)
    _check(wanted, topology)
    if sum(tokens) != sum(wanted):
        raise ValueError(f"wanted: {sum(wanted)} tokens in all: the ranks hold {sum(tokens)}; give the same sum")
    kept = [min(held, want) for held, want in zip(tokens, wanted, strict=True)]
    surplus = [held - keep for held, keep in zip(tokens, kept, strict=True)]
    need = [want - keep for want, keep in zip(wanted, kept, strict=True)]
    size = topology.devices_per_node
    pairs: list[tuple[int, int, int]] = []
    for first in range(0, topology.ranks, size):
        pairs += _match(range(first, first + size), surplus, need)
    pairs += _match(range(topology.ranks), surplus, need)
    sent, filled = list(kept), list(kept)
    moves = []
    for source, to, rows in sorted(pairs):
        moves.append(Move(source, to, sent[source], sent[source] + rows, filled[to]))
        sent[source] += rows
        filled[to] += rows
    return Remap(tuple(tokens), tuple(wanted), tuple(moves))


def _match(ranks: Sequence[int], surplus: list[int], need: list[int]) -> list[tuple[int, int, int]]:
    """(source, to, rows) between these ranks, until none has a surplus or a need; takes them off both lists."""
    pairs = []
    takers = iter([rank for rank in ranks if need[rank]])
    taker = next(takers, None)
    for source in ranks:
        while surplus[source] and taker is not None:
            rows = min(surplus[source], need[taker])
            pairs.append((source, taker, rows))
            surplus[source] -= rows
            need[taker] -= rows
            if not need[taker]:
                taker = next(takers, None)
    return pairs


def _targets(tokens: Sequence[int], topology: Topology) -> list[int]:
    """Even counts. The tokens left over go one to a rank: to nodes that would have to send them away, in these to ranks
    that hold them, before others."""
    share, extra = divmod(sum(tokens), topology.ranks)
    size = topology.devices_per_node
    wanted = [share] * topology.ranks
    excess = [sum(tokens[first : first + size]) - share * size for first in range(0, topology.ranks, size)]
    # First what saves a transfer between nodes, then what saves one inside, then any.
    for saves in ("node", "rank", "none"):
        for rank in sorted(range(topology.ranks), key=lambda rank: (tokens[rank] <= share, rank)):
            node = topology.node_of(rank)
            fits = (
                saves == "none" or (saves == "node" and excess[node] > 0) or (saves == "rank" and tokens[rank] > share)
            )
            if extra and wanted[rank] == share and fits:
                wanted[rank] += 1
                excess[node] -= 1
                extra -= 1
    return wanted


def _check(tokens: Sequence[int], topology: Topology) -> None:
    if len(tokens) != topology.ranks:
        raise ValueError(
            f"tokens: {len(tokens)} counts: the topology has {topology.ranks} ranks; give one count a rank"
        )
    if min(tokens) < 0:
        raise ValueError(f"tokens: {min(tokens)}: a rank cannot hold fewer than 0 tokens")
