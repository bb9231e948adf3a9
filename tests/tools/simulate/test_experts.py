"""Layers of experts on machines whose times can be computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_overlap.autotune.cost_model import CostModel
from megatron_overlap.config import load_launch_config
from megatron_overlap.config.cluster import load_cluster_profile
from megatron_overlap.tools.compare.flops import ExpertShape
from megatron_overlap.tools.simulate.experts import ExpertLayer, expert_ops
from megatron_overlap.tools.simulate.job import ExpertOverlap, Experts, job_of
from megatron_overlap.tools.simulate.passes import Op, Pass
from megatron_overlap.tools.simulate.step import simulate_step
from megatron_overlap.tools.simulate.sweep import layer_activation_bytes, memory_of
from tests.tools.simulate.machines import job, machine

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "gpu"
SHAPE = ExpertShape(count=8, topk=2, ffn_hidden_size=512)
TOKENS, HIDDEN = 4096, 256
ROWS = TOKENS * SHAPE.topk


def passes(
    overlap: ExpertOverlap, ranks: int = 2, shared_us: float = 0.0, shape: ExpertShape = SHAPE, **changes: float
) -> list[Pass]:
    """Forward and backward of one layer."""
    layer = ExpertLayer(machine(**changes), Experts(shape, ranks, overlap), HIDDEN, False, TOKENS)
    shared = (Op("shared", shared_us),) if shared_us else ()
    return [Pass.of(expert_ops(layer, shared, backward)) for backward in (False, True)]


def message_us(gbps: float, ranks: int = 2) -> float:
    """One all-to-all: the rows for other ranks."""
    return ROWS * HIDDEN * 2 * (ranks - 1) / ranks / (gbps * 1e3)


def gemms_us(backward: bool) -> float:
    """Router and two linear layers of all rows, at 1 TFLOP/s."""
    return (2 if backward else 1) * 2 * HIDDEN * (ROWS * 2 * SHAPE.ffn_hidden_size + TOKENS * SHAPE.count) / 1e6


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("overlap", ["none", "p2p"])
def test_free_messages_leave_the_gemms(overlap: ExpertOverlap, ranks: int) -> None:
    """No row is lost or computed twice by the pieces of the plan."""
    for backward, each in enumerate(passes(overlap, ranks, gbps=1e12)):
        assert each.time_us == pytest.approx(gemms_us(bool(backward)))


def test_the_stock_path_exposes_both_all_to_alls() -> None:
    for backward, each in enumerate(passes("none", gbps=10.0)):
        assert each.expert_us == pytest.approx(2 * message_us(10.0))
        assert each.time_us == pytest.approx(gemms_us(bool(backward)) + 2 * message_us(10.0))


def test_long_computation_hides_all_messages() -> None:
    """Messages take a tenth of the computation. The rows of the own rank hide the first and the last messages."""
    for each in passes("p2p", gbps=10 * message_us(1.0) / gemms_us(False)):
        assert each.expert_us == pytest.approx(0.0, abs=1e-6)


def test_a_slow_link_bounds_the_pass() -> None:
    """Both all-to-alls, and little work at their ends."""
    slow = message_us(1.0) / gemms_us(False) / 200
    for each in passes("p2p", gbps=slow):
        assert 2 * message_us(slow) < each.time_us < 2.02 * message_us(slow)


def test_a_chunk_is_computed_after_it_arrived() -> None:
    """One message each way is too short to be split: its experts are between both."""
    rows, gbps = 32, 1e-3
    layer = ExpertLayer(machine(gbps=gbps), Experts(ExpertShape(2, 1, 512), 2, "p2p"), HIDDEN, False, 2 * rows)
    message, chunk, router = rows * HIDDEN * 2 / (gbps * 1e3), 4 * rows * HIDDEN * 512 / 1e6, 8 * rows * HIDDEN / 1e6
    assert Pass.of(expert_ops(layer, (), False)).time_us == pytest.approx(2 * message + chunk + router)


def test_shared_experts_are_computed_during_dispatch() -> None:
    """The link is as fast as the computation: what dispatch exposes is hidden by other work."""
    shape, gbps = replace(SHAPE, shared=512), message_us(1.0) / gemms_us(False)
    shared_us = gemms_us(False) / 4
    plugin, stock = (passes(overlap, 8, shared_us, shape, gbps=gbps)[0] for overlap in ("p2p", "none"))
    without = passes("p2p", 8, gbps=gbps)[0]
    assert plugin.expert_us < without.expert_us - 0.4 * shared_us
    assert stock.time_us == pytest.approx(passes("none", 8, gbps=gbps)[0].time_us + shared_us)


def test_auto_selects_the_stock_path_where_pieces_cost_more() -> None:
    for gbps, launch_us in ((1.0, 0.0), (1e6, 1000.0)):
        found = {
            each: sum(one.time_us for one in passes(each, gbps=gbps, launch_us=launch_us))
            for each in ("none", "p2p", "auto")
        }
        assert found["auto"] == min(found["none"], found["p2p"])
        assert (found["auto"] == found["p2p"]) == (launch_us == 0.0)


def experts_job(**changes: Any) -> Any:
    return job(experts=Experts(SHAPE, 4), data=4, **changes)


def test_parameters_and_memory_of_experts() -> None:
    """Two of eight experts per rank; replicas share the optimizer state of the other parameters alone."""
    dense, given = job(data=4), experts_job()
    expert, mlp = 2 * 1024 * 512, 2 * 1024 * 4096
    assert given.layer_parameters() == dense.layer_parameters() - mlp + 8 * 1024
    assert given.expert_parameters() == 2 * expert
    assert given.stage_parameters(0) - 8 * 2 * expert == pytest.approx(dense.stage_parameters(0) - 8 * (mlp - 8 * 1024))
    assert given.updated_parameters(0) - 8 * 2 * expert == pytest.approx((given.stage_parameters(0) - 16 * expert) / 4)
    assert memory_of(given).optimizer * 2**30 == pytest.approx(12 * given.updated_parameters(0))
    # Two experts of 512 a token, and its row twice for each, in place of an MLP of 4,096.
    saved = 1024 * 2 * (2 * 1024 + 4 * 1024 - 2 * 4096)
    assert layer_activation_bytes(given) - layer_activation_bytes(dense) == saved


def test_experts_reduce_gradients_among_ranks_that_share_them() -> None:
    """With as many ranks as experts have replicas the experts send none; the rest is that of the dense part."""
    model = machine(gbps=0.05)
    step = simulate_step(experts_job(data_overlap="none", global_batch_size=4), model)
    dense = experts_job().stage_parameters(0) - experts_job().stage_expert_parameters()
    assert step.data_us == pytest.approx(dense * 6 * 0.75 / 50.0, rel=1e-3)


def test_active_flops_take_the_simulated_time() -> None:
    given = experts_job(global_batch_size=4)
    step = simulate_step(given, machine(gbps=1e12))
    attention_extra = 0.5 * 2.0 * 1024**2 * 1024 / 1e6 * 8
    router = 3 * 2.0 * 1024 * 1024 * 8 / 1e6 * 8
    assert given.flops() / 4 / 1e6 == pytest.approx(step.compute_us - attention_extra - router, rel=1e-6)


@pytest.mark.parametrize("layout", ["mixtral_8x7b_tp4_ep8", "qwen3_30b_a3b_ep16", "deepseek_v3_like_pp10_ep64"])
def test_shipped_layouts_fit_and_expose_less_than_stock(layout: str) -> None:
    steps = {}
    for method in ("none", "auto"):
        given = job_of(load_launch_config(CONFIGS / layout / "overlap.yaml", [f"overlap.expert.method={method}"]))
        steps[method] = simulate_step(given, CostModel(load_cluster_profile("h100_dgx")))
    assert memory_of(given).total < 80
    assert 0 < steps["auto"].expert_us <= steps["none"].expert_us
    assert steps["auto"].step_us <= steps["none"].step_us


def test_mixtral_has_its_parameters() -> None:
    """46.7 billion; the vocabulary is padded."""
    config = CONFIGS / "mixtral_8x7b_tp4_ep8" / "overlap.yaml"
    given = job_of(load_launch_config(config))
    by_nccl = job_of(load_launch_config(config, ["overlap.transport=nccl"]))
    assert [job.experts is not None and job.experts.copies for job in (given, by_nccl)] == [True, False]
    dense = given.stage_parameters(0) - given.stage_expert_parameters()
    assert 4 * dense + 8 * given.stage_expert_parameters() == pytest.approx(46_702_792_704, rel=1e-4)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--expert-tensor-parallel-size", "2"], "--expert-tensor-parallel-size 2: the simulator models 1"),
        (
            ["--expert-model-parallel-size", "3"],
            "--num-experts 8: must be a multiple of --expert-model-par",
        ),
        (["--overlap-moe-expert-parallel-comm"], "--overlap-moe-expert-parallel-comm: the simulator does not model"),
    ],
)
def test_what_is_not_modelled(args: list[str], message: str) -> None:
    given = ["--num-experts", "8", *args] + ["--expert-tensor-parallel-size", "1"] * ("tensor" not in args[0])
    listed = ", ".join(f"'{each}'" for each in given)
    with pytest.raises(ValueError, match=message):
        job_of(load_launch_config(CONFIGS / "llama3_8b_tp8" / "overlap.yaml", [f"megatron_args=[{listed}]"]))
