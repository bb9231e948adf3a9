"""Medians and percentiles, and the deviation of one series from another. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


class NotComparableError(ValueError):
    """Two series cannot be held against each other; the text says at which value."""


@dataclass(frozen=True)
class Spread:
    """Where the values of a sample lie."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of a sample that is not empty."""
        return cls(percentile(values, 50), percentile(values, 20), percentile(values, 80))

    def as_dict(self) -> dict[str, float]:
        return {"median": self.median, "p20": self.p20, "p80": self.p80}


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the sample lie, on the line between the two nearest.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("values: none: a percentile needs at least one")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def paired_ratios(reference: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> list[float]:
    """For each round, the reference's median over the other's: how many times faster the other was in that round.

    Both ran within the same minutes, so what slows the machine down for a while cancels.
    """
    rounds = zip(reference, other, strict=True)
    return [percentile(base, 50) / percentile(times, 50) for base, times in rounds]


def max_deviation(reference: Sequence[float | None], other: Sequence[float | None], what: str) -> float | None:
    """The largest relative difference between two series of the same length; None when they have no value in common.

    Args:
        reference: the values to divide by.
        other: the values to hold against them.
        what: names the values in the error.

    Raises:
        NotComparableError: at one place only one of the two is a finite number.
    """
    largest: float | None = None
    for index, (a, b) in enumerate(zip(reference, other, strict=True)):
        if a is None or b is None:
            continue
        if math.isfinite(a) != math.isfinite(b):
            raise NotComparableError(f"{what} of iteration {index + 1}: {a} in one run and {b} in the other")
        if not math.isfinite(a):
            continue
        difference = abs(b - a) / abs(a) if a else abs(b - a)
        largest = difference if largest is None else max(largest, difference)
    return largest
