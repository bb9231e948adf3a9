"""The search over candidates: equal on every rank, steady against noise, and able to revert."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.autotune.search import (
    CACHED_RECHECK,
    CALLS_PER_TRIAL,
    FIRST_RECHECK,
    FIRST_TRIALS,
    GAPS,
    LAST_RECHECK,
    MAX_WAITS,
    PROVISIONAL_ROUND,
    RECHECK_ROUNDS,
    Search,
    Selection,
    Step,
    Timing,
    calls_to_select,
)

Clock = Callable[[int, int, int], float]
"""Microseconds of a candidate in call number n on a rank."""

NOT_YET = Timing(math.nan)
STOCK = 0
TRIALS = [FIRST_TRIALS * (2 ** (number + 1) - 1) for number in range(len(GAPS))]
"""Timed calls of a candidate up to the end of each round."""


def drive(
    search: Search[int],
    calls: int,
    clock: Clock,
    ranks: int = 2,
    missing: float = 0.0,
    *,
    never_timed: Sequence[int] = (),
    free: bool = False,
    trials: Counter[int] | None = None,
) -> list[Step[int]]:
    """Runs calls as a group of ranks would, which exchange the times that each measured.

    Args:
        search: of all ranks.
        calls: how many.
        clock: the time of a call.
        ranks: of the group.
        missing: probability that an exchange lacks the times of a candidate.
        never_timed: candidates whose times are always missing.
        free: whether to skip `next` while `free_until` allows it.
        trials: counts the timed calls of each candidate.
    """
    steps: list[Step[int]] = []
    times: dict[int, list[list[float]]] = {}  # by candidate, call and rank
    noise = random.Random(5)
    for _ in range(calls):
        if free and search.calls < search.free_until:
            search.calls += 1
            steps.append(Step(STOCK))
            continue
        while search.due:
            wanted = search.wanted
            known = [c in times and noise.random() >= missing and c not in never_timed for c in search.wanted]
            search.record(
                [Timing.slowest(times[c], 1) if k else NOT_YET for c, k in zip(search.wanted, known, strict=True)]
            )
            if not search.wanted or not {*search.wanted} <= {*wanted}:
                times = {}
        step = search.next()
        if step.timed:
            times.setdefault(step.candidate, []).append(
                [clock(step.candidate, search.calls, rank) for rank in range(ranks)]
            )
            if trials is not None:
                trials[step.candidate] += 1
        steps.append(step)
    return steps


def steady(*times: float) -> Clock:
    return lambda candidate, call, rank: times[candidate]


def noisy(*times: float, seed: int, spread: float) -> Clock:
    """Independent noise on each rank: many calls are a little late, some are very late."""
    noise = random.Random(seed)
    return lambda candidate, call, rank: times[candidate] * (1 + spread * noise.gammavariate(1.5, 0.5))


def new(num_candidates: int, cached: Selection[int] | None = None) -> Search[int]:
    return Search(range(num_candidates), cached=cached)


def test_the_fastest_is_selected_with_its_times() -> None:
    search = new(4)
    steps = drive(search, 150, steady(100, 90, 60, 200))
    assert search.selected == Selection(2, 60, 100, "measured")
    runs = Counter(step.candidate for step in steps)
    # Dropped after the first round, because it never catches up.
    assert runs[1] == runs[3] == CALLS_PER_TRIAL * FIRST_TRIALS
    assert runs[2] > 80


def test_the_slowest_rank_counts() -> None:
    search = new(3)
    drive(search, 200, lambda candidate, call, rank: (100, 50 if rank == 0 else 150, 80)[candidate])
    assert search.selected.candidate == 2


@pytest.mark.parametrize(("stock", "selected"), [(100.0, 0), (101.9, 0), (102.1, 1)])
def test_the_stock_path_wins_ties_within_the_margin(stock: float, selected: int) -> None:
    search = new(2)
    drive(search, CALLS_PER_TRIAL * TRIALS[-1] * 2 + 1, steady(stock, 100))
    assert not search.measuring
    assert search.selected.candidate == selected


def test_the_fastest_is_selected_even_if_others_are_close() -> None:
    search = new(4)
    drive(search, CALLS_PER_TRIAL * TRIALS[-1] * 4, steady(200, 100, 99.2, 99.1))
    assert search.selected == Selection(3, 99.1, 200, "measured")


def test_each_round_drops_what_is_slower_by_the_gap_of_the_round() -> None:
    search = new(6)
    trials: Counter[int] = Counter()
    drive(search, CALLS_PER_TRIAL * TRIALS[-1] * 6, steady(300, 130, 115, 107, 104, 100), trials=trials)
    # The stock path is the base, which stays for a second round.
    assert trials == {0: TRIALS[1], 1: TRIALS[0], 2: TRIALS[1], 3: TRIALS[2], 4: TRIALS[3], 5: TRIALS[3]}
    assert search.selected == Selection(5, 100, 300, "measured")


def test_a_trial_is_an_untimed_and_a_timed_call_in_random_order() -> None:
    search = new(3)
    steps = drive(search, CALLS_PER_TRIAL * FIRST_TRIALS * 3, steady(100, 95, 90))
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        assert (first.candidate, first.timed, second.timed) == (second.candidate, False, True)
    order = [step.candidate for step in steps[::2]]
    assert Counter(order) == {0: FIRST_TRIALS, 1: FIRST_TRIALS, 2: FIRST_TRIALS}
    before = {each: {one for one, next_one in pairwise(order) if next_one == each} - {each} for each in (0, 1, 2)}
    assert before == {0: {1, 2}, 1: {0, 2}, 2: {0, 1}}, "no candidate always follows the same one"


def test_noise_never_selects_a_candidate_that_is_a_tenth_slower() -> None:
    """Single calls differ by half. Medians alone would select candidate 1 by chance."""
    for seed in range(150):
        search = new(3)
        drive(search, 900, noisy(100, 110, 115, seed=seed, spread=0.7))
        assert search.selected.candidate == STOCK, seed


def test_noise_does_not_hide_what_is_clearly_faster() -> None:
    selected: Counter[int] = Counter()
    for seed in range(100):
        search = new(3)
        drive(search, 900, noisy(100, 80, 95, seed=seed, spread=0.7))
        selected[search.selected.candidate] += 1
    assert selected[1] >= 99


def test_what_is_too_close_is_measured_to_the_last_round_with_a_provisional_selection() -> None:
    search = new(3)
    trials: Counter[int] = Counter()
    drive(search, 1500, noisy(200, 100, 100.5, seed=1, spread=0.4), trials=trials)
    assert trials[1] == trials[2] == TRIALS[-1]
    early = new(3)
    drive(early, calls_to_select(3), noisy(200, 100, 100.5, seed=1, spread=0.4))
    assert early.measuring
    assert early.selected.reason == "measured", "a run that ends here has a selection to cache"


def record_times(search: Search[int], times: dict[int, Timing], exchanges: int) -> None:
    """Runs calls through so many exchanges in which all ranks have `times`."""
    for _ in range(exchanges):
        while not search.due:
            search.next()
        search.record([times.get(each, NOT_YET) for each in search.wanted])


@pytest.mark.parametrize(("us", "selected"), [(97.0, 0), (94.0, 1)])
def test_after_the_last_round_one_standard_error_is_enough(us: float, selected: int) -> None:
    search = new(2)
    times = {0: Timing(100, 3), 1: Timing(us, 3)}
    record_times(search, times, len(GAPS) - 1)
    assert (search.measuring, search.selected.candidate) == (True, STOCK)
    record_times(search, times, 1)
    assert (search.measuring, search.selected.candidate) == (False, selected)


def test_a_stock_path_that_was_dropped_does_not_return_with_larger_errors() -> None:
    """The base left the search as surely slower; the error of the fastest grows afterwards."""
    search = new(3)
    record_times(search, {0: Timing(120, 4), 1: Timing(100, 2), 2: Timing(101, 2)}, 2)
    assert search.wanted == (1, 2)
    larger_errors = {1: Timing(100, 15), 2: Timing(101, 15)}
    record_times(search, larger_errors, 1)
    assert (search.measuring, search.selected.candidate) == (True, 1)
    record_times(search, larger_errors, len(GAPS) - 3)
    assert (search.measuring, search.selected.candidate) == (False, 1)


def test_a_provisional_selection_stands_if_nothing_more_can_be_timed() -> None:
    search = new(3)
    record_times(search, {0: Timing(200, 2), 1: Timing(110, 5), 2: Timing(104, 5)}, PROVISIONAL_ROUND + 1)
    assert (search.measuring, search.selected.candidate) == (True, 2)
    record_times(search, {}, MAX_WAITS + 1)
    assert (search.measuring, search.selected.candidate) == (False, 2)


def test_if_all_are_far_slower_than_the_stock_path_one_round_is_enough() -> None:
    search = new(3)
    steps = drive(search, 60, steady(50, 100, 100))
    assert search.selected.candidate == STOCK
    compared = 3 * CALLS_PER_TRIAL * FIRST_TRIALS
    assert {step.candidate for step in steps[compared:]} == {STOCK}


def test_a_single_candidate_is_never_timed_or_exchanged() -> None:
    search = new(1)
    steps = drive(search, 3 * FIRST_RECHECK, steady(1))
    assert set(steps) == {Step(STOCK)}


def test_a_cached_selection_runs_at_once_untimed_and_is_soon_rechecked() -> None:
    for stock, later in ((100, 2), (40, STOCK)):
        search = new(3, Selection(2, 60, 100, "cached"))
        steps = drive(search, CACHED_RECHECK, steady(stock, 90, 60))
        assert {*steps} == {Step(2)}
        assert search.selected.reason == "cached"
        drive(search, 300, steady(stock, 90, 60))
        assert search.selected.candidate == later


def test_a_cached_stock_path_is_replaced_by_what_is_faster_now() -> None:
    search = new(3, Selection(STOCK, 100, 100, "cached"))
    drive(search, CACHED_RECHECK + 300, steady(100, 90, 60))
    assert search.selected == Selection(2, 60, 100, "measured")


def test_a_selection_that_turned_slower_is_reverted_by_a_recheck() -> None:
    search = new(3)
    drive(search, 200, steady(100, 90, 60))
    assert search.selected.candidate == 2
    steps = drive(search, FIRST_RECHECK + 100, steady(100, 110, 160))
    assert search.selected == Selection(STOCK, 100, 100, "reverted")
    assert [step.candidate for step in steps[-20:]] == [STOCK] * 20


def test_a_machine_that_turned_slower_as_a_whole_reverts_nothing() -> None:
    search = new(3)
    drive(search, 200, steady(100, 90, 60))
    drive(search, FIRST_RECHECK + 100, steady(200, 180, 120))
    assert search.selected == Selection(2, 120, 200, "measured")


def test_a_recheck_finds_slow_drift_and_what_was_reverted_can_return() -> None:
    search = new(2)
    drive(search, 200, steady(100, 60))
    drive(search, 3 * FIRST_RECHECK, lambda candidate, call, rank: 100 if candidate == 0 else 60 + call / 160)
    assert (search.selected.candidate, search.selected.reason) == (STOCK, "reverted")
    drive(search, 18 * FIRST_RECHECK, steady(100, 60))
    assert search.selected.candidate == 1


def test_a_recheck_measures_all_candidates_and_drops_the_slow_ones_first() -> None:
    search = new(3)
    drive(search, 200, steady(50, 100, 70))
    trials: Counter[int] = Counter()
    drive(search, FIRST_RECHECK + 500, steady(50, 100, 20), trials=trials)
    assert search.selected.candidate == 2
    assert trials == {0: TRIALS[1], 1: TRIALS[0], 2: TRIALS[1]}


def test_a_recheck_keeps_its_selection_within_the_margin() -> None:
    for other, selected in ((98.5, 1), (97.0, 2)):
        search = new(3, Selection(1, 100, 200, "cached"))
        drive(search, FIRST_RECHECK, steady(200, 100, other))
        assert search.selected.candidate == selected


def test_rechecks_come_after_twice_as_many_calls_up_to_a_limit() -> None:
    search = new(2)
    begun, comparing = [], True
    for number in range(6 * LAST_RECHECK):
        drive(search, 1, steady(50, 100))
        if len(search.wanted) > 1 and not comparing:
            begun.append(number)
        comparing = len(search.wanted) > 1
    gaps = [later - earlier for earlier, later in pairwise([0, *begun])]
    assert gaps[:2] == pytest.approx([FIRST_RECHECK, FIRST_RECHECK], abs=100)
    assert gaps[2] == pytest.approx(2 * FIRST_RECHECK, abs=100)
    assert gaps[4:] == pytest.approx([LAST_RECHECK] * len(gaps[4:]), abs=100)


NEIGHBOURS = {2: (3, 4), 3: (2, 5), 4: (2, 5), 5: (3, 4)}


def with_neighbours() -> Search[int]:
    return Search(range(3), neighbours=lambda each: NEIGHBOURS.get(each, ()))


def test_the_neighbours_of_a_winner_are_measured_beside_it() -> None:
    """Candidate 2 wins at first; its neighbour 3 is faster; 5, a neighbour of 3, is faster still; 4 never helps."""
    search = with_neighbours()
    steps = drive(search, calls_to_select(3, 2), steady(100, 90, 80, 70, 85, 60))
    assert search.selected == Selection(5, 60, 100, "measured")
    assert search.tried == (0, 1, 2, 3, 4, 5)
    first = [next(step for step in steps if step.candidate == each) for each in range(6)]
    assert not any(step.timed for step in first)
    assert steps.index(first[3]) > max(number for number, step in enumerate(steps) if step.candidate == 1)
    assert {step.candidate for step in steps[-20:]} == {5}


def test_neighbours_are_not_measured_if_another_candidate_wins() -> None:
    search = with_neighbours()
    steps = drive(search, 300, steady(100, 60, 80, 10, 10, 10))
    assert search.selected.candidate == 1
    assert {step.candidate for step in steps} == {0, 1, 2} == {*search.tried}


def test_a_neighbour_must_win_by_more_than_the_margin() -> None:
    search = with_neighbours()
    drive(search, 2 * calls_to_select(3, 2), steady(100, 90, 80, 79, 79, 10))
    assert search.selected == Selection(2, 80, 100, "measured")
    assert 5 not in search.tried


def test_if_neighbours_are_never_timed_the_winner_stays() -> None:
    search = with_neighbours()
    drive(search, 3 * calls_to_select(3, 2), steady(100, 90, 80, 70, 70), never_timed=(3, 4, 5))
    assert (search.selected.candidate, search.measuring) == (2, False)


@pytest.mark.parametrize("num_neighbours", [0, 2])
def test_a_selection_needs_no_more_calls_than_it_says(num_neighbours: int) -> None:
    search = with_neighbours() if num_neighbours else new(3)
    drive(search, calls_to_select(3, num_neighbours), steady(100, 90, 80, 70, 75, 60))
    assert not search.measuring


def test_missing_times_are_waited_for() -> None:
    search = new(2)
    while not search.due:
        search.next()
    assert search.wanted == (0, 1)
    search.record([Timing(50.0), NOT_YET])
    assert not search.due
    while not search.due:
        assert search.next() == Step(STOCK)
    search.record([Timing(50.0), Timing(50.0)])
    steps = [search.next() for _ in range(2 * CALLS_PER_TRIAL * 2 * FIRST_TRIALS)]
    assert search.due
    assert {step.candidate for step in steps} == {0, 1}, "the second round"


def test_a_late_backward_pass_is_waited_for_and_one_that_never_runs_is_not() -> None:
    search = new(3)
    drive(search, 400, steady(100, 60, 80), missing=0.3)
    assert search.selected == Selection(1, 60, 100, "measured")
    never = new(3)
    steps = drive(never, 600, steady(100, 60, 80), missing=1.0)
    assert math.isnan(never.selected.us)
    assert (never.measuring, never.selected.reason) == (False, "not measured")
    assert {step.candidate for step in steps[100:]} == {STOCK}


def random_timing(noise: random.Random, spread: float) -> Timing:
    return Timing(100 * noise.uniform(1, spread), noise.choice([0.0, 5.0, 50.0]))


@settings(max_examples=60)
@given(
    candidates=st.integers(1, 5),
    ranks=st.integers(1, 4),
    noise=st.randoms(use_true_random=False),
    cached=st.booleans(),
    missing=st.sampled_from([0.0, 0.4]),
)
def test_all_ranks_take_the_same_steps(
    candidates: int, ranks: int, noise: random.Random, cached: bool, missing: float
) -> None:
    """For any times: all ranks run the same candidate in every call and exchange before the same calls."""
    start = Selection(candidates - 1, 50.0, 60.0, "cached") if cached else None
    searches = [new(candidates, start) for _ in range(ranks)]
    for _ in range(900):
        while any(search.due for search in searches):
            assert all(search.due for search in searches)
            assert len({search.wanted for search in searches}) == 1
            spread = noise.choice([1.02, 4.0])
            times = [NOT_YET if noise.random() < missing else random_timing(noise, spread) for _ in searches[0].wanted]
            for search in searches:
                search.record(list(times))
        steps = {search.next() for search in searches}
        assert len(steps) == 1
        assert 0 <= steps.pop().candidate < candidates


@pytest.mark.parametrize("candidates", [1, 3])
def test_free_calls_count_like_others(candidates: int) -> None:
    """Two searches select the stock path; one skips `next` where that is allowed."""
    many = 2 * FIRST_RECHECK + 500
    clock = steady(*(50.0 + 12 * each for each in range(candidates)))
    through_next, skipping = new(candidates), new(candidates)
    steps = drive(skipping, many, clock, free=True)
    assert steps == drive(through_next, many, clock)
    assert skipping.calls == through_next.calls == many
    assert skipping.selected == through_next.selected
    # Two rechecks: each drops the others after the first round.
    timed = sum(step.timed for step in steps[FIRST_RECHECK:])
    assert timed == (0 if candidates == 1 else 2 * FIRST_TRIALS * candidates)
    assert skipping.free_until > many
    assert skipping.free_until <= many + LAST_RECHECK or candidates == 1


def test_rechecks_have_fewer_rounds_than_the_first_search() -> None:
    search = new(2, Selection(1, 100, 100, "cached"))
    trials: Counter[int] = Counter()
    drive(search, FIRST_RECHECK, noisy(100, 100, seed=3, spread=0.2), trials=trials)
    assert trials == {0: TRIALS[RECHECK_ROUNDS - 1], 1: TRIALS[RECHECK_ROUNDS - 1]}
