"""Simulated steps: pipeline order and bubble, parts of the time, replicas, memory and layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.tools.simulate.layer import Layers
from megatron_overlap.tools.simulate.linear import LinearOverlap
from megatron_overlap.tools.simulate.step import StepTime, Unit, in_flight, order, simulate_step
from megatron_overlap.tools.simulate.sweep import layer_activation_bytes, layouts, memory_of, sweep
from tests.tools.simulate.machines import METHODS, job, machine


def parts(step: StepTime) -> float:
    waits = step.tensor_us + step.context_us + step.pipeline_us + step.data_us
    return step.compute_us + waits + step.optimizer_us


def test_order_of_one_forward_one_backward() -> None:
    def letters(stage: int) -> str:
        return " ".join(f"{'B' if unit.backward else 'F'}{unit.microbatch}" for unit in order(2, stage, 1, 3))

    assert letters(0) == "F0 F1 B0 F2 B1 B2"
    assert letters(1) == "F0 B0 F1 B1 F2 B2"


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (4, 1), (2, 2), (4, 3)])
def test_every_stage_runs_every_micro_batch_once_each_way(stages: int, chunks: int) -> None:
    for stage in range(stages):
        units = order(stages, stage, chunks, 8)
        assert len(units) == len(set(units)) == 2 * 8 * chunks
        for unit in units:
            if unit.backward:
                assert units.index(Unit(False, unit.chunk, unit.microbatch)) < units.index(unit)
    assert in_flight(stages, 0, 1, 8) == min(stages, 8)


def test_interleaving_needs_micro_batches_for_every_stage() -> None:
    with pytest.raises(ValueError, match="parallel.pipeline: 4: interleaving needs pipeline stages, and 6 micro-batch"):
        job(pipeline=4, virtual=2, global_batch_size=6)


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(2, 1, 8), (4, 1, 8), (4, 2, 8), (2, 4, 4), (8, 1, 8)])
def test_bubble_of_the_paper(stages: int, chunks: int, microbatches: int) -> None:
    """(p - 1) / (v m) of the ideal time: Narayanan et al., section 2.2, with free messages and a small embedding."""
    step = simulate_step(
        job(pipeline=stages, virtual=chunks, global_batch_size=microbatches, hidden_size=4096), machine(gbps=1e12)
    )
    ideal = step.step_us - step.pipeline_us - step.optimizer_us
    # The logits make the last stage 0.4 % longer, and the others wait for it.
    assert step.pipeline_us / ideal == pytest.approx((stages - 1) / (chunks * microbatches), rel=0.05)


def test_a_stage_without_interleaving_waits_for_its_message() -> None:
    """Two stages, two micro-batches: three messages on the critical path; two if stages did not wait."""
    split = job(pipeline=2, global_batch_size=2)
    message_us = 1024 * 1024 * 2 / 1e5
    free, costly = (simulate_step(split, machine(gbps=gbps)) for gbps in (1e12, 100.0))
    assert costly.step_us - free.step_us == pytest.approx(3 * message_us, rel=1e-6)


@pytest.mark.parametrize("data_overlap", ["none", "stock"])
@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 2}, {"pipeline": 4}, {"pipeline": 2, "virtual": 2}, {"context": 2}, {"data": 4}]
)
def test_the_parts_add_up_to_the_step(layout: dict[str, int], data_overlap: str) -> None:
    split = job(**layout, data_overlap=data_overlap)
    model = machine(latency_us=1.0, collective=0.1, copy=0.05, memory_gbps=100.0, launch_us=1.0)
    step = simulate_step(split, model)
    assert parts(step) == pytest.approx(step.step_us)
    assert step.compute_us > 0


def test_gradient_reduction_overlaps_the_backward() -> None:
    model = machine(gbps=0.05)
    hidden = simulate_step(job(data=4, hidden_size=4096), model)
    exposed = simulate_step(job(data=4, hidden_size=4096, data_overlap="none"), model)
    assert hidden.compute_us == pytest.approx(exposed.compute_us)
    assert hidden.step_us < exposed.step_us
    # Without overlap all of it is exposed: fp32 gradients and bf16 parameters, 3/4 of each.
    split = job(data=4, hidden_size=4096)
    assert exposed.data_us == pytest.approx(split.stage_parameters(0) * 6 * 0.75 / 50.0, rel=1e-3)


def test_parameters_arrive_in_layer_order() -> None:
    """An all-gather takes longer than the forward of a layer and hides all layers but the last."""
    split = job(data=4, hidden_size=4096, gradient_bytes=0)
    model = machine(gbps=0.05)
    gathered = split.stage_parameters(0) * 2 * 0.75 / 50.0
    forward = Layers(split, model).forward.time_us
    assert gathered / 8 > forward
    assert simulate_step(split, model).data_us == pytest.approx(gathered - 7 * forward, rel=1e-3)


def test_a_layer_by_hand() -> None:
    """Eight heads, hidden 1024, 1024 rows at 1 TFLOP/s: 12 h^2 parameters and causal attention."""
    layers = Layers(job(), machine())
    gemms = 2.0 * 1024 * 12 * 1024**2 / 1e6
    attention = 2.0 * 1024**2 * 1024 / 1e6
    assert layers.forward.time_us == pytest.approx(gemms + attention)
    assert layers.backward.time_us == pytest.approx(2 * gemms + 2.5 * attention)
    again = Layers(job(recompute="full"), machine())
    assert again.backward.time_us == pytest.approx(3 * gemms + 3.5 * attention)


def test_the_plugin_leaves_out_the_last_linear_layer_of_a_recomputed_layer() -> None:
    """FC2 has 4 h^2 of the 12 h^2 parameters. Each of two ranks has half of each GEMM."""
    gemms = 2.0 * 1024 * 12 * 1024**2 / 1e6
    given = job(recompute="full", tensor=2, tensor_overlap=LinearOverlap("p2p"))
    stock = replace(given, tensor_overlap=LinearOverlap("stock"))
    computed = replace(given, recompute_output="compute")
    model = machine(gbps=1e12)
    for other in (stock, computed):
        saved_us = Layers(other, model).backward.time_us - Layers(given, model).backward.time_us
        assert saved_us == pytest.approx(gemms / 2 * 4 / 12, rel=1e-3)


def test_flops_are_those_of_the_layers() -> None:
    """At the peak rate the counted FLOPs take the simulated time, except recomputed scores of the backward."""
    split = job(global_batch_size=1)
    step = simulate_step(split, machine())
    attention_extra = 0.5 * 2.0 * 1024**2 * 1024 / 1e6 * 8
    assert split.flops() / 1e6 == pytest.approx(step.compute_us - attention_extra, rel=1e-6)


def test_ring_attention_hides_messages_behind_steps() -> None:
    slow, fast = machine(gbps=0.001), machine(gbps=1000.0)
    split = job(context=4)
    assert Layers(split, fast).forward.context_us == pytest.approx(0.0)
    layers = Layers(split, slow)
    keys = 2 * 256 * 1024 * 2
    step_us = 2.0 * 1024**2 * 1024 / 1e6 / 16
    assert layers.forward.context_us == pytest.approx(3 * (keys / 1.0 - step_us))


def test_all_reduce_without_sequence_parallelism() -> None:
    plain = Layers(job(tensor=2, sequence_parallel=False), machine())
    rows = 1024 * 1024 * 2
    # Two all-reduces in the forward, nothing beside them; two in the backward beside wgrad.
    assert plain.forward.tensor_us == pytest.approx(2 * rows / 1e3)
    serial = Layers(job(tensor=2, sequence_parallel=False, tensor_overlap=LinearOverlap("serial")), machine())
    assert serial.backward.tensor_us == pytest.approx(2 * rows / 1e3)
    assert plain.backward.tensor_us == 0.0


def test_memory_by_hand() -> None:
    whole = job(hidden_size=1024, vocab_size=128)
    # A layer: inputs of two norms, QKV, FC1 (4 h), q, k, v, attention's output (4 h), 2 x 4 h of the MLP; bf16.
    assert layer_activation_bytes(whole) == 1024 * 1024 * (4 + 4 + 8) * 2
    parameters = 8 * (12 * 1024**2 + 2 * 1024) + 128 * 1024
    assert whole.stage_parameters(0) == parameters
    memory = memory_of(whole)
    assert memory.parameters_and_gradients == pytest.approx(parameters * 6 / 2**30)
    assert memory.optimizer == pytest.approx(parameters * 12 / 2**30)
    in_bf16 = memory_of(replace(whole, gradient_bytes=2))
    assert in_bf16.parameters_and_gradients == pytest.approx(parameters * 4 / 2**30)
    assert memory_of(job(data=4)).optimizer == pytest.approx(memory.optimizer / 4)
    assert memory_of(job(data=4, distributed_optimizer=False)).optimizer == pytest.approx(memory.optimizer)
    assert memory_of(job(recompute="full")).activations < memory.activations / 4


def test_the_first_stage_saves_most_activations() -> None:
    assert in_flight(4, 0, 1, 8) == 4
    assert in_flight(4, 3, 1, 8) == 1
    # Interleaved: 2 (p - 1) + (v - 1) p warm-up passes and the one in hand.
    assert in_flight(4, 0, 2, 8) == 2 * 3 + 4 + 1


@settings(max_examples=25)
@given(
    st.sampled_from(METHODS),
    st.sampled_from([{}, {"tensor": 2}, {"pipeline": 2}, {"data": 2}, {"tensor": 2, "pipeline": 2, "data": 2}]),
    st.floats(0.1, 100.0),
    st.floats(1.1, 5.0),
)
def test_faster_machines_are_never_slower(method: str, layout: dict[str, int], gbps: float, factor: float) -> None:
    split = job(**layout, tensor_overlap=LinearOverlap(method))  # type: ignore[arg-type]
    base = simulate_step(split, machine(gbps=gbps)).step_us
    assert simulate_step(split, machine(gbps=gbps * factor)).step_us <= base * (1 + 1e-9)
    assert simulate_step(split, machine(gbps=gbps, tflops=factor)).step_us <= base * (1 + 1e-9)


def test_layouts_use_all_ranks_and_differ() -> None:
    found = list(layouts(job(data=16, global_batch_size=16), 8))
    assert len(found) == len({one.label() for one in found}) > 10
    assert {one.world_size for one in found} == {16}
    assert any(one.virtual > 1 for one in found)
    assert {one.context for one in found} == {1, 2, 4, 8}


def test_sweep_is_sorted_and_fits_in_memory() -> None:
    whole = job(data=8, hidden_size=2048)
    roomy, tried = sweep(whole, machine())
    times = [one.time.step_us for one in roomy]
    assert times == sorted(times)
    assert len(times) == tried
    limit = sorted(one.memory.total for one in roomy)[len(times) // 2]
    tight, tried = sweep(whole, machine(memory_gib=limit))
    assert 0 < len(tight) < tried
    assert all(one.memory.total <= limit for one in tight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor": 3}, "model.num_attention_heads: 8: must be a multiple of parallel.tensor 3"),
        ({"pipeline": 3}, "model.num_layers: 8: must be a multiple of pipeline stages x chunks = 3"),
        ({"context": 3}, "train.seq_length: 1024: must be a multiple of 6"),
        ({"data": 3}, "train.global_batch_size: 8: must be a multiple of 3"),
        ({"virtual": 2}, "parallel.pipeline: 1: interleaving needs pipeline stages"),
    ],
)
def test_impossible_jobs_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        job(**changes)
