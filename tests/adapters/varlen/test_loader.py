"""Micro-batches of whole documents are the same whoever shares them, and every row is on one rank."""

from __future__ import annotations

import random

import pytest

from megatron_overlap.schedules.varlen import Topology, partition
from megatron_overlap.schedules.varlen.plan import Piece
from megatron_overlap.schedules.varlen.rebalance import rebalance_to, rebalanced_pieces, slice_pieces
from tests.adapters.varlen import loader_workers as cases
from tests.helpers.world import World

HEAVY_TAILED = [int(length) for length in (random.Random(3).paretovariate(0.9) * 4 for _ in range(60)) if length < 100]
SHAPES = {
    "heavy-tailed": (HEAVY_TAILED, 100),
    "one is the whole batch": ([64], 64),
    "length 1": ([1] * 50, 16),
    "empty ones": ([0, 3, 0, 0, 7, 0, 20, 0], 24),
    "to the last token": ([8, 8, 8, 8], 32),
    "fewer tokens than ranks": ([1, 2], 2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_micro_batches_do_not_depend_on_who_shares_them(world: World, name: str) -> None:
    lengths, tokens = SHAPES[name]
    alone = world.run(1, cases.batches, lengths, tokens, 5)[0]
    for rows in (rows for _, rows in alone):
        assert 0 < len(rows) <= tokens
        for document, position, token, label, counts in rows:
            source, place = divmod(token, 1000)
            assert (place, label, counts) == (position, -token, source % 2)
            assert lengths[source] > position
            assert document >= 0
    for size in (2, 3, 4):
        shared = world.run(size, cases.batches, lengths, tokens, 5)
        for number, (_, expected) in enumerate(alone):
            parts = [ranks[number][1] for ranks in shared]
            assert sorted(row for part in parts for row in part) == sorted(expected)
            counts = [len(part) for part in parts]
            assert max(counts) - min(counts) <= 1, "linear layers have equal shares"


def test_a_micro_batch_ends_before_the_document_that_does_not_fit(world: World) -> None:
    found = world.run(1, cases.batches, [7, 7, 7, 7, 7], 20, 3)[0]
    assert [len(rows) for _, rows in found] == [14, 14, 14]
    # Ten documents of an epoch of five: each twice, whatever the order.
    assert len({row[2] // 1000 for _, rows in found[:2] for row in rows}) == 4


def test_rings_hold_the_same(world: World) -> None:
    alone = world.run(1, cases.batches, HEAVY_TAILED, 100, 2)[0]
    shared = world.run(3, cases.batches, HEAVY_TAILED, 100, 2, "ring")
    for number in range(2):
        assert sorted(row for ranks in shared for row in ranks[number][1]) == sorted(alone[number][1])


def test_copies_take_turns_and_a_run_goes_on_where_it_stopped(world: World) -> None:
    whole = [sorted(rows) for _, rows in world.run(1, cases.batches, HEAVY_TAILED, 100, 6)[0]]
    for copy in (0, 1):
        mine = world.run(1, cases.batches, HEAVY_TAILED, 100, 2, first=2 + copy, stride=2)[0]
        assert [sorted(rows) for _, rows in mine] == [whole[2 + copy], whole[4 + copy]]


def test_messages_are_worked_out_by_the_loader(world: World) -> None:
    """Of the first two micro-batches, before anybody has said what layers ask for, by the layer."""
    for late in world.run(2, cases.programs_made_late, HEAVY_TAILED, 100, 4):
        assert late == [1, 1, 0, 0]


def test_rows_are_padded_to_a_multiple(world: World) -> None:
    for ranks in world.run(3, cases.batches, [1, 2, 5, 1], 5, 4, row_multiple=4):
        assert all(padded % 4 == 0 and padded >= max(4, len(rows)) for padded, rows in ranks)
        assert all(padded - len(rows) <= 4 for padded, rows in ranks)


def test_a_rank_that_cannot_read_holds_up_nobody(world: World) -> None:
    assert world.run(2, cases.what_a_failing_read_does) == ["OSError", "TransportError"]


@pytest.mark.parametrize(("lengths", "tokens"), [([], 4), ([0, 0], 4), ([3, 5], 4)])
def test_what_cannot_be_packed_is_refused(lengths: list[int], tokens: int) -> None:
    with pytest.raises(ValueError, match=f"give documents of 1 to {tokens} rows"):
        cases.DocumentLoader(cases.Numbered(lengths), None, None, tokens=tokens, seed=1)  # type: ignore[arg-type]


def test_moved_pieces_are_the_rows_that_move() -> None:
    topology = Topology(2, 2)
    plan = partition(HEAVY_TAILED[:20], topology, capacity=sum(HEAVY_TAILED[:20]))
    pieces = [list(plan.pieces(0, rank)) for rank in range(4)]
    before = [[(p.document, at) for p in held for at in range(p.start, p.stop)] for held in pieces]
    counts = [len(rows) for rows in before]
    move = rebalance_to(counts, [0, sum(counts) - 5, 5, 0], topology)
    after = [rows[: move.after[rank]] + [None] * (move.after[rank] - len(rows)) for rank, rows in enumerate(before)]
    for step in move.moves:
        after[step.to][step.at : step.at + step.rows] = before[step.source][step.start : step.stop]
    found = rebalanced_pieces(pieces, move)
    assert [[(p.document, at) for p in held for at in range(p.start, p.stop)] for held in found] == after


def test_cut() -> None:
    pieces = [Piece(4, 10, 13), Piece(5, 0, 2), Piece(6, 7, 9)]
    assert list(slice_pieces(pieces, 2, 6)) == [Piece(4, 12, 13), Piece(5, 0, 2), Piece(6, 7, 8)]
    assert list(slice_pieces(pieces, 3, 3)) == []
