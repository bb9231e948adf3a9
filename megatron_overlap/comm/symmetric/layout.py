"""How one rank's symmetric memory is divided. Pure arithmetic: the same on every rank, so that offsets are addresses.

    half 0 | half 1 | flags of half 0 | flags of half 1 | acknowledgements | ready words

Op number e (1, 2, ...) of a group uses half e % 2, so that two ops may be in p2p_work: a half holds the gathered rows
of
an all-gather, or the landing of a reduce-scatter. Its flags are raised to e. When a rank has read all it needs of op e,
it writes e to its acknowledgement at every peer; nobody writes into a half for op e + 2 before all have done so. A rank
whose rows are to be pulled writes e to its ready word at every peer when they are there.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 256
MAX_PARTS = 32
"""Chunks of a shard that flags are there for."""

_FLAG_BYTES = 4


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def gathered_bytes(num_rows: int, num_ranks: int, features: int, itemsize: int) -> int:
    """Bytes of half an arena that one op needs: its gathered rows, or a landing of R slots of the largest shard."""
    return -(-num_rows // num_ranks) * num_ranks * features * itemsize


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Offsets in bytes into an arena for ops of at most `half_bytes`.

    Raises:
        ValueError: a count is below one.
    """

    num_ranks: int
    half_bytes: int

    def __post_init__(self) -> None:
        for name in ("num_ranks", "half_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}: must be at least 1")

    @property
    def num_flags(self) -> int:
        """Flags of one half: one for each chunk of each rank."""
        return self.num_ranks * MAX_PARTS

    def half(self, epoch: int) -> int:
        """Offset of the half that op `epoch` uses."""
        return epoch % 2 * _aligned(self.half_bytes)

    def flags(self, epoch: int) -> int:
        """Offset of the flags of op `epoch`, int32 `[num_flags]`."""
        return 2 * _aligned(self.half_bytes) + epoch % 2 * _aligned(self.num_flags * _FLAG_BYTES)

    def acknowledgements(self, epoch: int) -> int:
        """Offset of the epochs of this half that each rank is done with, int32 `[R]`."""
        flags = 2 * (_aligned(self.half_bytes) + _aligned(self.num_flags * _FLAG_BYTES))
        return flags + epoch % 2 * _aligned(self.num_ranks * _FLAG_BYTES)

    def ready(self, epoch: int) -> int:
        """Offset of the epochs of this half that each rank's rows may be pulled for, int32 `[R]`."""
        return self.acknowledgements(0) + (2 + epoch % 2) * _aligned(self.num_ranks * _FLAG_BYTES)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arena: twice the largest gathered activation, and some kilobytes of flags."""
        return self.ready(1) + _aligned(self.num_ranks * _FLAG_BYTES)
