"""Random programs of all operations, over NCCL, copies, and both; see `device_search`."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_overlap.comm import nccl
from megatron_overlap.comm.symmetric import copy_steps
from tests.comm.device_orders import OrderError
from tests.ops.device_search import FEATURES, Cluster, Program, search

_PAIRS = [
    ((("linear", "tp", 14530), ("linear", "tp", 5)), (("buckets", "dp", 7),)),
    ((("linear", "tp", 6864), ("parts", "tp", 8)), (("experts", "dp", 6),)),
]
"""Layers of tensor parallelism beside gradient buckets and beside experts."""


@pytest.mark.parametrize("copies", [False, True], ids=["nccl", "copies"])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("lanes", _PAIRS, ids=["buckets", "experts"])
def test_two_groups_at_once(lanes: Any, nodes: int, copies: bool) -> None:
    assert search(Program(Cluster(nodes, 4 // nodes, 2, copies), lanes, turns=nodes)) > 100


@pytest.mark.parametrize("seed", [106, 120], ids=["a group over two nodes", "two all-reduces"])
def test_programs_of_several_groups(seed: int) -> None:
    """Tensor-parallel groups of which one has ranks on two nodes; consecutive all-reduces by copies."""
    search(Program.of(seed))


@pytest.mark.long
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("seed", range(10))
def test_random_programs(seed: int, feature: str) -> None:
    search(Program.of(seed, feature))


def test_the_search_finds_missing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the model."""

    def program(feature: str, seed: int, *, copies: bool) -> Program:
        return Program(Cluster(1, 2, 2, copies), (((feature, "all", seed), (feature, "all", seed)),), turns=1)

    with monkeypatch.context() as patch:
        patch.setattr(nccl.NcclP2PWork, "wait", lambda self, *messages: None)
        with pytest.raises(OrderError, match="race in memory"):
            search(program("linear", 17202, copies=False))
    monkeypatch.setattr(copy_steps.State, "_wait_sends", lambda self, queues: None)
    with pytest.raises(OrderError, match="race in memory .* copies all 1: copy"):
        search(program("buckets", 7, copies=True))
