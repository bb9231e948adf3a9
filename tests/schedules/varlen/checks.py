"""Invariants of every plan, independent of the planner."""

from __future__ import annotations

from megatron_overlap.schedules.varlen import Plan


def check_plan(plan: Plan, *, capacity: bool = True) -> None:
    """Every token is on one rank in one pass, the capacity holds, rings are well-formed, and token counts are right."""
    covered: dict[int, list[tuple[int, int]]] = {}
    for index, part in enumerate(plan.passes):
        assert len(part.local) == plan.topology.ranks
        counts = plan.tokens(index)
        for rank in range(plan.topology.ranks):
            pieces = list(plan.pieces(index, rank))
            assert sum(piece.stop - piece.start for piece in pieces) == counts[rank]
            assert all(piece.start < piece.stop for piece in pieces)
            if capacity:
                assert counts[rank] <= plan.capacity
            for piece in pieces:
                covered.setdefault(piece.document, []).append((piece.start, piece.stop))
        documents = [ring.document for ring in part.rings]
        assert len(documents) == len(set(documents))
        for ring in part.rings:
            size = len(ring.ranks)
            assert size > 1
            assert list(ring.ranks) == sorted(set(ring.ranks))
            assert len(ring.bounds) == 2 * size + 1
            assert ring.length == plan.lengths[ring.document]
            nodes = {plan.topology.node_of(rank) for rank in ring.ranks}
            assert ring.zone == ("intra" if len(nodes) == 1 else "inter")
            for position in range(size):
                early, late = ring.chunks(position)
                assert ring.tokens(position) > 0
                assert 0 <= (early[1] - early[0]) - (late[1] - late[0]) <= 1
    for document, length in enumerate(plan.lengths):
        ends = 0
        for start, stop in sorted(covered.pop(document, [])):
            assert start == ends, f"document {document}"
            ends = stop
        assert ends == length, f"document {document}"
    assert not covered
