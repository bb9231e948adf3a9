"""Messages of the plugin on GPUs: by copy engines inside a node, by NCCL's kernels elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_overlap.autotune.cost_model import CostModel
from megatron_overlap.config import load_launch_config
from megatron_overlap.config.cluster import ClusterProfile, load_cluster_profile
from megatron_overlap.tools.simulate.experts import ExpertLayer, _played
from megatron_overlap.tools.simulate.job import Experts, job_of
from megatron_overlap.tools.simulate.layer import Layers
from megatron_overlap.tools.simulate.linear import Linear, LinearOverlap, fastest
from megatron_overlap.tools.simulate.split import _PartLayers, layer_passes
from tests.ops.tensor_parallel.device_layers import DIRECTIONS, GPU, LAYERS, MODELS, Case, record, times
from tests.tools.simulate.machines import METHODS, job, number, profile
from tests.tools.simulate.test_experts import SHAPE

ROOT = Path(__file__).resolve().parents[3]
ROWS, WIDTH, RANKS = 1024, 512, 4
# A GEMM of all rows at 1 TFLOP/s, and the rows of one rank at 10 GB/s.
GEMM_US = 2.0 * ROWS * WIDTH * WIDTH / 1e6
SLICE_US = ROWS / RANKS * WIDTH * 2 / 1e4
COPY_US, FURTHER_US, FLAG_US, NCCL_US = 7.0, 2.0, 1.0, 5.0
GPU_TILES = [dict(zip(("rows", "columns", "rate"), tile, strict=True)) for tile in GPU.tiles]


def copy_engines(copy_us: float, further_us: float, flag_us: float) -> dict[str, Any]:
    return {"copy_us": number(copy_us), "further_us": number(further_us), "flag_us": number(flag_us)}


def engines_of_the_model() -> dict[str, Any]:
    """Those of the device model."""
    return copy_engines(GPU.latency_s * 1e6, GPU.further_copy_s * 1e6, GPU.word_s * 1e6)


def gpu(*, engines: bool = True, enqueue_us: float = 0.0, **changes: Any) -> CostModel:
    """A GPU with links of 10 GB/s. Besides bytes a copy takes 7 us, each further one of a batch 2, a flag 1, NCCL 5."""
    tree = profile(**{"gbps": 10.0, "latency_us": NCCL_US, **changes}).model_dump(by_alias=True)
    tree["device"] |= {"call_us": None, "enqueue_us": number(enqueue_us)}
    tree["inside"]["copy_engines"] = (
        {"copy_us": number(COPY_US), "further_us": number(FURTHER_US), "flag_us": number(FLAG_US)} if engines else None
    )
    return CostModel(ClusterProfile.model_validate(tree))


def linear(model: CostModel, ranks: int = RANKS, method: str = "p2p", **overlap: Any) -> Linear:
    choice = LinearOverlap(method, **overlap)  # type: ignore[arg-type]
    return Linear(model, model.link(ranks), choice, ROWS, WIDTH, WIDTH)


def test_only_groups_inside_a_node_have_copy_engines() -> None:
    model = gpu(devices=4)
    assert (model.link(4).copy_us, model.link(4).flag_us) == (COPY_US, FLAG_US)
    assert model.link(8).copy_us is None
    assert model.link(2, stride=4).copy_us is None
    assert model.link(2, stride=2).copy_us == COPY_US
    assert gpu(engines=False).link(4).copy_us is None


def test_a_slow_link_carries_copies_one_after_another() -> None:
    """A copy and a batch of two take their fixed times, bytes and flags; then a last GEMM, or a sum, remains."""
    model = gpu(tflops=1e6)
    messages_us = 2 * COPY_US + FURTHER_US + 3 * (2 * FLAG_US + SLICE_US)
    assert linear(model).column_forward().time_us == pytest.approx(messages_us + FLAG_US, rel=1e-3)
    # The computing queue waits for the flag of the last message before the last sum.
    assert linear(model).row_forward().time_us == pytest.approx(messages_us + FLAG_US, rel=0.01)
    # The gather of the input precedes the partial sums.
    assert linear(model).column_backward().time_us == pytest.approx(2 * messages_us + FLAG_US, rel=0.01)


def test_a_fast_link_leaves_the_flags_of_the_computing_queue() -> None:
    """One flag is counted for each GEMM that waits for messages, and one for each of the two sums of received rows."""
    model = gpu(gbps=1e6)
    assert linear(model).column_forward().time_us == pytest.approx(GEMM_US + 2 * FLAG_US, rel=1e-3)
    assert linear(model).row_forward().time_us == pytest.approx(GEMM_US + 2 * FLAG_US, rel=1e-3)
    assert linear(model).row_backward().time_us == pytest.approx(2 * GEMM_US + 2 * FLAG_US, rel=1e-3)
    assert linear(model).column_backward().time_us == pytest.approx(2 * GEMM_US + 5 * FLAG_US, rel=1e-3)


def test_the_second_copy_to_a_peer_waits_for_no_free_buffer() -> None:
    """Two ranks send two chunks; see `default_chunks`."""
    run = linear(gpu(tflops=1e6), ranks=2).column_forward()
    assert run.num_messages == 2
    moved_us = 2 * COPY_US + 3 * FLAG_US + 2 * SLICE_US
    assert run.time_us == pytest.approx(moved_us + FLAG_US, rel=1e-3)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layer", ["qkv", "proj"])
def test_copies_flags_and_times_are_those_of_the_device_model(
    monkeypatch: pytest.MonkeyPatch, layer: str, direction: str
) -> None:
    """Against the operations that the transport enqueues. The device model has no time for the writes of GEMM tiles."""
    case = Case(layer, 4096, direction)
    devices = record(monkeypatch, case, "copies")
    model = gpu(
        tflops=GPU.num_sms * GPU.sm_flops / 1e12,
        gbps=GPU.link / 1e9,
        launch_us=GPU.latency_s * 1e6,
        memory_gbps=GPU.memory / 1e9,
    )
    tree = model.profile.model_dump(by_alias=True)
    tree["device"]["gemm"] |= {"processors": GPU.num_sms, "tiles": GPU_TILES}
    tree["inside"]["copy_engines"] = engines_of_the_model()
    model = CostModel(ClusterProfile.model_validate(tree))
    hidden, features = MODELS["8b"].hidden, MODELS["8b"].features(layer) // 8
    shape = (features, hidden) if LAYERS[layer] == "column" else (hidden, features)
    run = getattr(Linear(model, model.link(8), LinearOverlap("p2p"), 4096, *shape), f"{LAYERS[layer]}_{direction}")()
    copies = [op for op in devices[0].ops if op.kind == "copy"]
    assert run.num_messages == sum(len(op.label) for op in copies)
    assert run.sent_bytes == pytest.approx(sum(op.label.total() for op in copies))
    # Each message waits for a free buffer at the sender, and for its flag at the receiver.
    assert 2 * run.num_messages == sum(op.kind == "reach" for op in devices[0].ops)
    assert run.time_us == pytest.approx(times(devices).eight * 1e6, rel=0.07)


def test_nccl_takes_sms_and_copies_do_not() -> None:
    given = {"copy": 0.05, "collective": 0.5, "gbps": 3.0}
    by_copies, by_nccl = (linear(gpu(engines=engines, **given)).column_forward() for engines in (True, False))
    assert by_nccl.compute_us > 1.2 * by_copies.compute_us
    # A group with one rank on each node has no copy engines.
    assert linear(gpu(devices=1, **given)).column_forward().compute_us > 1.2 * by_copies.compute_us


def test_a_config_may_leave_the_copy_engines_out() -> None:
    config = ROOT / "configs/gpu/llama3_8b_tp8/overlap.yaml"

    def copies(*overrides: str) -> bool:
        return job_of(load_launch_config(config, overrides)).tensor_overlap.copies

    assert copies()
    assert not copies("overlap.transport=nccl")
    given = {"collective": 0.5, "gbps": 3.0}
    assert linear(gpu(**given), copies=False).column_backward() == linear(gpu(engines=False, **given)).column_backward()


def test_messages_on_nccl_follow_one_another() -> None:
    model = gpu(engines=False, tflops=1e6, launch_us=0.25)
    run = linear(model, chunks_per_rank=1).column_forward()
    assert run.arrived_us[0] == pytest.approx([(k + 1) * (NCCL_US + 0.25 + SLICE_US) for k in range(3)])


def test_the_sum_of_received_terms_has_its_rate() -> None:
    """Three terms of 2 bytes read, own rows read and written. Two sums write and read an fp32 total."""
    shard = ROWS / RANKS * WIDTH
    slow = gpu(tflops=1e6, gbps=1e6, elementwise={"sum": (1.0, 1.0)})  # type: ignore[arg-type]
    for depth, moved in ((WIDTH, (2 * 2 + 2 + 4) + (2 + 4 + 2)), (4 * WIDTH, 3 * 2 + 2 + 2)):
        layer = Linear(slow, slow.link(RANKS), LinearOverlap("p2p"), ROWS, WIDTH, depth)
        assert layer.row_forward().time_us == pytest.approx(shard * moved / 1e3, rel=0.1)


def test_weight_gradients_read_a_copy_of_the_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where dgrad has few features, the weight gradient is computed in two GEMMs."""
    model = gpu(tflops=1e6, gbps=1e6, memory_gbps=1.0)
    copy_us = 2 * ROWS / RANKS * WIDTH * 2 / 1e3
    layer = linear(model)
    forward, two_us = layer.column_forward().time_us, 2 * model.gemm_us(WIDTH, WIDTH, ROWS // 2)
    assert two_us > 1.1 * layer.wgrad_us
    assert layer.row_backward().time_us - forward == pytest.approx(two_us + copy_us, rel=1e-3)
    monkeypatch.setattr("megatron_overlap.tools.simulate.linear.SHALLOW_DEPTH", WIDTH - 1)
    assert layer.row_backward().time_us - forward == pytest.approx(layer.wgrad_us + copy_us, rel=1e-3)


@pytest.mark.parametrize("method", [each for each in METHODS if each != "p2p"])
def test_other_methods_do_not_depend_on_copy_engines(method: str) -> None:
    given = linear(gpu(copy=0.1), method=method)
    other = linear(gpu(engines=False, copy=0.1), method=method)
    for one in ("column_forward", "row_forward", "column_backward", "row_backward"):
        assert getattr(given, one)().time_us == getattr(other, one)().time_us


def test_a_pass_lasts_as_long_as_the_host_enqueues_its_messages() -> None:
    """Four linear layers, three messages each in forward; the two column-parallel ones gather again in backward."""
    given = job(tensor=4, tensor_overlap=LinearOverlap("p2p"))
    fast = {"tflops": 1e6, "gbps": 1e6}
    layers = Layers(given, gpu(enqueue_us=1000.0, **fast))
    assert layers.forward.time_us == pytest.approx(4 * 3 * 1000)
    assert layers.backward.time_us == pytest.approx(6 * 3 * 1000)
    hidden = Layers(given, gpu(enqueue_us=0.001, **fast))
    assert hidden.forward.time_us == Layers(given, gpu(**fast)).forward.time_us
    stock = replace(given, tensor_overlap=LinearOverlap("stock"))
    assert Layers(stock, gpu(enqueue_us=1000.0, **fast)).forward.time_us < 1000


def test_auto_selects_stock_if_the_host_takes_longer() -> None:
    for enqueue_us, selected in ((0.0, "p2p"), (1000.0, "stock")):
        layer = linear(gpu(enqueue_us=enqueue_us, gbps=1.0), method="auto")
        assert fastest(layer, column=True).overlap.method == selected


def test_split_micro_batches_run_on_nccl() -> None:
    """Batch overlap uses NCCL's collectives: eight rings of three hops in forward, which take no sum afterwards."""
    given = job(tensor=4, micro_batch_size=2, split="batch")
    slow = {"tflops": 1e6, "gbps": 1.0}
    forward = layer_passes(given, gpu(**slow))[0]
    bytes_us = 8 * 3 * 1024 / 4 * 1024 * 2 / 1e3
    assert forward.time_us == pytest.approx(bytes_us + 8 * 3 * NCCL_US, rel=0.001)
    assert layer_passes(given, gpu(engines=False, **slow))[0] == forward
    free, taken = (layer_passes(given, gpu(collective=share, gbps=3.0))[0].time_us for share in (0.0, 0.5))
    assert taken > 1.05 * free
    hosted = layer_passes(given, gpu(enqueue_us=1e5, **slow))[0]
    assert hosted.time_us == pytest.approx(8 * 1e5)
    parts = _PartLayers(given, gpu(memory_gbps=1.0))
    elements = given.rows * given.model.hidden_size / 4
    # The norm moves four elements for each of its own, the residual three. No kernel adds the received rows.
    assert parts.steps(keys_before=0, backward=False)[0].start == pytest.approx((4 + 3) * elements * 2 / 1e3)


def test_copy_engines_carry_large_gathers_of_parts() -> None:
    """A rank has 2 MiB of each part: four batches of three copies in forward, and four reduce-scatters of NCCL."""
    given = job(tensor=4, micro_batch_size=8, global_batch_size=24, split="batch")
    slow = {"tflops": 1e6, "gbps": 1.0}
    by_copies, by_nccl = (layer_passes(given, gpu(engines=engines, **slow))[0].time_us for engines in (True, False))
    assert by_copies - by_nccl == pytest.approx(4 * (COPY_US + 2 * FURTHER_US + 6 * FLAG_US - 3 * NCCL_US), rel=0.01)
    left_out = replace(given, tensor_overlap=LinearOverlap("p2p", copies=False))
    assert layer_passes(left_out, gpu(**slow))[0].time_us == pytest.approx(by_nccl)
    smaller = replace(given, micro_batch_size=6)
    assert layer_passes(smaller, gpu(**slow)) == layer_passes(smaller, gpu(engines=False, **slow))
    hosted = layer_passes(given, gpu(enqueue_us=1e6, **slow))[0]
    assert hosted.time_us == pytest.approx((4 + 4) * 1e6 + 4 * 2 * FURTHER_US)
    free, taken = (layer_passes(given, gpu(collective=share, copy=0.0, gbps=3.0))[0].time_us for share in (0.0, 0.5))
    only_nccl = layer_passes(given, gpu(engines=False, collective=0.5, gbps=3.0))[0].time_us
    assert free < taken < only_nccl


def experts(*, copies: bool, **changes: Any) -> Any:
    return _played(ExpertLayer(gpu(**changes), Experts(SHAPE, 4, "p2p", copies), 1024, False, 512), 0.0, False)


@pytest.mark.parametrize(("copies", "engines"), [(False, True), (True, False)])
def test_experts_over_nccl(copies: bool, engines: bool) -> None:
    free, slow = (
        experts(copies=copies, engines=engines, tflops=1e6, latency_us=NCCL_US + more_us) for more_us in (0, 100)
    )
    assert slow.time_us - free.time_us == pytest.approx(100 * free.num_messages, rel=0.01)
    busy, idle = (experts(copies=copies, engines=engines, collective=share, gbps=0.1) for share in (0.5, 0.0))
    assert busy.compute_us > 1.1 * idle.compute_us


def test_experts_over_copies() -> None:
    """Each message has a flag, the first one to each of three peers two; then the flag of the last result remains."""
    run = experts(copies=True, tflops=1e6)
    # In dispatch a message has two tensors.
    copies_us = (COPY_US + FURTHER_US / 2) * run.num_messages
    moved_us = run.sent_bytes / 1e4 + copies_us + FLAG_US * (run.num_messages + 2 * 3)
    assert run.time_us == pytest.approx(moved_us + FLAG_US, rel=1e-3)
    assert experts(copies=True, tflops=1e6, latency_us=1e3).time_us == run.time_us


ONE_H200 = json.loads((ROOT / "docs/results/first_contact.json").read_text())["link 1"]["rows"]
FORWARDS = [row for row in ONE_H200 if row.get("share") == 8 and row["shape"].startswith("llama")]


@pytest.mark.parametrize("row", FORWARDS, ids=lambda row: f"{row['shape']} {row['op']}")
def test_forward_over_copies_is_as_long_as_on_one_h200(monkeypatch: pytest.MonkeyPatch, row: dict[str, Any]) -> None:
    """The present schedule on a link as fast as eight of PCIe, with cuBLAS at the rate of short runs (h200.yaml).

    That run had a copy and a GEMM for each slice. It summed the received rows after the last message, in a kernel of
    its own, which wrote fp32.
    """
    monkeypatch.setattr("megatron_overlap.tools.simulate.linear.default_slices_per_gemm", lambda *_, hidden: 1)
    monkeypatch.setattr("megatron_overlap.tools.simulate.linear.SHALLOW_DEPTH", 0)
    tree = load_cluster_profile("h200").model_dump(by_alias=True)
    tree["device"]["gemm"]["efficiency"]["value"] = 0.82
    tree["inside"]["copy_gbps"]["value"] = 8 * 48.6
    model = CostModel(ClusterProfile.model_validate(tree))
    layer = Linear(model, model.link(8), LinearOverlap("p2p"), *row["mnk"])
    gathers = row["op"] == "ag"
    time_us = layer.column_forward().time_us if gathers else layer.row_forward().time_us
    more_us = 0.0 if gathers else model.memory_us(2 * 4 * layer.rows / 8 * layer.out_features, "sum")
    assert (time_us + more_us) / 1e3 == pytest.approx(row["ms"]["slice by slice"], rel=0.07)
