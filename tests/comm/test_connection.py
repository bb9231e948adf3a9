"""Ranks connect together, and one owner keeps the transports of each group and channel."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.comm import connection_workers
from tests.helpers.world import World

NUM_BUSY_LOOPS = 3


@pytest.fixture
def busy_loops(world: World) -> Iterator[None]:
    """Processes that compete for the cores with workers that have started."""
    world.run(4, connection_workers.open_and_close, 1)
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NUM_BUSY_LOOPS)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("times", [60, pytest.param(500, marks=pytest.mark.long)])
def test_transports_open_and_close_beside_busy_loops(
    world: World, busy_loops: None, num_ranks: int, times: int
) -> None:
    """One rank may close a transport before a peer has left its constructor."""
    for start in range(0, times, 50):
        failures = world.run(num_ranks, connection_workers.open_and_close, min(50, times - start))
        assert failures == [[]] * num_ranks


def test_connecting_ends_on_no_rank_before_all_have_connected(world: World) -> None:
    for took_s in world.run(3, connection_workers.connect_with_a_slow_rank):
        assert took_s >= connection_workers.DELAY_S


def test_a_rank_program_ends_without_threads_of_gloo() -> None:
    """A thread that releases a tensor while the interpreter ends aborts the process."""
    command = [sys.executable, "-m", "tests.comm.connection_workers"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    of_gloo, at_exit = map(json.loads, done.stdout.splitlines())
    assert of_gloo == []
    assert at_exit == ["MainThread"]


def test_a_group_has_one_transport_for_each_channel(world: World) -> None:
    for seen in world.run(2, connection_workers.transports_have_one_owner):
        assert seen.pop("undeclared") == (
            "channel: 'dta': not declared: use one of '', 'copies', 'data', 'data sums', 'intra', "
            "'rebalance', 'part a', 'part b', or add it to CHANNELS"
        )
        assert seen.pop("options") == (20, "data")
        assert seen.pop("buffers") == {"ranks 0-1": {}, "data of ranks 0-1": {}}
        assert all(seen.values()), seen
