"""Megatron's ColumnParallelLinear and RowParallelLinear on two and four ranks, with and without the plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.adapters.conftest import RANKS
from tests.adapters.tensor_parallel import linear_workers as cases
from tests.helpers.releases import OLDEST, ROOT, release_environment
from tests.helpers.world import World, assert_same

OPS = {("column", False): "ag_gemm", ("row", False): "gemm_rs", ("column", True): "copy_gemm", ("row", True): "gemm_ar"}
EXPERT = "expert layer: the token dispatcher communicates, not the layer"


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"skip_bias_add": True},
    {"frozen": True},
    {"fused": True},
    {"fused": True, "recompute": True},
    {"recompute": True},
]
OPTIONS_OF_FOUR_RANKS: list[dict[str, Any]] = [
    {},
    {"tensor": {"method": "p2p", "schedule": "ring", "chunks_per_rank": 3}},
    {"nodes": 2},
    {"nodes": 2, "fused": True},
]
# The dtype changes the sums in main_grad. The other options run the same code in both: the weekly run has them in bf16.
DAILY_IN_BF16: list[dict[str, Any]] = [{}, {"fused": True}]
CASES = [
    pytest.param(
        num_ranks,
        dtype,
        options,
        id="-".join([str(num_ranks), name, *options]),
        marks=[] if dtype == torch.float32 or options in DAILY_IN_BF16 else [pytest.mark.long],
    )
    for num_ranks, of_ranks in ((2, OPTIONS), (4, OPTIONS_OF_FOUR_RANKS))
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    for options in of_ranks
]


@pytest.mark.parametrize("plain", [False, True], ids=["sp", "no-sp"])
@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize(("num_ranks", "dtype", "options"), CASES)
def test_equal_to_stock(
    ranks: World,
    four_ranks: World,
    kind: str,
    num_ranks: int,
    dtype: torch.dtype,
    options: dict[str, Any],
    plain: bool,
) -> None:
    if plain and "tensor" in options:
        pytest.skip("an all-reduce has no ring, and gathers no input")
    world = four_ranks if num_ranks == 4 else ranks
    counts = world.run(num_ranks, cases.against_stock, kind, dtype, plain=plain, **options)
    # Bytes are not compared: rows are not divisible by the ranks, so their shards differ by one row.
    assert_same([[count[:3] for count in on_rank] for on_rank in counts])
    op = OPS[kind, plain]
    times = {direction: number for name, direction, number, _ in counts[0] if name == op}
    expected = {"forward": 2 if options.get("recompute") else 1, "dgrad": 1, "wgrad": 1}
    if options.get("frozen"):
        del expected["wgrad"]
    assert times == expected


def test_bytes_are_those_of_the_collectives(four_ranks: World) -> None:
    """A rank sends its shard to three others in an all-gather, and three partial shards in a reduce-scatter."""
    shard, item = 3 * cases.BATCH, 4
    for kind in ("column", "row"):
        sent = {d: b for _, d, _, b in four_ranks.run(4, cases.against_stock, kind, torch.float32)[0]}
        width = cases.IN if kind == "column" else cases.OUT
        once = 3 * shard * width * item
        # Both gradients of the row layer use one all-gather. It is counted for the first.
        assert sent == {"forward": once, "dgrad": once, "wgrad": once if kind == "column" else 0}
    rows, others = (3 * 4 + 1) * cases.BATCH, 3
    for kind, direction, width in (("column", "dgrad", cases.IN), ("row", "forward", cases.OUT)):
        plain = four_ranks.run(4, cases.against_stock, kind, torch.float32, plain=True)
        for rank_sent in plain:
            assert [d for _, d, _, b in rank_sent if b] == [direction]
        # Partial sums of three shards to their owners, and the sum of the own shard to three peers.
        assert sum(b for rank_sent in plain for *_, b in rank_sent) == 2 * others * rows * width * item


@pytest.mark.parametrize(
    ("kind", "what", "reason"),
    [
        ("column", "ring", "schedule ring has no all-reduce: use direct, or --sequence-parallel"),
        ("row", "ring", "schedule ring has no all-reduce: use direct, or --sequence-parallel"),
        ("row", "expert", EXPERT),
        ("column", "expert", EXPERT),
        ("column", "deferred", "deferred weight gradient of the embedding (--defer-embedding-wgrad-compute)"),
    ],
)
def test_an_unsupported_call_runs_the_stock_path(ranks: World, kind: str, what: str, reason: str) -> None:
    for reasons, error in ranks.run(RANKS, cases.falls_back, kind, what, False):
        assert reasons == [reason]
        assert error == ""
    name = "column 16->12" if kind == "column" else "row 8->24"
    # The config of the expert layers has sequence parallelism; the column layer is called without it.
    plain = what == "ring" or (what, kind) == ("expert", "column")
    module = f"{name}: {OPS[kind, plain]}"
    for reasons, error in ranks.run(RANKS, cases.falls_back, kind, what, True):
        assert reasons == [reason]
        assert error.startswith(f"FallbackError: {module} forward: not overlapped: {reason};")


@pytest.mark.parametrize(
    ("output_dtype", "reason"),
    [(None, None), (torch.float32, "--output-logit-dtype: TransformerEngine computes the GEMM")],
)
def test_logits_of_another_dtype_run_the_stock_path(output_dtype: torch.dtype | None, reason: str | None) -> None:
    """Megatron 0.20 passes it in every call. Releases before it would raise, so no layer is called."""
    from megatron_overlap.adapters.tensor_parallel.eligibility import unsupported_column_reason

    layer = SimpleNamespace(explicit_expert_comm=False)
    assert unsupported_column_reason(layer, (), {"output_dtype": output_dtype}) == reason


def test_a_row_layer_with_offloaded_activations_runs_the_stock_path(ranks: World) -> None:
    """Megatron rejects it: offloading needs TransformerEngine's layers."""
    for reasons, error in ranks.run(RANKS, cases.falls_back, "row", "offloaded", False):
        assert reasons == ["activations are offloaded to the CPU"]
        assert "CPU Offloading" in error
    for reasons, error in ranks.run(RANKS, cases.falls_back, "column", "offloaded", False):
        assert reasons == []
        assert "CPU Offloading" in error


