"""Successive halving over the candidates of one kind of call, and times with standard errors. Pure.

Every rank of a group has a `Search` for the same calls. Its next step depends only on the number of calls and on times
that all ranks exchanged. Both are equal on every rank, so all ranks run each call with the same candidate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import fmean, stdev
from typing import Literal, NamedTuple

MARGIN = 0.02
"""A candidate replaces the base only if it is faster by more than this fraction (hysteresis)."""

CALLS_PER_TRIAL = 2
"""A trial is two calls in a row, and the second is timed: another candidate has left caches, threads and connections
in a state that the first one pays for. Further calls would add little, because successive times are correlated."""

FIRST_TRIALS = 5
GAPS = (0.2, 0.1, 0.05, 0.0, 0.0)
"""One entry a round. A candidate leaves after the round if it differs from the selected one by more than this fraction
and beyond measurement error. Each round has twice the trials of the one before, `FIRST_TRIALS` in the first."""
PROVISIONAL_ROUND = 2
"""The search has a selection from this round on; later rounds measure only what is close to it."""
RECHECK_ROUNDS = 3
MAX_REFINEMENTS = 4

# Fraction of the shortest and of the longest times that a trimmed mean leaves out.
_TRIMMED = 0.25
# Widens the error of few times as Student's t does: `SURE` is then as rarely wrong as with many times.
_FEW = 2.6
SURE, LIKELY = 2.5, 1.0
"""Standard errors that a difference must exceed to be certain, and to be the better guess."""

CACHED_RECHECK, FIRST_RECHECK, LAST_RECHECK = 512, 8192, 32768
"""Calls until a recheck: of a cached or modelled selection, of any other, and the most between two rechecks."""
MAX_WAITS = 6


def calls_to_select(num_candidates: int, num_neighbours: int = 0) -> int:
    """Calls of a kind within which the search has a selection; `num_neighbours`: of each candidate that may win."""
    trials = sum(FIRST_TRIALS << number for number in range(PROVISIONAL_ROUND + 1))
    refinements = MAX_REFINEMENTS * (num_neighbours + 1) if num_neighbours else 0
    return CALLS_PER_TRIAL * trials * (num_candidates + refinements) + 1  # the ranks exchange times before the last one


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
        """The time of calls, given the times of all ranks for each: a call takes as long as its slowest rank.

        A call without a time on some rank (NaN) does not count. With less than `fewest` calls the result is NaN.
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


class Step[C](NamedTuple):
    """The candidate of one call, and whether the call is timed."""

    candidate: C
    timed: bool = False


class Selection[C](NamedTuple):
    """The selected candidate, its microseconds and those of the stock path (NaN: not measured), and the reason."""

    candidate: C
    us: float = math.nan
    stock_us: float = math.nan
    reason: Literal["measured", "cached", "modelled", "reverted", "not measured"] = "not measured"


