"""Successive halving over the candidates of one kind of call. Pure.

Every rank of a group has a `Search` for the same calls. Its next step depends only on the number of calls and on times
that all ranks exchanged. Both are equal on every rank, so all ranks run each call with the same candidate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, NamedTuple

from megatron_overlap.autotune.stats import LIKELY, SURE, Timing

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

TIMED_EVERY, WINDOW = 32, 512
FIRST_RECHECK, LAST_RECHECK = 8192, 32768
TURNED_SLOWER = 0.25
MAX_WAITS = 6


def calls_to_select(num_candidates: int, num_neighbours: int = 0) -> int:
    """Calls of a kind within which the search has a selection, if every trial is timed in time.

    Args:
        num_candidates: candidates of the first round.
        num_neighbours: neighbours of each candidate that may be selected.
    """
    trials = sum(FIRST_TRIALS << number for number in range(PROVISIONAL_ROUND + 1))
    refinements = MAX_REFINEMENTS * (num_neighbours + 1) if num_neighbours else 0
    return CALLS_PER_TRIAL * trials * (num_candidates + refinements) + 1  # the ranks exchange times before the last one


class Step[C](NamedTuple):
    """The candidate of one call, and whether the call is timed."""

    candidate: C
    timed: bool = False


class Selection[C](NamedTuple):
    """The selected candidate, its microseconds and those of the stock path (NaN: not measured), and the reason."""

    candidate: C
    us: float = math.nan
    stock_us: float = math.nan
    reason: Literal["measured", "cached", "reverted", "not measured"] = "not measured"


class Search[C: Hashable]:
    """Names the candidate of each call: before a call exchange times and `record` them while `due`, then call `next`.

    Round 0 times all candidates. Each round drops those that surely differ from the best by more than `GAPS` allows,
    and doubles the trials of the rest. The base, at first the stock path, wins ties. A recheck searches again with the
    selected candidate as the base: after 8192 calls, then after twice as many, and earlier if that turned slower. A
    recheck that finds the stock path faster reverts to it.

    Args:
        candidates: of round 0; the first is the stock path, which runs until something is measured.
        cached: a selection of an earlier run. It runs at once and is rechecked after `WINDOW` calls.
        neighbours: variants of a candidate, measured beside it when it wins.
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
        self._alive: tuple[C, ...] = ()
        self._steps: list[Step[C]] = []
        self._num_waits = self._window_start = 0
        self._next_recheck: float = (WINDOW if cached else FIRST_RECHECK) if len(candidates) > 1 else math.inf
        self._slower = False
        self.selected = cached or Selection(candidates[0])
        self._reference = Timing(self.selected.us)
        self.measuring = cached is None and len(candidates) > 1
        self.calls = 0
        """Calls so far. The caller of a stock-path call counts it here itself instead of calling `next`, as long as
        `calls` is below `free_until`: no such call is timed or needs an exchange."""
        self.free_until: float = 0
        self.epoch = 0
        """Times of another epoch do not belong to the next `record`."""
        if self.measuring:
            self._begin(self._candidates, len(GAPS))

    @property
    def due(self) -> bool:
        """Whether the ranks have to exchange times before the next call."""
        if self._alive:
            return not self._steps
        if self.selected.candidate == self._candidates[0]:
            return self.calls >= self._next_recheck
        return self.calls - self._window_start >= WINDOW

    @property
    def wanted(self) -> tuple[C, ...]:
        """The candidates whose times the next `record` takes."""
        return self._alive or (self.selected.candidate,)

    @property
    def tried(self) -> tuple[C, ...]:
        """The candidates that were measured, or are being measured."""
        return tuple(dict.fromkeys([*self._candidates, *self._times, *self._alive]))

    def next(self) -> Step[C]:
        """The step of the next call; `due` must be False."""
        assert not self.due, "times have to be exchanged first"
        self.calls += 1
        if self._steps:
            return self._steps.pop(0)
        if self.selected.candidate == self._candidates[0]:
            self.free_until = self._next_recheck
            return Step(self._candidates[0])
        timed = (self.calls - self._window_start) % TIMED_EVERY == 0
        return Step(self.selected.candidate, timed)

    def record(self, times: Sequence[Timing]) -> None:
        """Takes the times of `wanted`, in its order and equal on all ranks; NaN where a rank has none."""
        if not self._alive:
            self._watch(times[0])
        elif any(math.isnan(each.us) for each in times):
            self._wait()
        else:
            self._num_waits = 0
            self._times |= zip(self._alive, times, strict=True)
            self._end_round()

    def _begin(self, candidates: Sequence[C], num_rounds: int) -> None:
        """Begins a search. The selected candidate is its base."""
        self._base, self._round, self._num_rounds, self.free_until = self.selected.candidate, 0, num_rounds, 0
        self.epoch += 1
        self._begin_round(candidates)

    def _begin_round(self, alive: Sequence[C]) -> None:
        self._alive, self._steps = tuple(alive), []
        for _ in range(FIRST_TRIALS << self._round):
            # A random order: no candidate always follows the same one.
            for each in self._order.sample(self._alive, len(self._alive)):
                self._steps += [Step(each), Step(each, timed=True)]

    def _end_round(self) -> None:
        selected, times, gap = self._select(), self._times, GAPS[self._round]
        best = times[selected.candidate]
        # The base stays for a second round: the gain that is reported rests on its time.
        stays = {selected.candidate, *([self._base] if self._round == 0 else ())}
        alive = [each for each in self._alive if each in stays or not times[each].differs(best, gap)]
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
        best = min((each for each in self._alive if each != base), key=lambda each: times[each].us)
        # After the last round no more certainty is to come, and a base that left the search was surely slower.
        errors = SURE if base in self._alive and self._round < len(GAPS) - 1 else LIKELY
        candidate = best if times[base].slower(times[best], MARGIN, errors) else base
        return Selection(candidate, times[candidate].us, times[self._candidates[0]].us, "measured")

    def _settle(self, selected: Selection[C]) -> None:
        before, stock = self.selected, self._candidates[0]
        if not self.measuring and selected.candidate == stock:
            selected = selected._replace(reason="reverted" if before.candidate != stock else before.reason)
        self._reference, self._slower = self._times.get(selected.candidate, Timing(math.nan)), False
        self.selected, self.measuring, self._alive, self._steps = selected, False, (), []
        self._num_waits, self._window_start = 0, self.calls
        self.epoch += 1

    def _watch(self, now: Timing) -> None:
        """Compares the selected candidate with its time when it was selected."""
        self._window_start = self.calls
        self.epoch += 1
        # Two windows in a row: one may be slow by chance.
        slower = now.slower(self._reference, TURNED_SLOWER)
        turned, self._slower = slower and self._slower, slower
        if math.isnan(self._reference.us):
            self._reference = now
        if turned or self.calls >= self._next_recheck:
            self._next_recheck = self.calls + min(LAST_RECHECK, max(FIRST_RECHECK, self.calls))
            others = (each for each in self._candidates if each != self.selected.candidate)
            self._begin([self.selected.candidate, *others], RECHECK_ROUNDS)

    def _wait(self) -> None:
        """A backward pass has not run yet: runs more calls before the next exchange."""
        self._num_waits += 1
        if self._num_waits > MAX_WAITS:  # an output that nothing uses has no backward pass
            self._settle(self.selected)
            return
        self._steps = [Step(self.selected.candidate)] * (len(self._alive) * 2**self._num_waits)
