"""Rebalancing: every row arrives at its place, and no other plan of moves costs less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.schedules.varlen import Topology, partition
from megatron_overlap.schedules.varlen.messages import rebalance_messages
from megatron_overlap.schedules.varlen.rebalance import Rebalance, rebalance, rebalance_to_linear
from scripts.bench.document_lengths import sample

INSIDE, BETWEEN = 1, 8


def apply_moves(moves: Rebalance) -> list[list[tuple[int, int]]]:
    """Moves rows named (rank, row); every row of the result is written once."""
    result: list[list[tuple[int, int] | None]] = [[None] * count for count in moves.after]
    for rank, (before, after) in enumerate(zip(moves.before, moves.after, strict=True)):
        for row in range(min(before, after)):
            result[rank][row] = (rank, row)
    for move in moves.moves:
        for offset in range(move.rows):
            assert result[move.to][move.at + offset] is None
            result[move.to][move.at + offset] = (move.source, move.start + offset)
    assert all(row is not None for rows in result for row in rows)
    return result  # type: ignore[return-value]


def least_cost(tokens: Sequence[int], low: Sequence[int], high: Sequence[int], topology: Topology) -> float:
    """The optimum of the transport problem, by HiGHS; each rank ends with `low` to `high` tokens."""
    optimize = pytest.importorskip("scipy.optimize")
    ranks = range(topology.ranks)
    cost, rows, columns = [], [], []
    for source in ranks:
        for to in ranks:
            same = topology.node_of(source) == topology.node_of(to)
            cost.append(0 if source == to else INSIDE if same else BETWEEN)
            rows.append([1 if rank == source else 0 for rank in ranks])
            columns.append([1 if rank == to else 0 for rank in ranks])
    matrix = [*map(list, zip(*rows, strict=True)), *map(list, zip(*columns, strict=True))]
    bounds = optimize.LinearConstraint(matrix, [*tokens, *low], [*tokens, *high])
    found = optimize.milp(cost, constraints=[bounds])
    assert found.success
    return float(found.fun)


def num_moved(moves: Rebalance, topology: Topology) -> tuple[int, int]:
    """Rows that move inside nodes, and rows that move between nodes."""
    inside = sum(m.rows for m in moves.moves if topology.node_of(m.source) == topology.node_of(m.to))
    return inside, sum(m.rows for m in moves.moves) - inside


def cost_of(moves: Rebalance, topology: Topology) -> int:
    inside, between = num_moved(moves, topology)
    return INSIDE * inside + BETWEEN * between


cases = st.tuples(st.integers(1, 4), st.integers(1, 4)).flatmap(
    lambda shape: st.tuples(
        st.just(Topology(*shape)),
        st.lists(st.integers(0, 30), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]),
    )
)


@settings(max_examples=80)
@given(cases)
def test_even_and_least_cost(case: tuple[Topology, list[int]]) -> None:
    """The optimum may also select the ranks with one token more, and is not cheaper."""
    topology, tokens = case
    moves = rebalance(tokens, topology)
    apply_moves(moves)
    share, extra = divmod(sum(tokens), topology.ranks)
    assert sorted(moves.after, reverse=True) == [share + 1] * extra + [share] * (topology.ranks - extra)
    low, high = [share] * topology.ranks, [share + 1] * topology.ranks
    assert cost_of(moves, topology) == pytest.approx(least_cost(tokens, low, high, topology))


@settings(max_examples=40)
@given(cases)
def test_the_inverse_restores_every_row(case: tuple[Topology, list[int]]) -> None:
    topology, tokens = case
    moves = rebalance(tokens, topology)
    rebalanced = apply_moves(moves)
    inverse = moves.inverse()
    assert inverse.before == moves.after
    for rank, rows in enumerate(apply_moves(inverse)):
        assert [rebalanced[source][row] for source, row in rows] == [(rank, row) for row in range(tokens[rank])]
    assert inverse.inverse() == moves


@settings(max_examples=40)
@given(cases)
def test_a_rank_sends_and_receives_one_message_in_a_round(case: tuple[Topology, list[int]]) -> None:
    topology, tokens = case
    messages = rebalance_messages(rebalance(tokens, topology)).messages
    for ends in ([(m.source, m.round) for m in messages], [(m.to, m.round) for m in messages]):
        assert len(set(ends)) == len(ends)


def test_sends_and_receives_agree() -> None:
    topology = Topology(2, 2)
    moves = rebalance([10, 0, 3, 3], topology)
    assert moves.after == (4, 4, 4, 4)
    assert [(m.to, m.rows) for m in moves.moves if m.source == 0] == [(1, 4), (2, 1), (3, 1)]
    assert [(m.source, m.start, m.stop, m.at) for m in moves.moves if m.to == 2] == [(0, 8, 9, 3)]
    assert num_moved(moves, topology) == (4, 2)


def test_a_balanced_partition_moves_few_rows() -> None:
    topology = Topology(8, 8, 8)
    plan = partition(sample("wlb", 4 << 20, 0), topology, capacity=72 << 10)
    inside, between = num_moved(rebalance(plan.tokens(0), topology), topology)
    assert inside + between < 0.03 * sum(plan.lengths)


def test_rows_move_only_where_that_pays_off() -> None:
    """One rank has 40 tokens more than the mean: 114 us of linear layers, by the default cost model."""
    plan = partition([140, 60], Topology(1, 2), capacity=140)
    plan = replace(plan, passes=(replace(plan.passes[0], local=((0,), (1,)), rings=()),))
    assert rebalance_to_linear(plan).after == (100, 100)
    # Both directions, 80 tokens of keys and values each on a link of 1.6 GB/s: 102 us plus latencies.
    for latency_us, pays_off in ((5, True), (7, False)):
        topology = replace(plan.topology, intra_gbps=1.6, intra_latency_us=latency_us)
        found = rebalance_to_linear(replace(plan, topology=topology))
        assert found.after == ((100, 100) if pays_off else found.before)
        assert bool(found.moves) == pays_off
    assert rebalance_to_linear(replace(plan, cost=replace(plan.cost, linear_fs=0))).moves == ()
    # Between nodes the moved rows use one NIC even with routing: 205 us at 0.8 GB/s, 102 us over both NICs.
    nodes = Topology(2, 1, 2, inter_gbps=0.8, inter_latency_us=1)
    assert rebalance_to_linear(replace(plan, topology=nodes)).moves == ()
