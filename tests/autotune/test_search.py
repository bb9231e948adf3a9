"""Decisions from what all ranks have exchanged: alike on every rank, steady against noise, and taken back."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.autotune.search import (
    CHECK_RUNS,
    FIRST_CHECK,
    FIRST_RUNS,
    LAST_CHECK,
    MOST_THIRDS,
    RUN,
    SECOND_RUNS,
    THIRD_RUNS,
    WINDOW,
    Decider,
    Settled,
    Turn,
    calls_to_choose,
)
from megatron_overlap.autotune.stats import Timing

Clock = Callable[[int, int, int], float]
"""Microseconds of a candidate in call number n on a rank."""

NOT_YET = Timing(math.nan)
TIMED = RUN - 1


def drive(
    decider: Decider,
    calls: int,
    clock: Clock,
    ranks: int = 2,
    missing: float = 0.0,
    *,
    never: int | None = None,
    short: bool = False,
    timed: Counter[int] | None = None,
) -> list[Turn]:
    """Serves calls as a group of ranks would, which message what each measured. `short`: by the short way
    where that is open. From candidate `never` on none has a time. `timed` counts what was measured of each."""
    turns: list[Turn] = []
    times: dict[int, list[list[float]]] = {}  # of each candidate, of each call, of each rank
    epoch = decider.epoch
    noise = random.Random(5)
    for _ in range(calls):
        if short and decider.free:
            decider.free -= 1
            turns.append(Turn(0))
            continue
        while decider.due:
            known = [
                c if c in times and noise.random() >= missing and (never is None or c < never) else None
                for c in decider.wanted
            ]
            decider.take([NOT_YET if c is None else Timing.slowest(times[c], 1) for c in known])
            if decider.epoch != epoch:
                epoch, times = decider.epoch, {}
        turn = decider.next()
        if turn.timed:
            call = [clock(turn.candidate, decider.calls, rank) for rank in range(ranks)]
            times.setdefault(turn.candidate, []).append(call)
            if timed is not None and decider.stage != "settled":
                timed[turn.candidate] += 1
        turns.append(turn)
    return turns


def steady(*times: float) -> Clock:
    return lambda candidate, call, rank: times[candidate]


def test_the_fastest_serves_and_the_figures_are_kept() -> None:
    decider = Decider(4, seed=1)
    turns = drive(decider, 100, steady(100, 90, 60, 200))
    assert decider.choice == Settled(2, 60, 100, "measured")
    served = Counter(turn.candidate for turn in turns)
    # After the first runs it is out: it never catches up.
    assert served[3] == RUN * FIRST_RUNS
    assert served[2] > 40
    assert turns[0] == Turn(1), "before anything is measured the model's word counts"


def test_the_slowest_rank_counts() -> None:
    decider = Decider(3, seed=1)
    drive(decider, 80, lambda candidate, call, rank: (100, 50 if rank == 0 else 150, 80)[candidate])
    assert decider.choice.candidate == 2


@pytest.mark.parametrize(("own", "chosen"), [(100.0, 0), (101.9, 0), (102.1, 1)])
def test_megatrons_own_path_stays_unless_more_than_noise_is_won(own: float, chosen: int) -> None:
    decider = Decider(2, seed=1)
    drive(decider, calls_to_choose(2) + 1, steady(own, 100))
    assert decider.choice.candidate == chosen


def test_the_fastest_is_taken_however_close() -> None:
    decider = Decider(4, seed=1)
    drive(decider, calls_to_choose(4), steady(200, 100, 99.2, 99.1))
    assert decider.choice == Settled(3, 99.1, 200, "measured")


def test_long_measurements_are_for_what_is_close() -> None:
    """1 and 3 are within 6 % of each other, 2 within 20 %, Megatron's own is far slower and yet measured."""
    decider = Decider(4, seed=1)
    timed: Counter[int] = Counter()
    drive(decider, calls_to_choose(4), steady(200, 99.5, 110, 100), timed=timed)
    short, long = TIMED * (FIRST_RUNS + SECOND_RUNS), TIMED * (FIRST_RUNS + SECOND_RUNS + THIRD_RUNS)
    assert timed == {0: short, 2: short, 1: long, 3: long}
    assert decider.choice == Settled(1, 99.5, 200, "measured")


