"""The gloo transport: order, deadlines that name the peer, and nothing left behind."""

from __future__ import annotations

import re

from tests.comm import transport_workers
from tests.helpers.world import World


def test_a_missing_peer_is_named_within_the_deadline(world: World) -> None:
    (text, took), _ = world.run(2, transport_workers.missing_peer)
    # Its own message has no taker either: which of the two gives up first is a race.
    what = re.match(r"all_gather_linear: rank 0 could not (.+) rank 1 within 1 s: .", text)
    assert what is not None, text
    assert what[1] in (
        "receive message 0 (chunk 0 of rank 1) from",
        "send message 0 (chunk 0 of rank 0) to",
    )
    assert "\n" not in text
    assert 0.9 < took < 10


def test_a_send_waits_until_its_work_is_done(world: World) -> None:
    assert world.run(2, transport_workers.sends_wait_for_release) == [[11.0, 12.0], [1.0, 2.0]]


def test_closing_ends_the_threads(world: World) -> None:
    for before, after in world.run(2, transport_workers.threads_end):
        assert before == after


def test_messages_of_flights_in_the_air_stay_apart(world: World) -> None:
    assert world.run(4, transport_workers.many_p2p_works, 20) == [True] * 4


def test_a_late_peer_holds_up_nobody_else(world: World) -> None:
    assert world.run(3, transport_workers.a_late_peer_holds_up_nobody_else)[2] == [1]


def test_a_ready_message_passes_one_that_is_not(world: World) -> None:
    assert world.run(2, transport_workers.a_ready_message_passes_one_that_is_not) == [True, True]
