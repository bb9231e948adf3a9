"""Groups on several hosts: each row is sent once to every other host, and shards do not change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_overlap.schedules import Chunk, ChunkLayout
from megatron_overlap.schedules.gather_scatter import Nodes

COUNTS = st.integers(1, 9)


@given(COUNTS, COUNTS, st.integers(0, 300))
def test_rows_of_hosts_are_the_rows_of_their_ranks(num_nodes: int, per_node: int, num_rows: int) -> None:
    nodes = Nodes(num_nodes, per_node)
    whole = ChunkLayout(num_rows, nodes.num_ranks)
    end = 0
    for node in range(num_nodes):
        start, stop = nodes.rows(num_rows, node)
        assert start == end
        end = stop
        inside = ChunkLayout(stop - start, per_node)
        for rank in nodes.members(node):
            first, last = inside.shard(rank % per_node)
            assert (start + first, start + last) == whole.shard(rank)
            assert nodes.node(rank) == node
    assert end == num_rows


@given(COUNTS, COUNTS)
def test_messages_run_along_rails_and_both_ends_agree(num_nodes: int, per_node: int) -> None:
    nodes = Nodes(num_nodes, per_node)
    for make in (Nodes.gather, Nodes.scatter):
        plans = [make(nodes, rank) for rank in range(nodes.num_ranks)]
        sent = {(rank, each.to, each.send) for rank, plan in enumerate(plans) for each in plan.messages}
        received = {(each.source, rank, each.recv) for rank, plan in enumerate(plans) for each in plan.messages}
        assert sent == received
        assert len(sent) == nodes.num_ranks * (num_nodes - 1)
        for rank, to, chunk in sent:
            assert rank % per_node == to % per_node
            assert nodes.node(rank) != nodes.node(to)
            assert chunk == Chunk(rank if make is Nodes.gather else to, 0)


@given(COUNTS, COUNTS)
def test_own_host_first_in_a_gather_and_last_in_a_scatter(num_nodes: int, per_node: int) -> None:
    nodes = Nodes(num_nodes, per_node)
    for rank in range(nodes.num_ranks):
        gathered = nodes.gather(rank)
        order = [work.chunks[0].owner for work in gathered.work]
        assert order[0] == nodes.node(rank)
        assert sorted(order) == list(range(num_nodes))
        for work in gathered.work:
            # The rows of a host need the message from that host.
            assert [nodes.node(gathered.messages[each].source) for each in work.needs] == [
                owner for owner, _ in work.chunks if owner != nodes.node(rank)
            ]
        scattered = nodes.scatter(rank)
        order = [work.chunks[0].owner for work in scattered.work if work.chunks]
        assert order[-1] == nodes.node(rank)
        assert [nodes.node(each.to) for each in scattered.messages] == order[:-1]
        assert [each.after_work for each in scattered.messages] == list(range(1, num_nodes))


def test_hosts_by_name() -> None:
    assert Nodes.of(["a", "a", "b", "b"]) == Nodes(2, 2)
    assert Nodes.of(["a"] * 3) == Nodes(1, 3)
    with pytest.raises(ValueError, match="different numbers of its ranks: 2 on a, 1 on b"):
        Nodes.of(["a", "a", "b"])
    with pytest.raises(ValueError, match="ranks of a host are not consecutive"):
        Nodes.of(["a", "b", "a", "b"])