def test_the_first_call_of_a_run_is_not_timed() -> None:
    decider = Decider(3, seed=1)
    turns = drive(decider, RUN * FIRST_RUNS * 3, steady(100, 90, 80))
    for start in range(0, len(turns), RUN):
        assert turns[start : start + RUN] == Turn.run(turns[start].candidate)
    assert [turn.timed for turn in turns[:RUN]] == [False] + [True] * TIMED
    served = [turn.candidate for turn in turns[::RUN]]
    assert Counter(served) == {0: FIRST_RUNS, 1: FIRST_RUNS, 2: FIRST_RUNS}
    after = {each: {next for one, next in pairwise(served) if one == each} - {each} for each in (0, 1, 2)}
    assert after == {0: {1, 2}, 1: {0, 2}, 2: {0, 1}}, "none always follows the same one"


def noisy(*times: float, seed: int, spread: float) -> Clock:
    """Times from each rank's own noise: many a little late, some very."""
    noise = random.Random(seed)
    return lambda candidate, call, rank: times[candidate] * (1 + spread * noise.gammavariate(1.5, 0.5))


def test_noise_never_replaces_megatrons_own_path_by_what_is_clearly_slower() -> None:
    """Single calls differ by half, and 1 is a tenth slower: with medians alone it would be chosen by chance."""
    for seed in range(150):
        decider = Decider(3, seed=seed % 3)
        drive(decider, 700, noisy(100, 110, 115, seed=seed, spread=0.7))
        assert decider.choice.candidate == 0, seed


def test_noise_does_not_hide_what_is_clearly_faster() -> None:
    chosen: Counter[int] = Counter()
    for seed in range(100):
        decider = Decider(3, seed=0)
        drive(decider, 700, noisy(100, 80, 95, seed=seed, spread=0.7))
        chosen[decider.choice.candidate] += 1
    assert chosen[1] >= 99


def test_what_is_not_told_apart_is_chosen_from_and_measured_on() -> None:
    decider = Decider(3, seed=1)
    timed: Counter[int] = Counter()
    drive(decider, 1500, noisy(200, 100, 100.5, seed=1, spread=0.4), timed=timed)
    assert timed[1] == timed[2] == TIMED * (FIRST_RUNS + SECOND_RUNS + MOST_THIRDS * THIRD_RUNS)
    early = Decider(3, seed=1)
    drive(
        early, RUN * ((FIRST_RUNS + SECOND_RUNS) * 3 + THIRD_RUNS * 2) + 1, noisy(200, 100, 100.5, seed=1, spread=0.4)
    )
    assert early.stage == "third"
    assert early.choice.why == "measured", "a run that ends here keeps what it knows"


def told(decider: Decider, times: dict[int, Timing], messages: int) -> None:
    """Serves calls through so many messages, in which all ranks say `times`."""
    for _ in range(messages):
        while not decider.due:
            decider.next()
        decider.take([times.get(each, NOT_YET) for each in decider.wanted])


@pytest.mark.parametrize(("us", "chosen"), [(97.0, 0), (94.0, 1)])
def test_after_the_last_runs_one_standard_error_is_enough(us: float, chosen: int) -> None:
    decider = Decider(2, seed=0)
    times = {0: Timing(100, 3), 1: Timing(us, 3)}
    told(decider, times, 1 + MOST_THIRDS)
    assert (decider.stage, decider.choice.candidate) == ("third", 0)
    told(decider, times, 1)
    assert (decider.stage, decider.choice.candidate) == ("settled", chosen)


def test_a_choice_among_what_is_alike_stands_when_no_more_can_be_measured() -> None:
    decider = Decider(3, seed=1)
    told(decider, {0: Timing(200, 2), 1: Timing(110, 5), 2: Timing(104, 5)}, 3)
    assert (decider.stage, decider.choice.candidate) == ("third", 2)
    told(decider, {}, 20)
    assert (decider.stage, decider.choice.candidate) == ("settled", 2)


def test_a_recheck_that_is_nearly_a_draw_takes_longer() -> None:
    for other, runs in ((60.0, CHECK_RUNS), (97.0, CHECK_RUNS + THIRD_RUNS)):
        decider = Decider(2, seed=1, known=Settled(1, other, 100, "cached"))
        timed: Counter[int] = Counter()
        drive(decider, FIRST_CHECK + 600, steady(100, other), timed=timed)
        assert timed == {0: TIMED * runs, 1: TIMED * runs}


def test_noise_in_a_window_is_no_reason_to_look_again() -> None:
    again = 0
    for seed in range(100):
        decider = Decider(2, seed=0, known=Settled(1, 150, 150, "cached"))
        timed: Counter[int] = Counter()
        drive(decider, FIRST_CHECK, noisy(200, 80, seed=seed, spread=0.9), timed=timed)
        again += bool(timed)
    assert again <= 3