class Search[C: Hashable]:
    """Names the candidate of each call: before a call exchange times and `record` them while `due`, then call `next`.

    Round 0 times all candidates. Each round drops those that surely differ from the best by more than `GAPS` allows,
    and doubles the trials of the rest. The base, at first the stock path, wins ties. A recheck searches again with the
    selected candidate as the base, and reverts to the stock path if that is faster.

    The first of `candidates`, the stock path, runs until something is measured. `cached`, a selection of an earlier run
    or of a model, runs at once. The `neighbours` of a candidate are measured beside it when it wins.
    """

    def __init__(
        self,
        candidates: Sequence[C],
        *,
        cached: Selection[C] | None = None,
        neighbours: Callable[[C], Sequence[C]] = lambda candidate: (),
    ) -> None:
        self._candidates, self._neighbours, self._num_refinements = tuple(candidates), neighbours, 0
        self._order = random.Random(len(candidates))  # the same on all ranks
        self._times: dict[C, Timing] = {}
        self.wanted: tuple[C, ...] = ()
        """The candidates that are being measured: `record` takes their times of the present search. Another search
        begins with candidates that were not wanted before, and after `wanted` was empty."""
        self._steps: list[Step[C]] = []
        self._num_waits = 0
        self._next_recheck: float = (CACHED_RECHECK if cached else FIRST_RECHECK) if len(candidates) > 1 else math.inf
        self.selected = cached or Selection(candidates[0])
        self.measuring = cached is None and len(candidates) > 1
        self.calls = 0
        """Calls so far. Below `free_until` the caller may count a call of the selected candidate here itself."""
        self.free_until: float = 0
        if self.measuring:
            self._begin(self._candidates, len(GAPS))

    @property
    def due(self) -> bool:
        """Whether the ranks have to exchange times before the next call."""
        return bool(self.wanted) and not self._steps

    @property
    def has_selection(self) -> bool:
        """Whether a selection rests on measurements, or none is to come."""
        return not self.measuring or self.selected.reason == "measured"

    @property
    def tried(self) -> tuple[C, ...]:
        """The candidates that were measured, or are being measured."""
        return tuple(dict.fromkeys([*self._candidates, *self._times, *self.wanted]))

    def next(self) -> Step[C]:
        """The step of the next call; `due` must be False."""
        assert not self.due, "times have to be exchanged first"
        if not self.wanted and self.calls >= self._next_recheck:
            self._next_recheck = self.calls + min(LAST_RECHECK, max(FIRST_RECHECK, self.calls))
            others = (each for each in self._candidates if each != self.selected.candidate)
            self._begin([self.selected.candidate, *others], RECHECK_ROUNDS)
        self.calls += 1
        if self._steps:
            return self._steps.pop(0)
        self.free_until = self._next_recheck
        return Step(self.selected.candidate)

    def record(self, times: Sequence[Timing]) -> None:
        """Takes the times of `wanted`, in its order and equal on all ranks; NaN where a rank has none."""
        self._num_waits = self._num_waits + 1 if any(math.isnan(each.us) for each in times) else 0
        if not self._num_waits:
            self._times |= zip(self.wanted, times, strict=True)
            self._end_round()
        elif self._num_waits > MAX_WAITS:  # an output that nothing uses has no backward pass
            self._settle(self.selected)
        else:  # a backward pass has not run yet: more calls before the next exchange
            self._steps = [Step(self.selected.candidate)] * (len(self.wanted) * 2**self._num_waits)

    def _begin(self, candidates: Sequence[C], num_rounds: int) -> None:
        """Begins a search. The selected candidate is its base."""
        self._base, self._round, self._num_rounds, self.free_until = self.selected.candidate, 0, num_rounds, 0
        self._begin_round(candidates)

    def _begin_round(self, alive: Sequence[C]) -> None:
        self.wanted, self._steps = tuple(alive), []
        for _ in range(FIRST_TRIALS << self._round):
            # A random order: no candidate always follows the same one.
            for each in self._order.sample(self.wanted, len(self.wanted)):
                self._steps += [Step(each), Step(each, timed=True)]

    def _end_round(self) -> None:
        selected, times, gap = self._select(), self._times, GAPS[self._round]
        best = times[selected.candidate]
        # The base stays for a second round: the gain that is reported rests on its time.
        stays = {selected.candidate, *([self._base] if self._round == 0 else ())}
        alive = [each for each in self.wanted if each in stays or not times[each].differs(best, gap)]
        if self.measuring and self._round >= PROVISIONAL_ROUND:
            self.selected = selected
        self._round += 1
        if len(alive) > 1 and self._round < self._num_rounds:
            self._begin_round(alive)
            return
        variants = [each for each in self._neighbours(selected.candidate) if each not in times]
        if self.measuring and variants and self._num_refinements < MAX_REFINEMENTS:
            self._num_refinements += 1
            self.selected = selected
            self._begin([selected.candidate, *variants], len(GAPS))
            return
        self._settle(selected)

    def _select(self) -> Selection[C]:
        times, base = self._times, self._base
        best = min((each for each in self.wanted if each != base), key=lambda each: times[each].us)
        # After the last round no more certainty is to come, and a base that left the search was surely slower.
        errors = SURE if base in self.wanted and self._round < len(GAPS) - 1 else LIKELY
        candidate = best if times[base].slower(times[best], MARGIN, errors) else base
        return Selection(candidate, times[candidate].us, times[self._candidates[0]].us, "measured")

    def _settle(self, selected: Selection[C]) -> None:
        before, stock = self.selected, self._candidates[0]
        if not self.measuring and selected.candidate == stock:
            selected = selected._replace(reason="reverted" if before.candidate != stock else before.reason)
        self.selected, self.measuring, self.wanted, self._steps, self._num_waits = selected, False, (), [], 0
