"""Consistency check, heartbeats, explanation of failed waits, and bitwise reproducibility of ordered transports."""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_overlap.diagnostics.consistency import compare, differences, first_unsupported_reason
from megatron_overlap.diagnostics.heartbeat import Heartbeat
from tests.diagnostics import workers
from tests.helpers.world import World, assert_same


def test_differences_name_key_values_and_ranks() -> None:
    facts = {rank: {"a": "1", "b": "x" if rank == 3 else "y"} for rank in range(5)}
    assert differences(facts) == "b: y on rank 0-2, 4, x on rank 3"
    assert differences({0: {"a": "1"}, 1: {"a": "1"}}) == ""
    assert differences({0: {"a": "1"}, 1: {}}) == "a: 1 on rank 0, not set on rank 1"


def test_many_differences_are_counted() -> None:
    text = differences({rank: {f"key{number:02}": str(rank) for number in range(11)} for rank in range(2)})
    assert text.endswith("; and 3 more")
    assert text.count(" on rank 0") == 8


def test_texts_stay_short_with_many_ranks() -> None:
    """Every rank of a job raises the text: 10,000 values took 228 KB."""
    facts = {rank: {"host": f"node{rank}", "local rank": str(rank % 8 == 0)} for rank in range(10000)}
    text = differences(facts)
    assert "node7 on rank 7, and 9992 more; " in text
    assert "True on rank 0, 8, 16, 24, 32, 40, 48, 56, and 1242 more" in text
    assert len(text) < 500


def test_reading_the_texts_of_ranks_is_one_request() -> None:
    """The store of a job handles one request after another, and 10,000 ranks in groups of 64 made two million."""
    requests: list[str] = []

    class Counting(dist.HashStore):
        def get(self, key: str) -> bytes:
            requests.append(key)
            return super().get(key)

    store = Counting()
    for rank in range(64):
        store.set(f"t/{rank}", "no driver" if rank == 5 else "")
    assert first_unsupported_reason(store, 0, 64, "t", "", 5.0) == "rank 5 of the group: no driver"
    compare(store, 0, [0], "facts", {}, 5.0)
    assert len(requests) <= 2


def test_all_ranks_get_the_same_differences(world: World) -> None:
    same, odd = {"chunks": "2"}, {"chunks": "4"}
    assert [text for text, _ in world.run(4, workers.compares, [same] * 4, 5.0)] == [""] * 4
    texts = [text for text, _ in world.run(4, workers.compares, [same, same, odd, same], 5.0)]
    assert texts == ["chunks: 2 on rank 0-1, 3, 4 on rank 2"] * 4


def test_rank_0_ends_after_the_others_have_read_the_differences() -> None:
    """It may hold the store. Rank 1 has published its facts, and reads late."""
    store, found = dist.HashStore(), dict[int, str]()
    store.set("t/1", "of rank 1")
    store.set("t/of rank 1", "{}")

    def run(rank: int, facts: dict[str, str]) -> None:
        found[rank] = compare(store, rank, [0, 1], "t", facts, 5.0)

    ranks = [threading.Thread(target=run, args=each) for each in enumerate([{"chunks": "2"}, {}])]
    ranks[0].start()
    store.wait(["t/found"], timedelta(seconds=5))
    ranks[0].join(0.3)
    assert not found
    ranks[1].start()
    for thread in ranks:
        thread.join(5)
    assert found == dict.fromkeys((0, 1), "chunks: 2 on rank 0, not set on rank 1")


@pytest.mark.parametrize("silent", [0, 2])
def test_the_text_names_a_silent_rank_within_the_deadline(world: World, silent: int) -> None:
    facts = [None if rank == silent else {"a": "1"} for rank in range(3)]
    answers = world.run(3, workers.compares, facts, 0.5)
    for rank, (text, took) in enumerate(answers):
        if rank != silent:
            assert text.startswith(f"rank {silent}")
            assert took < (8 if silent == 0 else 4), "only a silent rank 0 is awaited beyond the deadline"
    assert_same([text for rank, (text, _) in enumerate(answers) if rank != silent])


