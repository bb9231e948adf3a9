"""A measured time that knows how sure it is. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

# Share of the least and of the longest times that do not count.
_TRIMMED = 0.25
# The error of few times is not known well either: so that what is `SURE` is as rare as with many (Student's t).
_FEW = 2.6
SURE, LIKELY = 2.5, 1.0
"""Standard errors of a difference from which on it is believed, and from which on it is the better guess."""


class Timing(NamedTuple):
    """What a call takes, by the middle of its times.

    Attributes:
        us: microseconds; NaN where not measured.
        error: their standard error.
    """

    us: float
    error: float = 0.0

    @classmethod
    def trimmed(cls, times: Sequence[float]) -> Timing:
        """The mean without the least and the longest quarter: a few late calls change nothing.

        Of times of layers it scatters less than the median, by a tenth, for which a fifth more calls would be needed.
        Its error is Yuen's (Biometrika 61, 1974): that of times of which the outer quarters are moved in.
        """
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
        """What calls take a group of ranks, each as long as its slowest rank: those of each rank would hide who waits.

        Args:
            calls: of each the times of all ranks; one that some rank has no time of (NaN) does not count.
            fewest: with less of them nothing is known: NaN.
        """
        times = [max(each) for each in calls if not any(map(math.isnan, each))]
        return cls.trimmed(times) if len(times) >= fewest else cls(math.nan)

    @classmethod
    def total(cls, parts: Sequence[Timing]) -> Timing:
        """Of parts that were measured apart."""
        return cls(sum(each.us for each in parts), math.hypot(*(each.error for each in parts)))

    def above(self, other: Timing, errors: float = SURE) -> bool:
        """Whether this takes longer for sure, or by so many standard errors of the difference."""
        return self.us - other.us > errors * math.hypot(self.error, other.error)

    def alike(self, other: Timing) -> bool:
        """Whether neither takes longer for sure."""
        return not self.above(other) and not other.above(self)

    def out(self, times: float, best: Timing) -> bool:
        """Whether this takes more than so many times as long as `best`, and longer for sure."""
        return self.us > times * best.us and self.above(best)

    def wins(self, margin: float, base: Timing, errors: float = SURE) -> bool:
        """Whether this is faster than `base` by more than a share of `margin`, and faster for sure, or by `errors`."""
        return self.us < (1 - margin) * base.us and base.above(self, errors)
