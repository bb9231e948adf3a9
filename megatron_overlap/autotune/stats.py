"""A measured time with its standard error. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

# Fraction of the shortest and of the longest times that a trimmed mean leaves out.
_TRIMMED = 0.25
# Widens the error of few times as Student's t does: `SURE` is then as rarely wrong as with many times.
_FEW = 2.6
SURE, LIKELY = 2.5, 1.0
"""Standard errors that a difference must exceed to be certain, and to be the better guess."""


class Timing(NamedTuple):
    """Microseconds and their standard error; `us` is NaN where nothing was measured."""

    us: float
    error: float = 0.0

    @classmethod
    def trimmed(cls, times: Sequence[float]) -> Timing:
        """The mean without the shortest and the longest quarter, with Yuen's error (Biometrika 61, 1974)."""
        ordered, count = sorted(times), len(times)
        cut = int(_TRIMMED * count)
        low, high = ordered[cut], ordered[-1 - cut]
        middle = fmean(ordered[cut : count - cut])
        if low == high:
            return cls(middle)
        deviation = stdev(min(max(each, low), high) for each in times) / (1 - 2 * cut / count)
        return cls(middle, (1 + _FEW / (count - 1)) * deviation / math.sqrt(count))

    @classmethod
    def slowest(cls, calls: Iterable[Sequence[float]], fewest: int) -> Timing:
        """The time of calls that each take as long as their slowest rank.

        Args:
            calls: the times of all ranks, for each call. A call without a time on some rank (NaN) does not count.
            fewest: calls below which the result is NaN.
        """
        times = [max(each) for each in calls if not any(map(math.isnan, each))]
        return cls.trimmed(times) if len(times) >= fewest else cls(math.nan)

    @classmethod
    def total(cls, parts: Sequence[Timing]) -> Timing:
        """The sum of parts that were measured independently."""
        return cls(sum(each.us for each in parts), math.hypot(*(each.error for each in parts)))

    def slower(self, other: Timing, gap: float = 0.0, errors: float = SURE) -> bool:
        """Whether this is slower by more than the fraction `gap` and by more than so many standard errors."""
        beyond_noise = self.us - other.us > errors * math.hypot(self.error, other.error)
        return self.us > (1 + gap) * other.us and beyond_noise

    def differs(self, other: Timing, gap: float) -> bool:
        """Whether either is slower than the other by more than the fraction `gap`, beyond measurement error."""
        return self.slower(other, gap) or other.slower(self, gap)
