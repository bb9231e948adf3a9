"""The order in which reductions start. test_bucket_sync.py runs trainings whose ranks have different orders."""

from functools import partial

from megatron_overlap.adapters.data_parallel.bucket_sync import BucketOrder


def _started(order: BucketOrder, ready: str) -> list[str]:
    """The groups that have started after each one became ready."""
    started = [""]
    for name in ready:
        started.append(started[-1])

        def start(name: str) -> None:
            started[-1] += name

        order.ready(name, partial(start, name))
    return started[1:]


def test_a_group_waits_for_those_before_it() -> None:
    order = BucketOrder("abcd")
    assert _started(order, "abcd") == ["a", "ab", "abc", "abcd"]
    assert _started(order, "bdac") == ["", "", "ab", "abcd"]


def test_a_step_follows_an_aborted_one() -> None:
    order = BucketOrder("abc")
    assert _started(order, "ac") == ["a", "a"]
    assert _started(order, "abc") == ["a", "ab", "abc"]
    assert _started(order, "c") == [""]
    assert _started(order, "cab") == ["", "a", "abc"]
