"""`overlap.expert.method: auto` in Megatron's mixture-of-experts layer, on real connections."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adapters.conftest import RANKS
from tests.adapters.expert_parallel import autotune_workers as workers
from tests.helpers.gemm_rounding import bound
from tests.helpers.world import World


@pytest.fixture(scope="module")
def moe_ranks() -> Iterator[World]:
    processes = World(RANKS, answer_s=240, adapted=True)
    yield processes
    processes.close()


@pytest.mark.parametrize(("slow", "selected"), [("stock", "p2p"), ("p2p", "stock")])
def test_selects_the_faster_path_of_each_layer(moe_ranks: World, slow: str, selected: str) -> None:
    """The ranks have different numbers of tokens, and every call has another routing.

    The stock path is timed in both passes: a backward ends with the gradient of the tokens, after its delay.
    """
    for found in moe_ranks.run(RANKS, workers.select, slow):
        assert all(each <= bound() for each in found["deviations"])
        assert [(line.op, line.method) for line in found["lines"]] == [("experts", selected)] * 2
        assert [line.module.split(" of ")[1] for line in found["lines"]] == ["layer 1", "layer 2"]
        if slow == "stock":
            assert all(line.stock_ms > max(line.ms, 2 * workers.DELAY_MS) for line in found["lines"])
        overlapped, by_autotuning = found["counts"]
        assert overlapped + by_autotuning == found["calls"]
        assert min(overlapped, by_autotuning) > 0


def test_deterministic_runs_measure_nothing(moe_ranks: World) -> None:
    for overlapped, lines in moe_ranks.run(RANKS, workers.deterministic):
        assert overlapped == 3
        assert lines == ()