def test_all_far_slower_than_megatron_end_after_one_phase() -> None:
    decider = Decider(3, seed=1)
    turns = drive(decider, 60, steady(50, 100, 100))
    assert decider.choice.candidate == 0
    tried = 3 * RUN * FIRST_RUNS
    assert [turn.candidate for turn in turns[tried:]] == [0] * (60 - tried)


def test_one_candidate_is_never_measured_nor_exchanged() -> None:
    decider = Decider(1, seed=0)
    turns = drive(decider, 3 * FIRST_CHECK, steady(1))
    assert set(turns) == {Turn(0)}


def test_what_is_known_serves_at_once() -> None:
    decider = Decider(3, seed=1, known=Settled(2, 60, 100, "cached"))
    turns = drive(decider, WINDOW, steady(100, 90, 60))
    assert {turn.candidate for turn in turns} == {2}
    assert decider.choice.why == "cached"


def test_a_choice_that_turns_slower_is_withdrawn_soon() -> None:
    decider = Decider(3, seed=1)
    drive(decider, 120, steady(100, 90, 60))
    assert decider.choice.candidate == 2
    turns = drive(decider, 3 * WINDOW, steady(100, 90, 160))
    assert decider.choice == Settled(0, 100, 100, "withdrawn")
    assert decider.withdrawals == 1
    assert [turn.candidate for turn in turns[-20:]] == [0] * 20


def test_one_late_window_is_no_reason_to_look_again() -> None:
    decider = Decider(2, seed=0, known=Settled(1, 100, 200, "cached"))
    timed: Counter[int] = Counter()
    drive(
        decider,
        4 * WINDOW,
        lambda candidate, call, rank: 160 if WINDOW < call <= 2 * WINDOW else 100,
        timed=timed,
    )
    assert not timed
    drive(decider, 4 * WINDOW, lambda candidate, call, rank: 160 if call > 5 * WINDOW else 100, timed=timed)
    assert timed[0] == timed[1] > 0


def test_a_machine_that_turns_slower_as_a_whole_withdraws_nothing() -> None:
    decider = Decider(3, seed=1)
    drive(decider, 120, steady(100, 90, 60))
    drive(decider, 3 * WINDOW, steady(200, 180, 120))
    assert decider.choice == Settled(2, 120, 200, "measured")
    assert decider.withdrawals == 0


def test_slow_drift_is_found_by_looking_again_and_what_was_withdrawn_may_return() -> None:
    decider = Decider(2, seed=1)
    drive(decider, 80, steady(100, 60))
    # Never a quarter slower than at the last look, but slower than Megatron in the end.
    drive(decider, 3 * FIRST_CHECK, lambda candidate, call, rank: 100 if candidate == 0 else 60 + call / 80)
    assert (decider.choice.candidate, decider.withdrawals) == (0, 1)
    drive(decider, 18 * FIRST_CHECK, steady(100, 60))
    assert decider.choice.candidate == 1


def test_megatrons_own_choice_is_looked_at_again_against_the_best_other() -> None:
    decider = Decider(3, seed=1)
    drive(decider, 80, steady(50, 100, 70))
    turns = drive(decider, 2 * FIRST_CHECK, steady(50, 100, 20))
    assert decider.choice.candidate == 2
    assert 1 not in {turn.candidate for turn in turns}
    again = [turn for turn in turns if turn.candidate == 2]
    assert [turn.timed for turn in again[:RUN]] == [False] + [True] * TIMED


NEAR = {2: (3, 4), 3: (2, 5), 4: (2, 5), 5: (3, 4)}


def test_what_is_like_the_winner_is_tried_beside_it_and_so_on() -> None:
    """2 wins at first; 3 is like it and faster; 5 is like 3 and faster still; 4 never helps."""
    decider = Decider(3, seed=1, near=NEAR)
    turns = drive(decider, calls_to_choose(3, 2), steady(100, 90, 80, 70, 85, 60))
    assert decider.choice == Settled(5, 60, 100, "measured")
    assert decider.tried == (0, 1, 2, 3, 4, 5)
    first = [next(turn for turn in turns if turn.candidate == each) for each in range(6)]
    assert not any(turn.timed for turn in first), "the first call of each is not measured"
    assert turns.index(first[3]) > max(number for number, turn in enumerate(turns) if turn.candidate == 1)
    assert {turn.candidate for turn in turns[-20:]} == {5}


def test_what_is_like_a_winner_stays_untried_where_others_win() -> None:
    decider = Decider(3, seed=1, near=NEAR)
    turns = drive(decider, 300, steady(100, 60, 80, 10, 10, 10))
    assert decider.choice.candidate == 1
    assert {turn.candidate for turn in turns} == {0, 1, 2}
    assert decider.tried == (0, 1, 2)


