"""Row tiles of the fused kernels cover each row once, in the order of the direct plans."""

from __future__ import annotations

import pytest

from megatron_overlap.schedules import ChunkLayout, all_gather_plan, reduce_scatter_plan
from megatron_overlap.schedules.tile_order import arrival_order, departure_order, row_tiles


@pytest.mark.parametrize("block", [1, 7, 64, 256])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
@pytest.mark.parametrize("rows", [0, 1, 37, 256])
def test_each_row_once_and_inside_its_chunk(rows: int, num_ranks: int, parts: int, block: int) -> None:
    layout = ChunkLayout(rows, num_ranks, parts)
    for rank in range(num_ranks):
        for order in (arrival_order(layout, rank), departure_order(layout, rank)):
            tiles = row_tiles(layout, rank, order, block)
            assert sorted(row for tile in tiles for row in range(tile.start, tile.stop)) == list(range(rows))
            for tile in tiles:
                first, last = layout.rows(order[[(c.owner, c.part) for c in order].index((tile.owner, tile.part))])
                assert first <= tile.start < tile.stop <= last
                assert tile.stop - tile.start <= block
                assert tile.row_in_shard == tile.start - layout.shard(tile.owner)[0]
                assert tile.remote == (tile.owner != rank)
                assert tile.flag == tile.owner * parts + tile.part
                same = [other for other in tiles if other.flag == tile.flag]
                assert tile.tiles_in_chunk == len(same)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("num_ranks", [2, 4, 7])
def test_order_equals_that_of_the_direct_plans(num_ranks: int, parts: int) -> None:
    layout = ChunkLayout(100, num_ranks, parts)
    for rank in range(num_ranks):
        gathered = [e.recv for e in all_gather_plan(num_ranks, rank, chunks_per_rank=parts).messages]
        assert arrival_order(layout, rank)[parts:] == gathered
        assert {chunk.owner for chunk in arrival_order(layout, rank)[:parts]} == {rank}
        sent = [e.send for e in reduce_scatter_plan(num_ranks, rank, chunks_per_rank=parts).messages]
        assert departure_order(layout, rank)[:-parts] == sent
        assert {chunk.owner for chunk in departure_order(layout, rank)[-parts:]} == {rank}


def test_at_any_time_ranks_write_to_different_owners() -> None:
    layout = ChunkLayout(64, 8)
    for step in range(8):
        assert len({departure_order(layout, rank)[step].owner for rank in range(8)}) == 8
