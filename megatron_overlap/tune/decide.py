"""Which candidate serves which call of a layer: measured in turn, settled, looked at again. Pure.

Every rank of a group has a `Decider` for the same calls. What it does next follows from nothing but the number of calls
so far and what all ranks have exchanged, and every rank gets the same of both: no rank can ever take another path than
its peers in the same call. See `docs/choice.md`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Stage = Literal["warm", "first", "second", "third", "settled", "recheck"]

MARGIN = 0.02
"""What is won must be more than this for a candidate to replace the one that serves now: hysteresis."""

FIRST_ROUNDS, SECOND_ROUNDS, THIRD_ROUNDS, CHECK_ROUNDS = 5, 11, 25, 11
_DROPPED, _CLOSE = 1.2, 1.06
"""What takes so much longer than the best is out after the first rounds, and after the second: long rounds of what is
close cost little, as any of it serves nearly as well."""
# Of those nearly as fast as the fastest the likeliest by the model is taken: the difference is noise.
_ALIKE = 0.01
SAMPLE_EVERY, WINDOW = 8, 128
FIRST_CHECK, LAST_CHECK = 512, 4096
_TURNED_SLOWER = 1.25
_MOST_ATTEMPTS = 6
_MOST_REFINEMENTS = 4


def calls_to_settle(num_candidates: int, num_near: int = 0) -> int:
    """Most calls of a kind until a choice settles, if every pass is measured in time.

    Args:
        num_candidates: measured at first.
        num_near: measured beside the best so far, each time one of them has won.
    """
    rounds = 1 + FIRST_ROUNDS + SECOND_ROUNDS + THIRD_ROUNDS
    refinements = _MOST_REFINEMENTS * (num_near + 1) if num_near else 0
    return rounds * (num_candidates + refinements)


class Turn(NamedTuple):
    """How one call is served.

    Attributes:
        candidate: number of the candidate.
        timed: whether it is measured.
        aligned: whether all ranks start it together, so that nobody's waiting for a late peer is in the figure.
    """

    candidate: int
    timed: bool = False
    aligned: bool = False


@dataclass(frozen=True, slots=True)
class Settled:
    """A choice and the figures it rests on: microseconds, NaN where it was not measured.

    Attributes:
        candidate: number of the candidate.
        us: its time.
        own_us: time of candidate 0, Megatron's own path.
        why: what it rests on: `measured`, `cached`, `withdrawn`, `model`.
    """

    candidate: int
    us: float = math.nan
    own_us: float = math.nan
    why: Literal["measured", "cached", "withdrawn", "model"] = "model"


class Decider:
    """Serves calls in turn. Before each call: while `due`, exchange what was measured and `take` it; then `next`.

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
        self._times: dict[int, float] = {}
        self._attempts = 0
        self.calls = 0
        self.withdrawals = 0
        self.epoch = 0
        """Counts what is measured apart: samples of another epoch do not belong to the next `take`."""
        self.choice = known if known is not None else Settled(seed)
        self._challenger = max(1, seed) if known is None or known.candidate == 0 else 0
        self._reference = math.nan if known is None else known.us
        self._next_check = FIRST_CHECK
        self._since = 0
        self.stage: Stage = "warm"
        self._alive = tuple(range(num_candidates))
        if known is not None or num_candidates == 1:
            self._settle(self.choice)
        else:
            # The first call of a path allocates and connects: not measured.
            others = [each for each in range(num_candidates) if each != seed]
            self._turns = [Turn(each) for each in (seed, *others)]

    @property
    def tried(self) -> tuple[int, ...]:
        """Candidates that are or were measured."""
        return tuple(sorted({*range(self._num), *self._times, *self._alive}))

    @property
    def due(self) -> bool:
        """Whether the ranks exchange what they measured before the next call."""
        if self.stage == "settled":
            return self._num > 1 and self._since >= WINDOW
        return not self._turns and self.stage != "warm"

    @property
    def wanted(self) -> tuple[int, ...]:
        """Candidates whose times the next `take` is about."""
        if self.stage == "settled":
            return (self.choice.candidate,)
        return self._alive

    def next(self) -> Turn:
        """How the next call is served; `due` must be False."""
        assert not self.due, "measurements have to be exchanged first"
        self.calls += 1
        if self.stage == "settled":
            self._since += 1
            return Turn(self.choice.candidate, timed=self._num > 1 and self._since % SAMPLE_EVERY == 0)
        if self.stage == "warm" and not self._turns:
            self._begin("first", FIRST_ROUNDS, self._alive)
        return self._turns.pop(0)

    def serves_own(self) -> bool:
        """Counts the next call and says True, if it runs Megatron's own path, untimed, with nothing to ask or exchange.

        The same as `due` and `next`, for callers that have no time.
        """
        if self.stage != "settled" or self.choice.candidate != 0:
            return False
        if self._num > 1:
            if self._since >= WINDOW or (self._since + 1) % SAMPLE_EVERY == 0:
                return False
            self._since += 1
        self.calls += 1
        return True

    def take(self, by_rank: Sequence[Sequence[float]]) -> None:
        """Goes on from what all ranks measured; every rank passes the same.

        Args:
            by_rank: of each rank the time of each of `wanted`, in its order; NaN where it has none.
        """
        # The slowest rank counts; max() would drop a NaN that is not first.
        worst = [
            math.nan if any(math.isnan(rank[index]) for rank in by_rank) else max(rank[index] for rank in by_rank)
            for index in range(len(self.wanted))
        ]
        if self.stage == "settled":
            self._watch(worst[0])
            return
        if any(map(math.isnan, worst)):
            self._wait()
            return
        times = dict(zip(self.wanted, worst, strict=True))
        if self.stage == "recheck":
            self._recheck(times)
            return
        self._times |= times
        best = min(worst)
        # What was measured so far still counts: the epoch stays.
        if self.stage == "first":
            alive = [each for each, us in times.items() if each == self._base or us <= _DROPPED * best]
            if len(alive) > 1:
                self._begin("second", SECOND_ROUNDS, alive, fresh=False)
                return
        if self.stage == "second":
            alive = [each for each, us in times.items() if us <= _CLOSE * best]
            if len(alive) > 1:
                self._begin("third", THIRD_ROUNDS, alive, fresh=False)
                return
        choice = self._judge(times | {self._base: self._times[self._base]})
        like = [each for each in self._near.get(choice.candidate, ()) if each not in self._times]
        if like and self._refinements < _MOST_REFINEMENTS:
            self._refine(choice, like)
            return
        self._settle(choice)
        self._reference = self.choice.us

    def _judge(self, times: dict[int, float]) -> Settled:
        base, own = self._base, self._times[0]
        others = {each: us for each, us in times.items() if each != base}
        if not others:
            return Settled(base, times[base], own, "measured")
        fastest = min(others.values())
        pick = min(each for each, us in others.items() if us <= (1 + _ALIKE) * fastest)
        if base == 0:
            self._challenger = pick
        if others[pick] < (1 - MARGIN) * times[base]:
            return Settled(pick, others[pick], own, "measured")
        return Settled(base, times[base], own, "measured")

    def _refine(self, choice: Settled, like: Sequence[int]) -> None:
        """Measures what is like the best so far, beside it."""
        self._refinements += 1
        self.choice, self._base = choice, choice.candidate
        self.stage, self._alive = "warm", (choice.candidate, *like)
        self._turns = [Turn(each) for each in like]
        self.epoch += 1

    def _settle(self, choice: Settled) -> None:
        self.choice = choice
        if choice.candidate != 0:
            self._challenger = 0
        self.stage, self._turns, self._since, self._attempts = "settled", [], 0, 0
        self.epoch += 1

    def _watch(self, us: float) -> None:
        """What the serving candidate takes now, against what it took when it was settled."""
        self._since = 0
        self.epoch += 1
        turned = not math.isnan(us) and us > _TURNED_SLOWER * self._reference
        if math.isnan(self._reference):
            self._reference = us
        if turned or self.calls >= self._next_check:
            self._reference = math.nan
            self._next_check = self.calls + min(LAST_CHECK, max(FIRST_CHECK, self.calls))
            pair = [self.choice.candidate, self._challenger]
            self._again = False
            self._begin("recheck", CHECK_ROUNDS, pair)
            # The challenger has not run for long: its first call is not measured.
            self._turns.insert(0, Turn(self._challenger))

    def _recheck(self, times: dict[int, float]) -> None:
        now, challenger = self.choice.candidate, self._challenger
        own = times[0]
        if max(times.values()) <= _CLOSE * min(times.values()) and not self._again:
            self._again = True
            self._begin("recheck", THIRD_ROUNDS, self._alive, fresh=False)
            return
        if times[challenger] < (1 - MARGIN) * times[now]:
            if challenger == 0:
                self.withdrawals += 1
                self._challenger = now
            self._settle(Settled(challenger, times[challenger], own, "withdrawn" if challenger == 0 else "measured"))
        else:
            self._settle(Settled(now, times[now], own, self.choice.why if now == 0 else "measured"))

    def _begin(self, stage: Stage, rounds: int, alive: Sequence[int], *, fresh: bool = True) -> None:
        self.stage = stage
        self._alive = tuple(alive)
        self._turns = []
        for number in range(rounds):
            shift = number % len(self._alive)
            order = self._alive[shift:] + self._alive[:shift]
            self._turns += [Turn(each, timed=True, aligned=True) for each in order]
        self.epoch += fresh

    def _wait(self) -> None:
        """Some rank has no time of something yet, a backward pass that has not come: a little later again."""
        self._attempts += 1
        if self._attempts > _MOST_ATTEMPTS:
            # It never comes (an output that nobody uses): what was known, or the model's word, stands.
            self._settle(self.choice if self.stage == "recheck" or self._refinements else Settled(self._seed))
            return
        self._turns = [Turn(self.choice.candidate)] * (len(self.wanted) * 2**self._attempts)
