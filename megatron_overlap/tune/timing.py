"""A measured time that knows how sure it is. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

# Standard deviation of a normal distribution by its median distance; error of its median by that of its mean.
_NORMAL, _OF_MEDIAN = 1.4826, 1.2533
# The error of few times is not known well either: so that what is `SURE` is as rare as with many (Student's t).
_FEW = 2.6
SURE, LIKELY = 2.5, 1.0
"""Standard errors of a difference from which on it is believed, and from which on it is the better guess."""


class Timing(NamedTuple):
    """What a call takes, by a median.

    Attributes:
        us: microseconds; NaN where not measured.
        error: their standard error.
    """

    us: float
    error: float = 0.0

    @classmethod
    def median(cls, times: Sequence[float]) -> Timing:
        """The median, its error by the median distance from it: a few late calls change neither."""
        middle = median(times)
        deviation = _NORMAL * median(abs(each - middle) for each in times)
        few = 1 + _FEW / (len(times) - 1) if len(times) > 1 else math.inf
        return cls(middle, few * _OF_MEDIAN * deviation / math.sqrt(len(times)) if deviation else 0.0)

    @classmethod
    def slowest(cls, calls: Iterable[Sequence[float]], fewest: int) -> Timing:
        """What calls take a group of ranks, each as long as its slowest rank: medians of ranks would hide who waits.

        Args:
            calls: of each the times of all ranks; one that some rank has no time of (NaN) does not count.
            fewest: with less of them nothing is known: NaN.
        """
        times = [max(each) for each in calls if not any(map(math.isnan, each))]
        return cls.median(times) if len(times) >= fewest else cls(math.nan)

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
