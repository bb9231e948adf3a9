"""Check mode finds what is wrong, and nothing else; ranks that differ stop before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.adapters.conftest import RANKS, needs_training
from tests.adapters.diagnostics import reference_check_workers as cases
from tests.helpers.world import World, assert_same

OPS = {("column", False): "ag_gemm", ("row", False): "gemm_rs", ("column", True): "copy_gemm", ("row", True): "gemm_ar"}


@pytest.mark.parametrize("plain", [False, True], ids=["sp", "no-sp"])
@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16", marks=pytest.mark.long)]
)
def test_what_is_right_passes(ranks: World, kind: str, dtype: torch.dtype, plain: bool) -> None:
    found = ranks.run(RANKS, cases.checked, kind, dtype, plain=plain)
    assert_same([each["checked"] for each in found])
    op = OPS[kind, plain]
    assert {name.rpartition(" ")[2] for name in found[0]["checked"]} >= {"y", "dx", "dw"}
    for each in found:
        assert all(name.startswith(op) and 0 <= share <= 1 for name, share in each["checked"].items())
        assert each["close"]
        assert (each["error"], each["reasons"]) == ("", {})
        assert each["overlapped"] > 0
    assert found[0]["said"].startswith("overlap check: step 2: 2 comparisons, worst ")
    assert found[1]["said"] == ""


@pytest.mark.parametrize("kind", ["column", "row"])
def test_calls_without_gradients_are_checked(ranks: World, kind: str) -> None:
    for compared in ranks.run(RANKS, cases.without_gradients, kind):
        assert [name.split()[0] + name.split()[-1] for name in compared] == [OPS[kind, False] + "y"]


@pytest.mark.parametrize("kind", ["column", "row"])
def test_gradient_buffers_and_recomputation(ranks: World, kind: str) -> None:
    for each in ranks.run(RANKS, cases.checked, kind, torch.bfloat16, fused=True, recompute=True):
        assert each["close"], each
        assert each["error"] == ""
        assert any(name.endswith(" dw") for name in each["checked"])


@pytest.mark.parametrize(
    ("kind", "message", "tensor"),
    [
        ("column", "all_gather_linear", "y"),
        ("column", "all_gather_linear dgrad", "dx"),
        ("column", "all_gather_linear wgrad", "dw"),
        ("row", "linear_reduce_scatter", "y"),
        ("row", "linear_reduce_scatter dgrad", "dx"),
    ],
)
def test_a_corrupted_message_stops_every_rank(ranks: World, kind: str, message: str, tensor: str) -> None:
    found = ranks.run(RANKS, cases.checked, kind, torch.float32, corrupt=message)
    op = OPS[kind, False]
    assert any(each["corrupted"] for each in found)
    for each in found:
        assert each["error"].startswith(f"CheckError: overlap.check: {op} "), each["error"]
        # Rows that are gathered for dgrad and wgrad at once spoil both.
        off = ("dx", "dw") if (kind, tensor) == ("row", "dx") else (tensor,)
        assert tensor == "y" or any(f"check at step 2: the error of {name} is" in each["error"] for name in off)
        assert "on ranks 0-1: do not trust this run" in each["error"]


@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_breach_can_fall_back_for_that_op(ranks: World, kind: str) -> None:
    message = "all_gather_linear" if kind == "column" else "linear_reduce_scatter"
    wanted = {"on_mismatch": "fallback", "rtol": 1e-4}
    found = ranks.run(RANKS, cases.checked, kind, torch.float32, corrupt=message, check=wanted, steps=2)
    assert_same([each["reasons"] for each in found])
    ((reason, times),) = found[0]["reasons"].items()
    assert reason.startswith("check at step 2: the error of y is ")
    assert times == 2
    assert all(each["close"] for each in found)


def test_steps_that_are_not_checked_cost_nothing(ranks: World) -> None:
    for (*unchecked, checked), reasons in ranks.run(RANKS, cases.unchecked_costs_nothing):
        assert unchecked == [0, 0]
        assert checked > 0
        assert reasons == ["the training loop does not call next_step", "step 2 is the first", ""]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            {"tensor": {"method": "p2p", "chunks_per_rank": 3}},
            "overlap.tensor.chunks_per_rank: 2 on rank 0, 3 on rank 1",
        ),
        (
            {"tensor": {"method": "p2p", "chunks_per_rank": 2}, "strict": True},
            "overlap.strict: False on rank 0, True on rank 1",
        ),
    ],
)
def test_a_rank_with_another_config_is_named_everywhere(ranks: World, other: dict[str, object], told: str) -> None:
    for text in ranks.run(RANKS, cases.disagreeing, other):
        assert text.startswith("ConfigMismatchError: the ranks differ: ")
        assert told in text


@needs_training
@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        # 4 x 2 rows over two ranks: as many as chunks.
        ((4, 2), ""),
        (
            (3, 2),
            "ConfigError: overlap config: tensor.chunks_per_rank: 4: a rank has 3 rows; use 3 at most, or auto",
        ),
        # As after parsing alone: Megatron sets the lengths when it validates.
        ((None, None), ""),
    ],
)
def test_a_config_that_fits_no_rank_is_refused(ranks: World, sizes: tuple[int | None, int | None], told: str) -> None:
    assert ranks.run(RANKS, cases.under_arguments, *sizes) == [told] * RANKS


@needs_training
def test_groups_that_are_made_again_wrap_the_step_once(ranks: World) -> None:
    assert ranks.run(RANKS, cases.made_again) == [(1, True)] * RANKS


def test_groups_of_an_in_process_restart_are_new_ones(tmp_path: Path) -> None:
    """Torch's groups are destroyed and made again in processes that go on, after a step that one rank left."""
    world = World(2, answer_s=60, sizes=(2,), adapted=True)
    try:
        first, second = world.run(2, cases.restarted_in_process, tmp_path / "store")
    finally:
        world.close()
    assert first.pop("failed").startswith("TransportError: all_gather_linear: ")
    assert second.pop("failed") == ""
    assert (first["written"], second["written"]) == (["overlap-failure-rank0.json"], [])
    assert first["overlapped"] == second["overlapped"] > 0
    for peer, each in ((1, first), (0, second)):
        assert each["equal"]
        assert each["threads"] == [f"megatron_overlap_{name}" for name in ("heartbeat", f"receive_{peer}", "send")]
