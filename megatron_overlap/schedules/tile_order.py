"""Order of the row tiles of a fused kernel, as a table that the kernel reads.

A communication tile (a `Chunk`) is cut into row tiles of `block_rows`. A row tile lies inside one chunk, so it waits
for one flag or counts towards one flag.

Source: Flux (arXiv 2406.06858), tile order by rank; own rows last as in Flash-Overlap (arXiv 2604.24013).
"""

from typing import NamedTuple

from megatron_overlap.schedules.plan import Chunk, ChunkLayout


class RowTile(NamedTuple):
    """The rows of one row of GEMM tiles. The kernels read its eight integers.

    Attributes:
        start, stop: first row and last row + 1 in the gathered activation.
        owner: rank that owns the rows.
        part: index of their chunk in the shard of the owner.
        row_in_shard: `start`, relative to the first row of the owner.
        tiles_in_chunk: number of row tiles of the chunk.
        remote: 1 if the owner is another rank, else 0.
        flag: index of the flag of the chunk, `owner * chunks_per_rank + part`.
    """

    start: int
    stop: int
    owner: int
    part: int
    row_in_shard: int
    tiles_in_chunk: int
    remote: int
    flag: int


def arrival_order(layout: ChunkLayout, rank: int) -> list[Chunk]:
    """Return the chunks in the order of a direct all-gather on `rank`: own chunks, then those of r-1, r-2, ..., r+1."""
    owners = [(rank - distance) % layout.num_ranks for distance in range(layout.num_ranks)]
    return [Chunk(owner, part) for owner in owners for part in range(layout.chunks_per_rank)]


def departure_order(layout: ChunkLayout, rank: int) -> list[Chunk]:
    """Return the chunks in the order of a direct reduce-scatter: those of r+1, r+2, ..., r-1, then own chunks."""
    owners = [(rank + distance) % layout.num_ranks for distance in range(1, layout.num_ranks + 1)]
    return [Chunk(owner, part) for owner in owners for part in range(layout.chunks_per_rank)]


def row_tiles(layout: ChunkLayout, rank: int, order: list[Chunk], block_rows: int) -> list[RowTile]:
    """Return the row tiles, of at most `block_rows` rows, of all chunks in `order`. An empty chunk has no row tile."""
    tiles = []
    for chunk in order:
        start, stop = layout.rows(chunk)
        starts = range(start, stop, block_rows)
        first, _ = layout.shard(chunk.owner)
        tiles += [
            RowTile(
                start=row,
                stop=min(stop, row + block_rows),
                owner=chunk.owner,
                part=chunk.part,
                row_in_shard=row - first,
                tiles_in_chunk=len(starts),
                remote=int(chunk.owner != rank),
                flag=chunk.owner * layout.chunks_per_rank + chunk.part,
            )
            for row in starts
        ]
    return tiles