def test_the_store_holds_equal_facts_once() -> None:
    """10,000 ranks would send 30 MiB, which the store would hold until the job ends."""
    written: list[str] = []

    class Counting(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            written.append(value)
            super().set(key, value)

    store, facts, found = Counting(), {"chunks": "2" * 1000}, dict[int, str]()

    def run(rank: int, of_rank: dict[str, str]) -> None:
        found[rank] = compare(store, rank, [4, 5, 6, 7], "t", of_rank, 20.0)

    ranks = [threading.Thread(target=run, args=(rank, facts if rank < 3 else {})) for rank in (1, 2, 3, 0)]
    for number, thread in enumerate(ranks, 1):
        thread.start()
        while number < 4 and not store.check([f"t/{number}"]):
            time.sleep(0.001)
    for thread in ranks:
        thread.join()
    assert written.count(json.dumps(facts)) == 1
    assert set(found.values()) == {f"chunks: {'2' * 1000} on rank 4-6, not set on rank 7"}


class BusyStore:
    """A store that answers three writes in turn too late, after the first one."""

    def __init__(self) -> None:
        self.store, self.num_writes = dist.HashStore(), 0

    def clone(self) -> BusyStore:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Keep the timeout."""

    def set(self, key: str, value: str) -> None:
        self.num_writes += 1
        if 1 < self.num_writes <= 4:
            raise RuntimeError("wait timeout after 2000ms")
        self.store.set(key, value)


def test_a_busy_store_does_not_end_the_heartbeat() -> None:
    store: Any = BusyStore()
    heartbeat = Heartbeat(store, 3, 1.0, lambda: "at step 8")
    until = time.monotonic() + 20
    while store.num_writes < 6 and time.monotonic() < until:
        time.sleep(0.01)
    heartbeat.close()
    assert int(json.loads(store.store.get("heartbeat/3"))["count"]) >= 5


def test_a_heartbeat_opens_one_connection_to_the_store() -> None:
    """At the host of the store each connection is an open file, and `ulimit -n` is 1024 by default."""
    clones: list[object] = []

    class Cloned(BusyStore):
        def clone(self) -> BusyStore:
            clones.append(self)
            return self

    store: Any = Cloned()
    Heartbeat(store, 3, 1.0, lambda: "at step 8").close()
    assert len(clones) == 1


def test_the_timeout_of_the_job_stays_where_a_store_cannot_be_cloned() -> None:
    """As in torch 2.6 and 2.7, whose prefix stores pass a timeout on to the store of the job."""

    class Old:
        def set(self, key: str, value: str) -> None:
            """Publish nothing."""

        def set_timeout(self, timeout: timedelta) -> None:
            raise AssertionError("collectives that need the store would fail after this timeout")

    store: Any = Old()
    Heartbeat(store, 3, 1.0, lambda: "at step 8").close()


def test_heartbeats_describe_the_state_of_a_peer(world: World) -> None:
    heard, _ = world.run(2, workers.heartbeats)
    assert heard["never"] == "it has never sent a heartbeat"
    assert heard["alive"] == "it is alive, at step 8"
    assert heard["silent"] == "it has sent no heartbeat since it was at step 8"
    assert heard["failed"] == "it failed earlier: the wait failed"


@pytest.mark.parametrize(
    ("op", "backward"),
    [
        ("all_gather_linear", False),
        ("all_gather_linear wgrad", True),
        ("expert_parallel", False),
        ("expert_parallel dgrad", True),
    ],
)
def test_a_failed_wait_names_layer_step_and_state_of_the_peer(
    world: World, tmp_path: Path, op: str, backward: bool
) -> None:
    experts, step = op.startswith("expert"), 6 if backward else 5
    (text, content, second), _ = world.run(2, workers.failed_wait, str(tmp_path), backward, experts)
    assert text.startswith(f"{op}: rank 0 could not "), text
    assert "chunk 0 of rank" in text
    assert "rank 1 within 1 s: " in text
    assert f"layer layers.1, step {step}; rank 1: it is alive, at step {step}, in no op of the plugin" in text
    assert text.endswith(f"the last steps are in {tmp_path}/overlap-failure-rank0.json")
    assert content["message"] == text.rpartition("; the last steps are in")[0]
    assert content["version of x"] == "1"
    operations = content["operations"]
    assert operations[-1]["step"] == step  # type: ignore[index]
    assert operations[-1]["ended"] is None  # type: ignore[index]
    file = "expert_parallel/layer.py" if experts else "tensor_parallel/linear.py"
    assert any(f"ops/{file}" in line for line in content["stack"])  # type: ignore[attr-defined]
    assert f"after an earlier failure, see {tmp_path}" in second or second == text


def test_a_wait_ends_at_the_deadline_after_a_thread_has_died(world: World) -> None:
    for text, took in world.run(2, workers.a_dead_thread):
        assert "no message made progress" in text
        assert took < 5


def test_a_peer_that_never_connects_is_an_error(world: World) -> None:
    text, _ = world.run(2, workers.peer_that_never_connects)
    assert text.startswith("rank 0 could not connect to all of ranks 0-1 within 1 s: ")


def test_ordered_results_do_not_depend_on_arrival_times(world: World) -> None:
    early = [0.0, 0.0, 0.0]
    plain = world.run(3, workers.bits, True, early)
    assert [reports_completion for _, reports_completion in plain] == [False] * 3
    for late in ([0.1, 0.0, 0.0], [0.0, 0.15, 0.05]):
        assert world.run(3, workers.bits, True, late) == plain
