"""Times of elementwise operations and of host calls, against bytes and calls counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_overlap.autotune.cost_model import CostModel
from megatron_overlap.config import load_launch_config
from megatron_overlap.config.cluster import load_cluster_profile
from megatron_overlap.tools.simulate.job import Job, job_of
from megatron_overlap.tools.simulate.layer import Layers
from megatron_overlap.tools.simulate.linear import Linear, LinearOverlap
from megatron_overlap.tools.simulate.passes import Op
from megatron_overlap.tools.simulate.step import simulate_step
from tests.tools.simulate.machines import job, machine

# Of the job below: 1024 rows, eight heads, hidden 1024, MLP 4096, bf16. Bytes a microsecond at 1 GB/s: 1000.
ROWS = HIDDEN = 1024
KINDS = ("layer_norm", "add", "scores", "gelu", "loss", "accumulate", "clip", "update")


def times(ops: tuple[Op, ...]) -> dict[str, float]:
    """Microseconds by name, summed over the operations of one name."""
    names = {op.name for op in ops}
    return {name: sum(op.time_us for op in ops if op.name == name) for name in names}


def slow(*kinds: str) -> dict[str, tuple[float, float]]:
    return dict.fromkeys(kinds, (1.0, 2.0))


def test_operations_between_gemms_by_hand() -> None:
    whole = job(materializes_scores=True, fused_accumulation=False)
    layers = Layers(whole, machine(slow(*KINDS)))
    forward, backward = times(layers.forward.ops), times(layers.backward.ops)
    kib = ROWS * HIDDEN * 2 / 1e3  # one activation, at 1 GB/s
    assert forward["norm"] == pytest.approx(2 * 4 * kib)
    assert forward["add"] == pytest.approx(2 * 3 * kib)
    assert forward["activation"] == pytest.approx(2 * 4 * kib)
    assert forward["scores"] == pytest.approx(4 * 8 * kib)
    # Backward runs at twice the rate.
    assert backward["norm grad"] == pytest.approx(2 * 7 * kib / 2)
    assert backward["activation grad"] == pytest.approx(3 * 4 * kib / 2)
    assert backward["scores grad"] == pytest.approx(12 * 8 * kib / 2)
    # Main gradients have one rate: read and written in fp32, and a gradient in bf16 read.
    assert backward["accumulate grad"] == pytest.approx(whole.layer_parameters() * 10 / 1e3)
    logits = ROWS * 128
    assert times(layers.last[0].ops)["loss"] == pytest.approx(38 * logits / 1e3)
    assert times(layers.last[1].ops)["loss grad"] == pytest.approx(22 * logits / 2e3)
    assert times(layers.last[1].ops)["norm grad"] == pytest.approx(7 * kib / 2)
    for end in (layers.first, layers.last):
        assert times(end[1].ops)["accumulate grad"] == pytest.approx(128 * HIDDEN * 10 / 1e3)


def test_attention_products_with_materialized_scores() -> None:
    """2 forward and 4 backward products over all scores, 2 s^2 d each; fused attention: half of 2 and of 5."""
    product = 2.0 * ROWS**2 * HIDDEN / 1e6
    layers = Layers(job(materializes_scores=True), machine())
    assert times(layers.forward.ops)["attention"] == pytest.approx(2 * product)
    assert times(layers.backward.ops)["attention grad"] == pytest.approx(4 * product)
    fused = Layers(job(), machine())
    assert times(fused.forward.ops)["attention"] == pytest.approx(product)
    assert "scores" not in times(fused.forward.ops)
    again = Layers(job(materializes_scores=True, recompute="selective"), machine(slow("scores")))
    made_again = times(again.backward.ops)
    assert made_again["attention again"] == pytest.approx(2 * product)
    assert made_again["scores again"] == pytest.approx(times(again.forward.ops)["scores"])


def test_attention_products_without_a_rate_run_as_gemms() -> None:
    """The efficiency of a fused kernel does not apply to separate products."""
    model = CostModel(load_cluster_profile("h800"))
    peak = 989.4e6
    assert model.attention_us(1e9, fused=False) == pytest.approx(1e9 / (peak * 0.762) + 3)
    assert model.attention_us(1e9) == pytest.approx(1e9 / (peak * 0.6) + 3)


def test_keys_and_values_are_repeated_for_every_query_head() -> None:
    def layers(groups: int, rates: dict[str, tuple[float, float]]) -> Layers:
        whole = job(materializes_scores=True)
        return Layers(replace(whole, model=whole.model.model_copy(update={"num_query_groups": groups})), machine(rates))

    grouped = layers(2, slow("repeat"))
    # Keys and values: two of the eight heads are read, eight are written, 128 columns each.
    assert times(grouped.forward.ops)["repeat"] == pytest.approx(2 * ROWS * 128 * (2 + 8) * 2 / 1e3)
    assert times(grouped.backward.ops)["repeat grad"] == pytest.approx(2 * ROWS * 128 * (2 + 8) * 2 / 2e3)
    assert "repeat" not in times(layers(8, slow("repeat")).forward.ops)


def test_rotary_embedding_applies_to_queries_and_keys() -> None:
    whole = job()
    turning = replace(whole, model=whole.model.model_copy(update={"rotary": True, "num_query_groups": 2}))
    layers = Layers(turning, machine(slow("rotary")))
    assert times(layers.forward.ops)["rotary"] == pytest.approx(2 * ROWS * 128 * (8 + 2) * 2 / 1e3)


def test_fused_accumulation_adds_no_time() -> None:
    assert times(Layers(job(), machine(slow("accumulate"))).backward.ops)["accumulate grad"] == 0.0


def test_optimizer_time_by_hand() -> None:
    """Bytes per parameter: zero and check 8, norm and scale 12, update 30 in this profile."""
    whole = job(fused_accumulation=False)
    parameters = whole.stage_parameters(0)
    step = simulate_step(whole, machine(slow("clip", "update")))
    assert step.optimizer_us == pytest.approx(parameters * (8 + 12 + 30) / 1e3)
    # Of four replicas each updates a quarter, but zeroes and checks all; five sums go up and down a tree of two.
    split = simulate_step(job(data=4), machine(slow("clip", "update"), latency_us=1.0))
    assert split.optimizer_us == pytest.approx(parameters * (8 + 12 / 4 + 30 / 4) / 1e3 + 5 * 4)


def test_norm_gradients_are_reduced_over_tensor_ranks() -> None:
    split = job(tensor=2)
    step = simulate_step(split, machine())
    # Two norms a layer and the last one, weight and bias, fp32: half of it there and half of it back.
    assert step.optimizer_us == pytest.approx(4 * 2 * HIDDEN * (2 * 8 + 1) / 1e3)
    assert simulate_step(replace(split, sequence_parallel=False), machine()).optimizer_us == pytest.approx(
        0.0, abs=1e-6
    )


def test_embedding_backward_gathers_its_gradient() -> None:
    gathered = Layers(job(tensor=2), machine()).first[1].tensor_us
    assert gathered == pytest.approx(ROWS * HIDDEN * 2 / 2 / 1e3)
    for whole in (job(), job(tensor=2, sequence_parallel=False)):
        assert Layers(whole, machine()).first[1].tensor_us == 0.0


def test_an_overlapped_pass_has_more_host_calls() -> None:
    def calls_us(method: str) -> float:
        choice = LinearOverlap(method)  # type: ignore[arg-type]
        free, paid = (Layers(job(tensor=2, tensor_overlap=choice), machine(call_us=us)) for us in (0.0, 1.0))
        return paid.forward.time_us - free.forward.time_us

    assert calls_us("p2p") == pytest.approx(calls_us("stock") + 4 * 23)


def test_host_calls_of_every_micro_batch() -> None:
    """Calls of a GPT layer: 65 + 131; of embedding and logits: 130 + 10 + 66 + 50."""
    calls = 8 * (65 + 131) + 130 + 10 + 66 + 50
    for batches in (1, 4):
        whole = job(global_batch_size=batches)
        free, paid = (simulate_step(whole, machine(call_us=us)) for us in (0.0, 2.0))
        assert paid.step_us - free.step_us == pytest.approx(2.0 * batches * calls)
        assert paid.optimizer_us == pytest.approx(free.optimizer_us)
    model = job().model.model_copy(
        update={"rotary": True, "add_bias": False, "normalization": "RMSNorm", "untie_embeddings": True}
    )
    assert replace(job(), model=model).stage_tensors(0) == 6 * 8 + 3
    turned = simulate_step(replace(job(global_batch_size=1), model=model), machine(call_us=1.0))
    plain = simulate_step(replace(job(global_batch_size=1), model=model), machine())
    assert turned.step_us - plain.step_us == pytest.approx(calls + 8 * (54 + 44))


def test_host_calls_of_the_optimizer() -> None:
    """60 per step and 19 per tensor; none if the device hides host calls."""
    whole = job()
    # Twelve tensors a layer; words, positions, and weight and bias of the last norm.
    tensors = 12 * 8 + 4
    assert whole.stage_tensors(0) == tensors
    free, paid = (simulate_step(whole, machine(launch_us=us)).optimizer_us for us in (0.0, 3.0))
    # Clipping and update, as passes over memory, are launched too.
    assert paid - free == pytest.approx(3.0 * (60 + 19 * tensors + 2))
    queue = machine(launch_us=3.0)
    hidden = queue.profile.model_copy(update={"device": queue.profile.device.model_copy(update={"call_us": None})})
    assert simulate_step(whole, CostModel(hidden)).optimizer_us - free == pytest.approx(3.0 * 2)


def test_the_loss_is_reduced_over_tensor_ranks() -> None:
    layers = Layers(job(tensor=2), machine(latency_us=1.0))
    # Three all-reduces of a number a row, in fp32; a ring of two there and back.
    assert times(layers.last[0].ops)["loss sums"] == pytest.approx(3 * (2 * 1.0 + 4 * ROWS / 1e3))
    assert times(layers.first[0].ops)["batch"] == pytest.approx(4 * 1.0)
    alone = Layers(job(), machine(latency_us=1.0))
    assert not {"loss sums"} & set(times(alone.last[0].ops))
    assert not {"batch"} & set(times(alone.first[0].ops))


def test_compiled_hides_all_but_the_backward_of_column_layers() -> None:
    model = machine(latency_us=1.0, launch_us=1.0, gbps=20.0)
    link = model.link(4)

    def linear(choice: LinearOverlap) -> Linear:
        return Linear(model, link, choice, 4096, 1024, 1024)

    compiled, serial = (linear(LinearOverlap(method, save_gathered=True)) for method in ("compiled", "serial"))
    ours = linear(LinearOverlap("p2p"))
    # A quarter of the rows, read and written; nothing is gathered before.
    copy_us = model.memory_us(2 * 1024 * 1024 * model.item_bytes)
    assert copy_us > 1
    for name in ("column_forward", "row_backward"):
        theirs, plain = getattr(compiled, name)(), getattr(ours, name)()
        assert theirs.time_us == pytest.approx(plain.time_us + copy_us)
        assert theirs.exposed_us == pytest.approx(plain.exposed_us)
    assert compiled.row_forward() == ours.row_forward()
    assert compiled.column_backward() == serial.column_backward()
    assert ours.column_backward().time_us < serial.column_backward().time_us


def test_messages_of_compiled_follow_the_copy() -> None:
    """The copy also adds to a gather that takes longer than the GEMM."""
    model = machine(latency_us=1.0, launch_us=1.0, gbps=0.2)
    compiled, ours = (
        Linear(model, model.link(4), LinearOverlap(method), 4096, 1024, 1024).column_forward()
        for method in ("compiled", "p2p")
    )
    copy_us = model.memory_us(2 * 1024 * 1024 * model.item_bytes)
    assert compiled.time_us == pytest.approx(ours.time_us + copy_us, rel=1e-9)


def test_recomputation_of_a_compiler() -> None:
    def again(recompute: str, **changes: bool) -> list[str]:
        model = job().model.model_copy(update=changes)
        layers = Layers(replace(job(), model=model, recompute=recompute), machine())  # type: ignore[arg-type]
        return [
            op.name.removesuffix(" again") for op in layers.backward.ops if op.name.endswith(" again") and op.time_us
        ]

    assert again("needed") == ["norm", "qkv", "attention", "proj", "add", "norm", "fc1", "activation"]
    assert again("half", rotary=True) == ["norm", "rotary", "norm", "activation", "keys", "gate"]
    assert again("none") == []


def test_jobs_of_launch_configs() -> None:
    cpu = job_of(load_launch_config("configs/cpu/gpt_dp2/netlab.yaml"))
    assert (cpu.materializes_scores, cpu.fused_accumulation, cpu.bucket_parameters) == (True, False, 800_000)
    cuda: Job = job_of(load_launch_config("configs/gpu/llama3_8b_tp8/overlap.yaml"))
    assert (cuda.materializes_scores, cuda.fused_accumulation, cuda.bucket_parameters) == (False, True, None)
    apart = load_launch_config("configs/gpu/llama3_8b_tp8/overlap.yaml", ["train.gradient_accumulation_fusion=false"])
    assert not job_of(apart).fused_accumulation


def test_small_buckets_start_earlier() -> None:
    """The backward hides all but the gradients of the first layers; one bucket would start at its end."""
    whole = job(data=4, data_overlap="stock")
    one, many = (simulate_step(replace(whole, bucket_parameters=size), machine()) for size in (None, 1))
    assert many.data_us < 0.5 * one.data_us