def test_an_indivisible_sequence_runs_the_stock_path(ranks: World) -> None:
    """Megatron rejects it with its own message."""
    for reasons, error in ranks.run(RANKS, cases.falls_back, "row", "odd", False):
        assert reasons == ["sequence length is not divisible by the tensor-parallel size 2"]
        assert "divisible" in error


def test_column_layers_with_the_same_input(ranks: World) -> None:
    once = 3 * (RANKS - 1) * cases.BATCH * cases.IN * 4
    # Four calls, one of them without gradients.
    assert ranks.run(RANKS, cases.shared_input) == [[3 * once, once]] * RANKS


def test_column_layers_save_the_own_rows_of_their_input(ranks: World) -> None:
    # Once for two layers of one input.
    assert ranks.run(RANKS, cases.saved_bytes) == [2 * 3 * cases.BATCH * cases.IN * 4] * RANKS


@pytest.mark.parametrize("plain", [False, True], ids=["sp", "no-sp"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_fused_without_a_gpu_runs_p2p_with_a_reason(ranks: World, kind: str, plain: bool) -> None:
    reason = "fused kernels need CUDA, not cpu"
    for counted, shown, _ in ranks.run(RANKS, cases.asks_for_fused, kind, plain, strict=False):
        assert counted == {reason: 1}
        assert f"1 x p2p, not fused: {reason}" in shown
        assert "symmetric memory of fused kernels: none allocated" in shown
    for _, _, error in ranks.run(RANKS, cases.asks_for_fused, kind, plain, strict=True):
        assert f"not fused: {reason}; set overlap.tensor.method to p2p" in error


def test_disable_restores_megatron(ranks: World) -> None:
    assert all(changed >= 2 for changed in ranks.run(RANKS, cases.disabled_leaves_nothing))


def test_the_expected_release_runs(ranks: World) -> None:
    releases = ranks.run(RANKS, cases.start)
    assert_same(releases)
    wanted = os.environ.get("EXPECTED_MEGATRON")
    assert wanted is None or releases[0] == wanted


@pytest.mark.long
def test_the_oldest_release() -> None:
    """All tests above on the oldest release."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-k", "not oldest_release and not bf16"],
        cwd=ROOT,
        env={**release_environment(OLDEST), "EXPECTED_MEGATRON": OLDEST},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_copies_have_the_deadline_and_the_flight_recorder_of_the_session(ranks: World) -> None:
    assert ranks.run(1, cases.options_of_copies, False) == [("copies", 7.0, "recorder", True)]
    # The tree of sums is over all ranks.
    assert ranks.run(1, cases.options_of_copies, "tp_invariant") == [("copies", 7.0, "recorder", False)]
