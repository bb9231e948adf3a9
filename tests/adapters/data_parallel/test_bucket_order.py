"""The order in which reductions start. test_bucket_sync.py runs trainings whose ranks have different orders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron_overlap.adapters.data_parallel.bucket_sync import BucketOrder, BucketOrders, register_grad_ready
from megatron_overlap.config import OverlapConfig
from megatron_overlap.session import Session


class Group:
    """A bucket group; `is_first_batch` until it has had gradients."""

    def __init__(self, name: str) -> None:
        self.name, self.is_first_batch = name, False


def _groups(names: str) -> list[Group]:
    return [Group(name) for name in names]


def _started(order: BucketOrder, groups: Sequence[Group], ready: str) -> list[str]:
    """The groups that have started after each one became ready."""
    of, started = {group.name: group for group in groups}, [""]
    for name in ready:
        started.append(started[-1])

        def start(name: str) -> None:
            started[-1] += name

        order.ready(of[name], partial(start, name))
    return started[1:]


def test_a_group_waits_for_those_before_it() -> None:
    groups = _groups("abcd")
    order = BucketOrder(groups)
    assert _started(order, groups, "abcd") == ["a", "ab", "abc", "abcd"]
    assert _started(order, groups, "bdac") == ["", "", "ab", "abcd"]


def test_a_step_follows_an_aborted_one() -> None:
    groups = _groups("abc")
    order = BucketOrder(groups)
    assert _started(order, groups, "ac") == ["a", "a"]
    assert _started(order, groups, "abc") == ["a", "ab", "abc"]
    assert _started(order, groups, "c") == [""]
    assert _started(order, groups, "cab") == ["", "a", "abc"]


def test_a_group_without_gradients_is_passed_over() -> None:
    """Its parameters are not used; Megatron reduces it after the backward pass."""
    groups = _groups("abcd")
    order = BucketOrder(groups)
    groups[1].is_first_batch = groups[3].is_first_batch = True
    assert _started(order, groups, "ca") == ["", "ac"]
    groups[1].is_first_batch = False
    order.begin_step()
    assert _started(order, groups, "acb") == ["a", "a", "abc"]


def test_a_new_step_forgets_what_an_aborted_one_left() -> None:
    groups, session = _groups("abc"), Session(OverlapConfig())
    orders = session.adapter(BucketOrders)
    order, started = BucketOrder(groups), list[str]()
    orders.of.update(dict.fromkeys(groups, order))
    for name in "c", "", "a", "b":
        if name:
            order.ready(groups["abc".index(name)], partial(started.append, name))
        else:
            session.next_step()
    assert started == ["a", "b"]


def test_the_report_names_buckets_that_start_late() -> None:
    """The groups of a LLaVA-like model: those of the vision model come first, and are ready last."""
    session = Session(OverlapConfig())
    for names, ready, late in (("vabcd", "abcdv", "4 of 5"), ("abcdef", "cbadfe", None), ("ab", "ba", None)):
        groups, excluded = _groups(names), session.counters.excluded
        order = session.adapter(BucketOrders).of[groups[0]] = BucketOrder(groups)
        assert _started(order, groups, ready)[-1] == names
        session.next_step()
        line = excluded.pop("early start of gradient buckets", None)
        assert line is None if late is None else line is not None and line.startswith(f"{late} wait for parameters")


def test_a_function_that_another_package_set_on_a_group_stays() -> None:
    session, calls = Session(OverlapConfig()), list[str]()

    def original(group: Any) -> None:
        group.start_grad_sync(force_all_reduce=False)

    register = register_grad_ready(original, session)
    (group,) = groups = _groups("a")
    session.adapter(BucketOrders).of[group] = BucketOrder(groups)
    group.start_grad_sync = theirs = lambda **options: calls.append(str(options))  # type: ignore[attr-defined]
    register(group)
    assert calls == ["{'force_all_reduce': False}"]
    assert group.start_grad_sync is theirs  # type: ignore[attr-defined]
