"""The gloo transport: order of messages, timeouts that name the peer, and threads that end."""

from __future__ import annotations

import re

from megatron_overlap.comm.gloo import _NUM_OPS
from tests.comm import transport_workers
from tests.helpers.world import World


def test_a_missing_peer_is_named_within_the_timeout(world: World) -> None:
    (text, took), _ = world.run(2, transport_workers.missing_peer)
    # The send of rank 0 also times out. Either of the two may fail first.
    what = re.match(r"all_gather_linear: rank 0 could not (.+) rank 1 within 1 s: .", text)
    assert what is not None, text
    assert what[1] in (
        "receive message 0 (chunk 0 of rank 1) from",
        "send message 0 (chunk 0 of rank 0) to",
    )
    assert "\n" not in text
    assert 0.9 < took < 10


def test_a_dead_thread_ends_the_wait_and_the_first_failure_is_the_one_reported(world: World) -> None:
    (first, second), _ = world.run(2, transport_workers.dead_thread)
    assert first == (
        "all_gather_linear: rank 0 could not receive message 0 (chunk 0 of rank 1) from rank 1 within 0.5 s: "
        "no message made progress"
    )
    assert second == first


def test_a_send_waits_until_it_is_marked_ready(world: World) -> None:
    assert world.run(2, transport_workers.sends_wait_for_mark_ready) == [[11.0, 12.0], [1.0, 2.0]]


def test_closing_ends_the_threads(world: World) -> None:
    for before, after in world.run(2, transport_workers.threads_end):
        assert before == after


def test_messages_of_concurrent_operations_are_not_mixed(world: World) -> None:
    assert world.run(4, transport_workers.many_operations, 20) == [True] * 4


def test_operations_have_other_numbers_when_tags_repeat(world: World) -> None:
    """Otherwise a trace would match the messages of different operations."""
    numbers = [*range(_NUM_OPS - 2, _NUM_OPS + 4)]
    assert world.run(2, transport_workers.numbers_after_tags_repeat) == [(numbers, [True] * 6)] * 2


def test_a_late_peer_does_not_block_other_peers(world: World) -> None:
    assert world.run(3, transport_workers.a_late_peer_does_not_block_other_peers)[2] == [1]


def test_a_ready_message_overtakes_one_that_is_not_ready(world: World) -> None:
    assert world.run(2, transport_workers.a_ready_message_overtakes_one_that_is_not_ready) == [True, True]
