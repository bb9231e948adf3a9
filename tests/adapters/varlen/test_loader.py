"""Micro-batches of whole documents do not depend on the number of ranks, and every row is on one rank."""

from __future__ import annotations

import random

import pytest

from megatron_overlap.schedules.varlen import Topology, partition
from megatron_overlap.schedules.varlen.plan import Piece
from megatron_overlap.schedules.varlen.rebalance import rebalance, rebalanced_pieces, slice_pieces
from tests.adapters.varlen import loader_workers as workers
from tests.helpers.world import World

HEAVY_TAILED = [int(length) for length in (random.Random(3).paretovariate(0.9) * 4 for _ in range(60)) if length < 100]
SHAPES = {
    "heavy-tailed": (HEAVY_TAILED, 100),
    "one document per micro-batch": ([64], 64),
    "length 1": ([1] * 50, 16),
    "empty documents": ([0, 3, 0, 0, 7, 0, 20, 0], 24),
    "full": ([8, 8, 8, 8], 32),
    "fewer tokens than ranks": ([1, 2], 2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_micro_batches_do_not_depend_on_the_number_of_ranks(world: World, name: str) -> None:
    lengths, tokens = SHAPES[name]
    one_rank = world.run(1, workers.batches, lengths, tokens, 5)[0]
    for rows in (rows for _, rows in one_rank):
        assert 0 < len(rows) <= tokens
        for document, position, token, label, counts in rows:
            source, place = divmod(token, 1000)
            assert (place, label, counts) == (position, -token, source % 2)
            assert lengths[source] > position
            assert document >= 0
    for size in (2, 3, 4):
        shared = world.run(size, workers.batches, lengths, tokens, 5)
        for number, (_, expected) in enumerate(one_rank):
            parts = [ranks[number][1] for ranks in shared]
            assert sorted(row for part in parts for row in part) == sorted(expected)
            counts = [len(part) for part in parts]
            assert max(counts) - min(counts) <= 1, "ranks have equal shares in the linear layout"


def test_a_micro_batch_ends_before_the_document_that_does_not_fit(world: World) -> None:
    found = world.run(1, workers.batches, [7, 7, 7, 7, 7], 20, 3)[0]
    assert [len(rows) for _, rows in found] == [14, 14, 14]
    # Two micro-batches of two documents from an epoch of five.
    assert len({row[2] // 1000 for _, rows in found[:2] for row in rows}) == 4


def test_rings_hold_the_same_rows(world: World) -> None:
    one_rank = world.run(1, workers.batches, HEAVY_TAILED, 100, 2)[0]
    shared = world.run(3, workers.batches, HEAVY_TAILED, 100, 2, "ring")
    for number in range(2):
        assert sorted(row for ranks in shared for row in ranks[number][1]) == sorted(one_rank[number][1])


def test_stride_and_resumption(world: World) -> None:
    whole = [sorted(rows) for _, rows in world.run(1, workers.batches, HEAVY_TAILED, 100, 6)[0]]
    for replica in (0, 1):
        own = world.run(1, workers.batches, HEAVY_TAILED, 100, 2, first=2 + replica, stride=2)[0]
        assert [sorted(rows) for _, rows in own] == [whole[2 + replica], whole[4 + replica]]


def test_the_loader_precomputes_messages(world: World) -> None:
    """Except those of the first two micro-batches, which are prepared before the first call of a layer."""
    for late in world.run(2, workers.messages_computed_late, HEAVY_TAILED, 100, 4):
        assert late == [1, 1, 0, 0]


def test_rows_are_padded_to_a_multiple(world: World) -> None:
    for ranks in world.run(3, workers.batches, [1, 2, 5, 1], 5, 4, row_multiple=4):
        assert all(padded % 4 == 0 and padded >= max(4, len(rows)) for padded, rows in ranks)
        assert all(padded - len(rows) <= 4 for padded, rows in ranks)


def test_a_failed_read_ends_all_ranks(world: World) -> None:
    assert world.run(2, workers.exception_after_a_failed_read) == ["OSError", "TransportError"]


@pytest.mark.parametrize(("lengths", "tokens"), [([], 4), ([0, 0], 4), ([3, 5], 4)])
def test_documents_that_do_not_fit_a_micro_batch(lengths: list[int], tokens: int) -> None:
    with pytest.raises(ValueError, match=f"give documents of 1 to {tokens} rows"):
        workers.DocumentLoader(workers.NumberedDocuments(lengths), None, None, tokens=tokens, seed=1)  # type: ignore[arg-type]


def test_rebalanced_pieces_equal_the_moved_rows() -> None:
    topology = Topology(1, 3)
    plan = partition(HEAVY_TAILED[:20], topology, capacity=sum(HEAVY_TAILED[:20]))
    # The last rank holds one piece and receives rows from both others.
    pieces = [list(plan.pieces(0, 0)), list(plan.pieces(0, 1)), list(plan.pieces(0, 2))[-1:]]
    before = [[(p.document, at) for p in held for at in range(p.start, p.stop)] for held in pieces]
    counts = [len(rows) for rows in before]
    moves = rebalance(counts, topology)
    assert [(move.source, move.to, move.at > 0) for move in moves.moves] == [(0, 2, True), (1, 2, True)]
    after = [rows[: moves.after[rank]] + [None] * (moves.after[rank] - len(rows)) for rank, rows in enumerate(before)]
    for move in moves.moves:
        after[move.to][move.at : move.at + move.rows] = before[move.source][move.start : move.stop]
    found = rebalanced_pieces(pieces, moves)
    assert [[(p.document, at) for p in held for at in range(p.start, p.stop)] for held in found] == after


def test_slice_pieces() -> None:
    pieces = [Piece(4, 10, 13), Piece(5, 0, 2), Piece(6, 7, 9)]
    assert list(slice_pieces(pieces, 2, 6)) == [Piece(4, 12, 13), Piece(5, 0, 2), Piece(6, 7, 8)]
    assert list(slice_pieces(pieces, 3, 3)) == []
