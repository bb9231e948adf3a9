"""The order in which a fused kernel takes its row tiles: a schedule as data, which the kernel only reads.

A comm tile (a `Chunk`) is cut into row tiles of `block_rows`, each inside one chunk, so that a tile waits for one flag,
or counts towards one. A gathering GEMM takes own rows first and others as the direct all-gather delivers them; a
scattering GEMM takes others' rows first, as the direct reduce-scatter sends them, and own rows last.

Source: Flux (arXiv 2406.06858), tile order by rank; own rows last as in Flash-Overlap (arXiv 2604.24013).
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_overlap.schedules.layout import Chunk, ChunkLayout


class RowTile(NamedTuple):
    """Rows that one row of GEMM tiles covers. Eight integers, as the kernels read them.

    Attributes:
        start: first row in the gathered activation.
        stop: the row after the last one.
        owner: whose rows they are.
        part: which chunk of the owner's shard they lie in.
        row_in_shard: `start`, counted from the owner's first row.
        tiles_in_chunk: row tiles that the chunk has in all.
        remote: 1 where the owner is another rank.
        flag: number of the chunk over all owners, `owner * chunks_per_rank + part`.
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
    """Chunks as rank `rank` gets them from a direct all-gather: own ones, then those of r-1, r-2, ..., r+1."""
    return [Chunk((rank - distance) % layout.num_ranks, part) for distance, part in _distances(layout, 0)]


def departure_order(layout: ChunkLayout, rank: int) -> list[Chunk]:
    """Chunks as a direct reduce-scatter sends them: those of r+1, r+2, ..., r-1, then own ones."""
    return [Chunk((rank + distance) % layout.num_ranks, part) for distance, part in _distances(layout, 1)]


def _distances(layout: ChunkLayout, first: int) -> list[tuple[int, int]]:
    return [
        (distance, part)
        for distance in range(first, first + layout.num_ranks)
        for part in range(layout.chunks_per_rank)
    ]


def row_tiles(layout: ChunkLayout, rank: int, order: list[Chunk], block_rows: int | None = None) -> list[RowTile]:
    """The row tiles of all chunks in `order`; an empty chunk has none.

    Args:
        layout: rows of every chunk.
        rank: this rank; its own chunks are not remote.
        order: chunks in the order in which they are to be computed.
        block_rows: most rows of a tile; None makes one tile of each chunk.

    Raises:
        ValueError: `block_rows` is below one.
    """
    if block_rows is not None and block_rows < 1:
        raise ValueError(f"block_rows: {block_rows}: must be at least 1")
    tiles = []
    for chunk in order:
        start, stop = layout.rows(chunk)
        block = block_rows or max(1, stop - start)
        first, _ = layout.shard(chunk.owner)
        count = -(-(stop - start) // block)
        tiles += [
            RowTile(
                start=start + number * block,
                stop=min(stop, start + (number + 1) * block),
                owner=chunk.owner,
                part=chunk.part,
                row_in_shard=start + number * block - first,
                tiles_in_chunk=count,
                remote=int(chunk.owner != rank),
                flag=chunk.owner * layout.chunks_per_rank + chunk.part,
            )
            for number in range(count)
        ]
    return tiles
