"""Symmetric memory as far as it goes with no GPU: the arena's arithmetic, and how ranks agree that there is none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_overlap.comm.connection import store_beside
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.symmetric.cuda import _named, _with_deadline, local_objection, survey
from megatron_overlap.comm.symmetric.layout import ALIGNMENT, MAX_PARTS, ArenaLayout, gathered_bytes
from megatron_overlap.diagnostics.consistency import first_unsupported_reason
from tests.helpers.world import World


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("half_bytes", [1, 255, 256, 1 << 20])
def test_nothing_in_an_arena_overlaps(num_ranks: int, half_bytes: int) -> None:
    layout = ArenaLayout(num_ranks, half_bytes)
    spans = [(layout.num_bytes, layout.num_bytes)]
    for epoch in (1, 2):
        spans += [
            (layout.half(epoch), layout.half(epoch) + half_bytes),
            (layout.flags(epoch), layout.flags(epoch) + 4 * num_ranks * MAX_PARTS),
            (layout.acknowledgements(epoch), layout.acknowledgements(epoch) + 4 * num_ranks),
            (layout.ready(epoch), layout.ready(epoch) + 4 * num_ranks),
        ]
    spans.sort()
    for (start, stop), (following, _) in zip(spans, spans[1:], strict=False):
        assert start % ALIGNMENT == 0
        assert stop <= following
    assert layout.half(3) == layout.half(1) != layout.half(2)


def test_an_arena_is_twice_the_largest_gathered_activation() -> None:
    largest = gathered_bytes(8192, 8, 8192, 2)
    assert largest == 8192 * 8192 * 2
    assert 2 * largest <= ArenaLayout(8, largest).num_bytes <= 2 * largest + 8192
    # A landing has a slot for each rank, as long as the largest shard.
    assert gathered_bytes(10, 4, 3, 2) == 4 * 3 * 3 * 2


@pytest.mark.parametrize(("num_ranks", "half_bytes", "name"), [(0, 1, "num_ranks"), (2, 0, "half_bytes")])
def test_counts_below_one_are_refused(num_ranks: int, half_bytes: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: 0: must be at least 1"):
        ArenaLayout(num_ranks, half_bytes)


def agree(group: dist.ProcessGroup, objections: list[str]) -> str:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return first_unsupported_reason(store_beside(group), rank, size, "test", objections[rank], 30)


def silent(group: dist.ProcessGroup) -> str:
    rank = dist.get_rank(group)
    store = store_beside(group)
    answer = first_unsupported_reason(store, rank, 3, "silence", "", 0.3) if rank != 1 else ""
    dist.barrier(group)
    return answer


def here(group: dist.ProcessGroup) -> object:
    return survey(group, deadline_s=30)


def test_all_ranks_give_the_same_answer(world: World) -> None:
    assert world.run(3, agree, ["", "", ""]) == [""] * 3
    assert world.run(3, agree, ["", "no CUDA device", "older"]) == ["rank 1 of the group: no CUDA device"] * 3


def test_a_silent_rank_does_not_hold_the_others_for_ever(world: World) -> None:
    first, _, third = world.run(3, silent)
    assert first == third == "rank 1 of the group did not respond within 0.3 s"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_says_so(world: World) -> None:
    assert local_objection() == "no CUDA device"
    assert world.run(2, here) == ["rank 0 of the group: no CUDA device"] * 2


def named(group: dist.ProcessGroup) -> tuple[str, list[int]]:
    rank = dist.get_rank(group)
    members = HostGroup(group, range(rank // 2 * 2, rank // 2 * 2 + 2))
    members.barrier()
    assert members.group is None
    assert (members.rank, members.size) == (rank % 2, 2)
    return _named(members), members.ranks


def test_ranks_of_one_host_agree_on_a_name_for_torch(world: World) -> None:
    found = world.run(4, named)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0][0] != found[2][0]
    assert [ranks for _, ranks in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_an_attempt_that_hangs_or_fails_has_a_name() -> None:
    import threading

    def fails() -> str:
        raise RuntimeError("peer access is not supported\nat line 1")

    assert _with_deadline(lambda: threading.Event().wait(5) and "" or "", 0.05).startswith(
        "mapping peers' memory hangs"
    )
    assert _with_deadline(fails, 5) == "RuntimeError: peer access is not supported"
    assert _with_deadline(lambda: "", 5) == ""
