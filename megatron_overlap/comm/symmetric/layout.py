"""Layout of one rank's arena of symmetric memory. It is equal on every rank, so that an offset is an address.

    slot 0 | slot 1 | flags of slot 0 | flags of slot 1 | acknowledgements | ready words

Operation number e (1, 2, ...) of a group is its epoch. It uses slot e % 2, so two operations can be in flight. The slot
holds the gathered rows of an all-gather or the receive buffer of a reduce-scatter.

- Flags: a chunk of operation e is complete when its flag is e.
- Acknowledgements: a rank that no longer reads its slot for operation e writes e at every peer. A rank writes into the
  slots for operation e + 2 after all ranks have acknowledged e.
- Ready words: a rank writes e at every peer when the peers may pull its rows of operation e.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 256
MAX_PARTS = 32
"""Largest number of chunks per shard: the arena has one flag for each."""

_FLAG_BYTES = 4


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def gathered_bytes(num_rows: int, num_ranks: int, features: int, itemsize: int) -> int:
    """Bytes of a slot that one operation needs: R times the largest shard, for gathered rows or a receive buffer."""
    return -(-num_rows // num_ranks) * num_ranks * features * itemsize


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Offsets in bytes into an arena for operations of at most `slot_bytes`.

    Raises:
        ValueError: a count is below one.
    """

    num_ranks: int
    slot_bytes: int

    def __post_init__(self) -> None:
        for name in ("num_ranks", "slot_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}: must be at least 1")

    @property
    def num_flags(self) -> int:
        """Flags of one slot: one for each chunk of each rank."""
        return self.num_ranks * MAX_PARTS

    def slot(self, epoch: int) -> int:
        """Offset of the slot of operation `epoch`."""
        return epoch % 2 * _aligned(self.slot_bytes)

    def flags(self, epoch: int) -> int:
        """Offset of the flags of operation `epoch`, int32 `[num_flags]`."""
        return 2 * _aligned(self.slot_bytes) + epoch % 2 * _aligned(self.num_flags * _FLAG_BYTES)

    def acknowledgements(self, epoch: int) -> int:
        """Offset of the latest epoch of this slot that each rank has acknowledged, int32 `[R]`."""
        flags = 2 * (_aligned(self.slot_bytes) + _aligned(self.num_flags * _FLAG_BYTES))
        return flags + epoch % 2 * _aligned(self.num_ranks * _FLAG_BYTES)

    def ready(self, epoch: int) -> int:
        """Offset of the latest epoch of this slot whose rows peers may pull from each rank, int32 `[R]`."""
        return self.acknowledgements(0) + (2 + epoch % 2) * _aligned(self.num_ranks * _FLAG_BYTES)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arena: twice the largest gathered activation and a few kilobytes of flags."""
        return self.ready(1) + _aligned(self.num_ranks * _FLAG_BYTES)
