"""Bytes that overlapped layers hold from forward to backward, counted as they are taken and let go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class SavedSite(NamedTuple):
    """Which layers, by kind and shape, and the op that keeps."""

    kind: str
    name: str
    op: str


@dataclass(frozen=True)
class SavedMemory:
    """What was kept so far, and what the same calls would have kept by the other choice.

    Attributes:
        choice: the choice that ran, and the one that did not, as the config spells them.
        otherwise: see `choice`.
        calls: of each kind of layer the most that one call kept, and would have kept otherwise.
        peak_bytes: the most that was kept at one time.
        otherwise_peak_bytes: the most that would have been.
    """

    choice: str = "always"
    otherwise: str = "never"
    calls: tuple[tuple[SavedSite, int, int], ...] = ()
    peak_bytes: int = 0
    otherwise_peak_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The memory as JSON can hold it."""
        return {
            "recompute_gather": self.choice,
            "peak_bytes": self.peak_bytes,
            "otherwise": self.otherwise,
            "otherwise_peak_bytes": self.otherwise_peak_bytes,
            "modules": [
                {**site._asdict(), "kept_bytes": kept, "otherwise_bytes": other} for site, kept, other in self.calls
            ],
        }


class SavedActivations:
    """Counts; safe to use from autograd's threads.

    Args:
        gathered: whether the choice is to keep gathered inputs (`recompute_gather: never`).
    """

    def __init__(self, *, gathered: bool = False) -> None:
        self._gathered = gathered
        self._calls: dict[SavedSite, tuple[int, int]] = {}
        # By address: layers of one input keep its own rows once, but gathered rows each for itself.
        self._shards: dict[int, int] = {}
        self._live = [0, 0]
        self._peak = [0, 0]
        self._lock = threading.Lock()

    def keep(self, site: SavedSite, address: int, shard_bytes: int, gathered_bytes: int) -> Callable[[], None]:
        """Counts what one call keeps of an input; the result is to be called, once, when it lets go.

        Args:
            site: the layer.
            address: of the input's own rows.
            shard_bytes: of the own rows.
            gathered_bytes: of all ranks' rows.
        """
        with self._lock:
            most = self._calls.get(site, (0, 0))
            self._calls[site] = (max(most[0], shard_bytes), max(most[1], gathered_bytes))
            self._shards[address] = self._shards.get(address, 0) + 1
            self._live[0] += shard_bytes if self._shards[address] == 1 else 0
            self._live[1] += gathered_bytes
            self._peak = [max(pair) for pair in zip(self._peak, self._live, strict=True)]

        def let_go() -> None:
            with self._lock:
                self._shards[address] -= 1
                if self._shards[address] == 0:
                    del self._shards[address]
                    self._live[0] -= shard_bytes
                self._live[1] -= gathered_bytes

        return let_go

    @property
    def live_bytes(self) -> int:
        """Bytes kept now."""
        return self._live[self._gathered]

    def snapshot(self) -> SavedMemory:
        """What was kept so far."""
        mine, other = int(self._gathered), int(not self._gathered)
        choices = ("always", "never")
        with self._lock:
            return SavedMemory(
                choice=choices[mine],
                otherwise=choices[other],
                calls=tuple((site, most[mine], most[other]) for site, most in sorted(self._calls.items())),
                peak_bytes=self._peak[mine],
                otherwise_peak_bytes=self._peak[other],
            )
