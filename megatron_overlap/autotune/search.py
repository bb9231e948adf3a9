"""Which candidate serves which call of a layer: measured in turn, settled, looked at again. Pure.

Every rank of a group has a `Decider` for the same calls. What it does next follows from nothing but the number of calls
so far and what all ranks have exchanged, and every rank gets the same of both: no rank can ever take another path than
its peers in the same call. See `docs/choice.md`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_overlap.autotune.stats import LIKELY, SURE, Timing

Stage = Literal["first", "second", "third", "settled", "recheck"]

MARGIN = 0.02
"""What is won must be more than this for a candidate to replace the one that serves now: hysteresis."""

RUN = 2
"""Calls of one candidate in a row. The first is not timed: what ran before it has left threads, connections and caches
as it likes, and a path that always serves finds them as it left them itself. More than one timed would say little
more: calls in a row take alike, until others have been at work."""

FIRST_RUNS, SECOND_RUNS, THIRD_RUNS, CHECK_RUNS = 6, 10, 16, 10
MOST_THIRDS = 8
_DROPPED, _CLOSE = 1.2, 1.06
"""What takes so much longer than the best, and that for sure, is out after the first runs, and after the second: long
measurements of what is close cost little, as any of it serves nearly as well."""
SAMPLE_EVERY, WINDOW = 32, 512
FIRST_CHECK, LAST_CHECK = 8192, 32768
_TURNED_SLOWER = 1.25
_MOST_ATTEMPTS = 6
_MOST_REFINEMENTS = 4
_ALL = 2**60


def calls_to_choose(num_candidates: int, num_near: int = 0) -> int:
    """Most calls of a kind until a choice is made, if every pass is measured in time.

    What is too close to be told apart then goes on being measured, for at most `MOST_THIRDS` times its last runs.

    Args:
        num_candidates: measured at first.
        num_near: measured beside the best so far, each time one of them has won.
    """
    runs = FIRST_RUNS + SECOND_RUNS + THIRD_RUNS
    refinements = _MOST_REFINEMENTS * (num_near + 1) if num_near else 0
    return RUN * runs * (num_candidates + refinements)


class Turn(NamedTuple):
    """How one call is served.

    Attributes:
        candidate: number of the candidate.
        timed: whether it is measured.
    """

    candidate: int
    timed: bool = False

    @staticmethod
    def run(candidate: int) -> list[Turn]:
        """Calls in a row to measure a candidate."""
        return [Turn(candidate), *[Turn(candidate, timed=True)] * (RUN - 1)]


@dataclass(frozen=True, slots=True)
class Settled:
    """A choice and the figures it rests on: microseconds, NaN where it was not measured.

    Attributes:
        candidate: number of the candidate.
        us: its time.
        stock_us: time of candidate 0, Megatron's own path.
        why: what it rests on: `measured`, `cached`, `withdrawn`, `model`.
    """

    candidate: int
    us: float = math.nan
    stock_us: float = math.nan
    why: Literal["measured", "cached", "withdrawn", "model"] = "model"


class Decider:
    """Serves calls in turn. Before each call: while `due`, message what was measured and `take` it; then `next`.

    Candidate 0 is Megatron's own path; the others follow in the order of the model, likeliest first.

    Args:
        num_candidates: how many are measured at first, at least one.
        seed: the one that serves where nothing is known yet.
        known: an earlier choice to start from; None measures first.
        near: of some candidates others like them, which are measured when it wins, and so on from the best of them;
            they may have numbers from `num_candidates` on.

    Raises:
        ValueError: there is no candidate `seed`.
    """

    def __init__(
        self,
        num_candidates: int,
        *,
        seed: int,
        known: Settled | None = None,
        near: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        if not 0 <= seed < num_candidates:
            raise ValueError(f"seed: {seed}: there are {num_candidates} candidates")
        self._num = num_candidates
        self._seed = seed
        self._near = dict(near or {})
        self._refinements = 0
        # What others have to beat: Megatron's own path, later the best so far, whose like are measured.
        self._base = 0
        self._again = False
        self._turns: list[Turn] = []
        self._times: dict[int, Timing] = {}
        self._thirds = 0
        self._slower = False
        self._attempts = 0
        self._calls = self._lent = 0
        self.free = 0
        """Coming calls of which is known that they run Megatron's own path, untimed, with nothing to message. A caller
        that has no time serves one so and takes one off here, instead of asking `due` and `next`."""
        self.withdrawals = 0
        self.epoch = 0
        """Counts what is measured apart: samples of another epoch do not belong to the next `take`."""
        self.choice = known if known is not None else Settled(seed)
        self._challenger = max(1, seed) if known is None or known.candidate == 0 else 0
        self._reference = Timing(math.nan if known is None else known.us)
        self._next_check = FIRST_CHECK
        self._since = 0
        self.stage: Stage = "first"
        self._order = random.Random(num_candidates)  # alike on all ranks
        self._alive: tuple[int, ...] = ()
        if known is not None or num_candidates == 1:
            self._settle(self.choice)
        else:
            self._begin("first", FIRST_RUNS, [seed, *(each for each in range(num_candidates) if each != seed)])

    @property
    def calls(self) -> int:
        """How many calls were served."""
        return self._calls + self._lent - self.free

    @property
    def tried(self) -> tuple[int, ...]:
        """Candidates that are or were measured."""
        return tuple(sorted({*range(self._num), *self._times, *self._alive}))

    @property
    def due(self) -> bool:
        """Whether the ranks message what they measured before the next call."""
        if self.stage != "settled":
            return not self._turns
        if self.choice.candidate == 0:
            return self._num > 1 and self.calls >= self._next_check
        return self._since >= WINDOW

    @property
    def wanted(self) -> tuple[int, ...]:
        """Candidates whose times the next `take` is about."""
        if self.stage == "settled":
            return (self.choice.candidate,)
        return self._alive

    def next(self) -> Turn:
        """How the next call is served; `due` must be False."""
        assert not self.due, "measurements have to be exchanged first"
        served = self._lent - self.free
        self._calls += served + 1
        self._since += 1
        self._lent = self.free = 0
        if self.stage != "settled":
            return self._turns.pop(0)
        if self.choice.candidate == 0:
            # There is nothing to withdraw: it is only looked at again in turn.
            self._lent = self.free = self._next_check - self._calls if self._num > 1 else _ALL
            return Turn(0)
        return Turn(self.choice.candidate, timed=self._since % SAMPLE_EVERY == 0)

    def take(self, measured: Sequence[Timing]) -> None:
        """Goes on from what the ranks measured; every rank passes the same.

        Args:
            measured: what each of `wanted` takes all of them, in its order; NaN where some rank has no time of it.
        """
        if self.stage == "settled":
            self._watch(measured[0])
            return
        if any(math.isnan(each.us) for each in measured):
            self._wait()
            return
        times = dict(zip(self.wanted, measured, strict=True))
        if self.stage == "recheck":
            self._recheck(times)
            return
        self._times |= times
        best = min(measured)
        # What was measured so far still counts: the epoch stays.
        if self.stage == "first":
            alive = [c for c, each in times.items() if c == self._base or not each.out(_DROPPED, best)]
            if len(alive) > 1:
                self._begin("second", SECOND_RUNS, alive, fresh=False)
                return
        alive = [c for c, each in times.items() if not each.out(_CLOSE, best)]
        if self.stage == "second" and len(alive) > 1:
            self._begin("third", THIRD_RUNS, alive, fresh=False)
            return
        self._thirds += self.stage == "third"
        choice = self._judge(times | {self._base: self._times[self._base]})
        chosen = self._times[choice.candidate]
        alive = [c for c in alive if c == choice.candidate or times[c].alike(chosen)]
        if 0 < self._thirds < MOST_THIRDS and len(alive) > 1:
            self.choice = choice
            self._begin("third", THIRD_RUNS, alive, fresh=False)
            return
        like = [each for each in self._near.get(choice.candidate, ()) if each not in self._times]
        if like and self._refinements < _MOST_REFINEMENTS:
            self._refine(choice, like)
            return
        self._settle(choice)
        self._reference = chosen

    def _judge(self, times: dict[int, Timing]) -> Settled:
        base, own = self._base, self._times[0].us
        others = {each: time for each, time in times.items() if each != base}
        if not others:
            return Settled(base, times[base].us, own, "measured")
        pick = min(others, key=lambda each: others[each].us)
        if base == 0:
            self._challenger = pick
        # What is not sure by now will not be, and what is no longer measured was slower for sure.
        errors = SURE if base in self._alive and self._thirds < MOST_THIRDS else LIKELY
        if others[pick].wins(MARGIN, times[base], errors):
            return Settled(pick, others[pick].us, own, "measured")
        return Settled(base, times[base].us, own, "measured")

    def _refine(self, choice: Settled, like: Sequence[int]) -> None:
        """Measures what is like the best so far, beside it."""
        self._refinements += 1
        self.choice, self._base, self._thirds = choice, choice.candidate, 0
        self._begin("first", FIRST_RUNS, [choice.candidate, *like])

    def _settle(self, choice: Settled) -> None:
        self.choice = choice
        if choice.candidate != 0:
            self._challenger = 0
        self.stage, self._turns, self._since, self._attempts = "settled", [], 0, 0
        self.epoch += 1

    def _watch(self, now: Timing) -> None:
        """What the serving candidate takes now, against what it took when it was settled."""
        self._since = 0
        self.epoch += 1
        slower = now.out(_TURNED_SLOWER, self._reference)
        # One window may be late by chance.
        turned, self._slower = slower and self._slower, slower
        if math.isnan(self._reference.us):
            self._reference = now
        if turned or self.calls >= self._next_check:
            self._reference, self._slower = Timing(math.nan), False
            self._next_check = self.calls + min(LAST_CHECK, max(FIRST_CHECK, self.calls))
            self._again = False
            self._begin("recheck", CHECK_RUNS, [self.choice.candidate, self._challenger])

    def _recheck(self, times: dict[int, Timing]) -> None:
        now, challenger = self.choice.candidate, self._challenger
        own, least = times[0].us, min(times.values())
        if not self._again and not any(each.out(_CLOSE, least) for each in times.values()):
            self._again = True
            self._begin("recheck", THIRD_RUNS, self._alive, fresh=False)
            return
        if times[challenger].wins(MARGIN, times[now]):
            if challenger == 0:
                self.withdrawals += 1
                self._challenger = now
            self._settle(Settled(challenger, times[challenger].us, own, "withdrawn" if challenger == 0 else "measured"))
        else:
            self._settle(Settled(now, times[now].us, own, self.choice.why if now == 0 else "measured"))

    def _begin(self, stage: Stage, runs: int, alive: Sequence[int], *, fresh: bool = True) -> None:
        self.stage = stage
        self._alive = tuple(alive)
        self._turns = []
        for number in range(runs):
            # None always follows the same one.
            order = self._order.sample(self._alive, len(self._alive)) if number else self._alive
            for each in order:
                self._turns += Turn.run(each)
        self.epoch += fresh

    def _wait(self) -> None:
        """Some rank has no time of something yet, a backward pass that has not come: a little later again."""
        self._attempts += 1
        if self._attempts > _MOST_ATTEMPTS:
            # It never comes (an output that nobody uses): what was known, or the model's word, stands.
            self._settle(
                self.choice if self.stage == "recheck" or self._refinements or self._thirds else Settled(self._seed)
            )
            return
        self._turns = [Turn(self.choice.candidate)] * (len(self.wanted) * 2**self._attempts)
