"""How far the curves of trainings are apart, and how far they may be; see docs/numerics.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

FP32_BOUND = 1e-5
"""Relative; another order of the same fp32 sums."""
BF16_FACTOR = 2.0
"""The plugin's deviation from fp32 against stock's own, see docs/numerics.md."""
NAMES = ("loss", "grad_norm")
INFINITE = float("inf")

Curves = dict[int, dict[str, float]]
"""Loss and grad-norm by iteration."""


@dataclass
class Check:
    """One comparison: the largest deviation of each quantity over the iterations, and what is allowed.

    With several seeds, the median over them. `beside` has each seed.
    """

    arch: str
    layout: str
    precision: str
    what: str
    deviation: dict[str, float]
    bound: dict[str, float]
    beside: dict[str, dict[str, float]]
    calls: dict[str, int]
    fallbacks: dict[str, int]
    ok: bool = False

    def judge(self, expected: frozenset[str] | None) -> Check:
        """Equal, and by the path that is meant: by these overlapped calls (none: by named fallbacks), or any."""
        self.ok = all(self.deviation[name] <= self.bound[name] for name in NAMES)
        if expected is not None:
            self.ok &= expected <= set(self.calls) and bool(self.fallbacks) == (not expected)
        return self


def deviation(curves: Curves, from_: Curves, iterations: Sequence[int]) -> dict[str, float]:
    """The largest relative deviation of each quantity; infinite where an iteration or a finite number is missing."""
    found = dict.fromkeys(NAMES, 0.0)
    for iteration in iterations:
        for name in NAMES:
            value, true = (each.get(iteration, {}).get(name) for each in (curves, from_))
            if value is None or true is None:
                return dict.fromkeys(NAMES, INFINITE)
            off = abs(value - true) / (abs(true) or 1.0)  # frozen layers have a grad-norm of 0
            # Not `max` alone: it passes over what is not a number.
            found[name] = max(found[name], off) if off == off else INFINITE
    return found


def medians(deviations: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median deviation of each quantity over seeds; infinite if one is."""
    values = {name: [each[name] for each in deviations] for name in NAMES}
    return {name: INFINITE if INFINITE in each else median(each) for name, each in values.items()}


def scaled(deviations: dict[str, float]) -> dict[str, float]:
    """The bf16 bound that follows from stock's own deviation from fp32."""
    return {name: BF16_FACTOR * value for name, value in deviations.items()}