def test_a_variant_must_win_more_than_noise() -> None:
    decider = Decider(3, seed=1, near=NEAR)
    drive(decider, calls_to_choose(3, 2), steady(100, 90, 80, 79, 79, 10))
    assert decider.choice == Settled(2, 80, 100, "measured")
    assert 5 not in decider.tried


def test_what_is_never_measured_beside_the_winner_leaves_the_winner() -> None:
    decider = Decider(3, seed=1, near=NEAR)
    drive(decider, 3 * calls_to_choose(3, 2), lambda each, call, rank: (100, 90, 80, 70, 70)[each], never=3)
    assert (decider.choice.candidate, decider.stage) == (2, "settled")


@pytest.mark.parametrize("num_near", [0, 2])
def test_it_settles_in_the_calls_that_it_says(num_near: int) -> None:
    decider = Decider(3, seed=1, near=NEAR if num_near else None)
    drive(decider, calls_to_choose(3, num_near) + 1, steady(100, 90, 80, 70, 75, 60))
    assert decider.stage in ("settled", "recheck")


def test_what_some_rank_lacks_is_waited_for() -> None:
    decider = Decider(2, seed=1)
    while not decider.due:
        decider.next()
    assert decider.wanted == (1, 0)
    decider.take([Timing(50.0), NOT_YET])
    assert not decider.due
    assert decider.stage == "first"
    while not decider.due:
        assert decider.next() == Turn(1)
    decider.take([Timing(50.0), Timing(100.0)])
    assert decider.stage == "second"


def test_a_backward_pass_that_comes_late_is_waited_for_and_one_that_never_comes_is_not() -> None:
    decider = Decider(3, seed=1)
    turns = drive(decider, 200, steady(100, 60, 80), missing=0.3)
    assert decider.choice == Settled(1, 60, 100, "measured")
    never = Decider(3, seed=1)
    turns = drive(never, 500, steady(100, 60, 80), missing=1.0)
    assert math.isnan(never.choice.us)
    assert (never.stage, never.choice.why) == ("settled", "model")
    assert {turn.candidate for turn in turns[100:]} == {1}


def timing(seed: random.Random, wide: float) -> Timing:
    return Timing(100 * seed.uniform(1, wide), seed.choice([0.0, 5.0, 50.0]))


@settings(max_examples=60, deadline=None)
@given(
    candidates=st.integers(1, 5),
    ranks=st.integers(1, 4),
    seed=st.randoms(use_true_random=False),
    known=st.booleans(),
    missing=st.sampled_from([0.0, 0.4]),
)
def test_ranks_never_part(candidates: int, ranks: int, seed: random.Random, known: bool, missing: float) -> None:
    """Whatever was measured, at whatever time: all serve every call alike, and message before the same calls."""
    start = Settled(candidates - 1, 50.0, 60.0, "cached") if known else None
    deciders = [Decider(candidates, seed=candidates - 1, known=start) for _ in range(ranks)]
    for _ in range(900):
        while any(decider.due for decider in deciders):
            assert all(decider.due for decider in deciders)
            assert len({decider.wanted for decider in deciders}) == 1
            wide = seed.choice([1.02, 4.0])
            word = [NOT_YET if seed.random() < missing else timing(seed, wide) for _ in deciders[0].wanted]
            for decider in deciders:
                decider.take(list(word))
        turns = {decider.next() for decider in deciders}
        assert len(turns) == 1
        assert 0 <= turns.pop().candidate < candidates


@pytest.mark.parametrize("candidates", [1, 3])
def test_the_short_way_counts_as_the_long_one(candidates: int) -> None:
    """Both decide about calls of which Megatron's own path is the fastest, one taking what is free first."""
    many = 2 * FIRST_CHECK + 500
    clock = steady(*(50.0 + 9 * each for each in range(candidates)))
    long, short = Decider(candidates, seed=0), Decider(candidates, seed=0)
    turns = drive(short, many, clock, short=True)
    assert turns == drive(long, many, clock)
    assert (short.calls, short.choice) == (long.calls, long.choice) == (many, long.choice)
    # In turn it is looked at again.
    assert sum(turn.timed for turn in turns[FIRST_CHECK:]) == (0 if candidates == 1 else 2 * 2 * TIMED * CHECK_RUNS)
    taken = 0
    while short.free:
        short.free -= 1
        taken += 1
        assert taken <= LAST_CHECK or candidates == 1
        if taken == 10_000:
            break
    assert short.calls == many + taken


def test_a_seed_that_is_no_candidate_is_refused() -> None:
    with pytest.raises(ValueError, match="seed: 3: there are 3 candidates"):
        Decider(3, seed=3)
