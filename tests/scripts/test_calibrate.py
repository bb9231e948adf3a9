"""A calibrated profile: the cost model computes the measured times from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_overlap.autotune.cost_model import TOUCHED, CostModel
from megatron_overlap.config.cluster import load_cluster_profile, with_hosts
from scripts import calibrate
from scripts.calibrate import late_gemms
from scripts.measured_profile import (
    BASE,
    ELEMENTWISE_OUTPUTS,
    LAYER,
    LAYER_PRODUCT,
    MESSAGES,
    ROWS,
    checks,
    fit_line,
    profile_tree,
    write_profile,
)
from tests.helpers.world import World
from tests.scripts import calibrate_workers as workers

LATENCY_US = 50.0
ELEMENTWISE_FACTOR = 0.5
"""The measured rates of elementwise operations over those of the base profile."""


def elementwise_us() -> dict[str, tuple[float, float]]:
    base = load_cluster_profile(BASE).device.elementwise
    times = {}
    for kind, outputs in ELEMENTWISE_OUTPUTS.items():
        rates, moved = getattr(base, kind), [2 * outputs * each for each in TOUCHED[kind]]
        forward, backward = moved[0] / rates.forward, moved[1] / rates.backward
        times[kind] = (forward / ELEMENTWISE_FACTOR / 1e3, backward / ELEMENTWISE_FACTOR / 1e3)
    return times


# A machine with 0.1 TFLOP/s, and messages with 50 us latency and 1 GB/s.
FOUND: dict[str, Any] = {
    "ranks": 2,
    "peak_tflops": 0.1,
    "gemm_us": {str(rows): 2.0 * rows * LAYER_PRODUCT / 0.1e6 for rows in ROWS},
    "message_us": {str(count): LATENCY_US + count / 1000 for count in MESSAGES},
    "all_gather_us": LATENCY_US + 8192.0,
    "reduce_scatter_us": LATENCY_US + 16384.0,
    "all_reduce_us": LATENCY_US + 12288.0,
    "collective_bytes": 8 << 20,
    "memory_gbps": 5.0,
    "launch_us": 3.0,
    "busy_us": 700.0,
    "late_us": [(10_000.0, 500.0), (40_000.0, 2000.0)],
    "gemm_alone_us": 40_000.0,
    "gemm_beside_us": 44_000.0,
    "beside_bytes": 8 << 20,
    "elementwise_us": elementwise_us(),
    "check": {"gemm": 9060.0, "message": 3195.0},
}


def test_the_cost_model_returns_the_measured_times(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    write_profile(path, profile_tree(FOUND, "bf16", "made up"))
    assert [file.name for file in tmp_path.iterdir()] == ["mine.yaml"]
    profile = load_cluster_profile(str(path))
    model = CostModel(profile)
    link = model.link(2)
    assert model.message_us(3 << 20, link) == pytest.approx(LATENCY_US + (3 << 20) / 1000)
    assert sum(model.gemm_us(256, n, k) for n, k in LAYER) == pytest.approx(FOUND["gemm_us"]["256"], rel=0.01)
    assert model.collective_us("all_gather", 8 << 20, link) == pytest.approx(8192 + 50 + 3)
    assert model.collective_us("reduce_scatter", 8 << 20, link) == pytest.approx(16384 + 50 + 3)
    assert model.collective_us("all_reduce", 8 << 20, link) == pytest.approx(12288 + 2 * 50 + 3)
    assert model.memory_us(1e6) == pytest.approx(1e3 / 5 + 3)
    base = load_cluster_profile(BASE).device.elementwise
    for kind in ("rms_norm", "gelu", "loss"):  # one factor for all kinds, timed or not
        rates = getattr(base, kind)
        assert model.memory_us(1e6, kind) == pytest.approx(1e3 / (rates.forward * ELEMENTWISE_FACTOR) + 3)
        backward = model.memory_us(1e6, kind, backward=True)
        assert backward == pytest.approx(1e3 / (rates.backward * ELEMENTWISE_FACTOR) + 3)
    # The GEMMs took 4 ms longer beside the bytes of both directions.
    moved = 2 * (8 << 20) / 1e6
    assert profile.contention.host_us_per_mb.value == pytest.approx(4000 / moved)
    assert model.profile.contention.busy_us.value == 700
    assert [model.late_us(us) for us in (0.0, 5e3, 2.5e4, 5e4)] == pytest.approx([0, 250, 1250, 2500])
    for check in checks(path, FOUND, "bf16"):
        assert abs(check.error) < 0.02, check


def test_ranks_are_not_less_late_after_more_computation(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    write_profile(path, profile_tree({**FOUND, "late_us": [(10_000.0, 500.0), (40_000.0, 100.0)]}, "bf16", "made up"))
    model = CostModel(load_cluster_profile(str(path)))
    assert [model.late_us(us) for us in (1e4, 1e6)] == pytest.approx([500, 500])


def test_a_precision_without_a_peak_in_the_base_profile(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    write_profile(path, profile_tree(FOUND, "fp32", "made up"))
    model, narrow = CostModel(load_cluster_profile(str(path)), "fp32"), CostModel(load_cluster_profile(BASE))
    # The measured times of twice the bytes: the factor of the rates is twice as large.
    rate = 1e6 / (model.memory_us(1e6, "gelu") - model.launch_us)
    base_rate = 1e6 / (narrow.memory_us(1e6, "gelu") - narrow.launch_us)
    assert rate == pytest.approx(2 * ELEMENTWISE_FACTOR * base_rate)


def test_with_a_line_between_hosts_the_link_between_nodes_is_calibrated(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    write_profile(path, profile_tree(FOUND, "bf16", "made up", line_gbit=0.5))
    profile = load_cluster_profile(str(path))
    assert profile.devices_per_node == 1
    link = CostModel(with_hosts(profile, 0.5, 1)).link(2)
    assert link.latency_us == pytest.approx(LATENCY_US)
    host = profile.between.host
    assert host is not None
    # A message takes the measured rate, or the rate of the hosts in the base profile if that is lower.
    assert link.copy_rate == pytest.approx(min(1e3, host.copy_gbps.value * 1e3))
    slower = CostModel(with_hosts(profile, 0.05, 1)).link(2)
    assert slower.copy_rate == pytest.approx(1e3 / 10)


def test_the_line_through_messages() -> None:
    assert fit_line({0: 7.0, 1000: 17.0, 5000: 57.0}) == (pytest.approx(7), pytest.approx(100))
    late = fit_line({0: 40.0, 1000: 17.0, 5000: 57.0})
    assert late == fit_line({0: 17.0, 1000: 17.0, 5000: 57.0}), "the receiver of the smallest message was late"


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_in_turn_begins_last_and_its_time_counts(world: World, size: int) -> None:
    answers = world.run(size, workers.apart)
    (figure,) = {us for us, _ in answers}  # the same on all ranks
    # The time without the delay before it.
    assert 1e6 * workers.RUN_S <= figure < 1e6 * workers.RUN_S + 0.9 * workers.APART_US
    calls = list(zip(*(starts for _, starts in answers), strict=True))
    last = [starts.index(max(starts)) for starts in calls]
    # On a busy machine another rank can be later by accident.
    assert sum(rank == number % size for number, rank in enumerate(last)) > 0.7 * len(last)


def test_lateness_is_measured_after_10_and_40_ms_of_gemms() -> None:
    assert late_gemms(1250.0) == (8, 32)
    assert late_gemms(1e5) == (1, 4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--ranks", "1"], "--ranks: 1: give 2 or more"),
        (["--output", "/nonexistent/x"], "--output: /nonexistent/x: No such file or directory; give a path"),
        (["--output", "{tmp}"], "--output: {tmp}: is a folder; give a path"),
    ],
)
def test_a_wrong_request_is_refused_before_the_measurement(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        calibrate.main([option.format(tmp=tmp_path) for option in options])
    assert says.format(tmp=tmp_path) in capsys.readouterr().err


@pytest.mark.long
def test_calibration_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    assert calibrate.main(["--output", str(path), "--precision", "fp32"]) == 0
    assert "not used for calibration" in capsys.readouterr().out
    assert CostModel(load_cluster_profile(str(path)), "fp32").gemm_us(64, 64, 64) > 0
