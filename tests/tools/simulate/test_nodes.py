"""Groups over several nodes: copies inside, NCCL's messages between, and what the plugin refuses there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.autotune.cost_model import CostModel
from megatron_overlap.config import ConfigError
from megatron_overlap.config.cluster import ClusterProfile, load_cluster_profile
from megatron_overlap.schedules.gather_scatter import Nodes
from megatron_overlap.tools.simulate.command import simulate
from megatron_overlap.tools.simulate.layer import Layers
from megatron_overlap.tools.simulate.linear import Linear, LinearOverlap, fastest, unsupported_reason
from megatron_overlap.tools.simulate.split import layer_passes
from megatron_overlap.tools.simulate.step import simulate_step
from tests.ops.tensor_parallel.device_layers import (
    DIRECTIONS,
    GPU,
    LAYERS,
    MODELS,
    Case,
    is_message,
    record,
    sent_bytes,
    times,
)
from tests.tools.simulate.machines import job, number
from tests.tools.simulate.test_copy_engines import COPY_US, FLAG_US, FURTHER_US, GPU_TILES, NCCL_US, copy_engines, gpu

CONFIG = Path(__file__).resolve().parents[3] / "configs/gpu/llama3_405b_tp8_pp9/overlap.yaml"
PASSES = "column_forward", "row_forward", "column_backward", "row_backward"
WIDTH = 512


def nics(model: CostModel, gbps: float) -> CostModel:
    """The machine with another rate of its NICs."""
    tree = model.profile.model_dump(by_alias=True)
    tree["between"] |= {"copy_gbps": number(gbps), "collective_gbps": number(gbps)}
    return CostModel(ClusterProfile.model_validate(tree))


def machine(nodes: Nodes, nic_gbps: float = 1.0, **changes: Any) -> CostModel:
    """`gpu` with NVLink of 10 GB/s and a NIC for each rank, on nodes of this size."""
    return nics(gpu(devices=nodes.per_node, nics=nodes.per_node, **changes), nic_gbps)


def linear(model: CostModel, ranks: int, rows: int = 1024, **overlap: Any) -> Linear:
    return Linear(model, model.link(ranks), LinearOverlap(**overlap), rows, WIDTH, WIDTH)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layer", ["qkv", "proj"])
@pytest.mark.parametrize(("nodes", "rows"), [(Nodes(2, 4), 4096), (Nodes(3, 2), 6144)])
def test_the_schedule_is_that_of_the_package(
    monkeypatch: pytest.MonkeyPatch, nodes: Nodes, rows: int, layer: str, direction: str
) -> None:
    """Against what the package enqueues on a device model. That has no time for the writes of GEMM tiles."""
    devices = record(monkeypatch, Case(layer, rows, direction), nodes=nodes)
    latency_us = GPU.latency_s * 1e6
    model = gpu(
        tflops=GPU.num_sms * GPU.sm_flops / 1e12,
        gbps=GPU.link / 1e9,
        latency_us=0.0,
        launch_us=latency_us,
        memory_gbps=GPU.memory / 1e9,
        collective=GPU.nccl_sms / GPU.num_sms,
        devices=nodes.per_node,
        nics=nodes.per_node,
    )
    tree = model.profile.model_dump(by_alias=True)
    tree["device"]["gemm"] |= {"processors": GPU.num_sms, "tiles": GPU_TILES}
    tree["inside"]["copy_engines"] = copy_engines(latency_us, GPU.further_copy_s * 1e6, GPU.word_s * 1e6)
    model = CostModel(ClusterProfile.model_validate(tree))
    hidden, features = MODELS["8b"].hidden, MODELS["8b"].features(layer) // nodes.num_ranks
    shape = (features, hidden) if LAYERS[layer] == "column" else (hidden, features)
    over_nodes = Linear(model, model.link(nodes.num_ranks), LinearOverlap("p2p"), rows, *shape)
    run = getattr(over_nodes, f"{LAYERS[layer]}_{direction}")()
    copies = sum(len(op.label) for op in devices[0].ops if op.kind == "copy" and is_message(op))
    between = sum(len(op.sends) for op in devices[0].ops)
    assert between == (nodes.num_nodes - 1) * (2 if (layer, direction) == ("qkv", "backward") else 1)
    assert run.num_messages == copies + between
    assert run.sent_bytes == pytest.approx(sent_bytes(devices[0]))
    assert run.time_us == pytest.approx(times(devices).eight * 1e6, rel=0.12)


@pytest.mark.parametrize("nodes", [Nodes(2, 4), Nodes(3, 2), Nodes(2, 2)])
def test_slow_nics_leave_one_gather_inside_a_node(nodes: Nodes) -> None:
    """Messages along the rail one after another, then the copies inside the last node, or all copies before."""
    model, ranks = machine(nodes, 0.01, tflops=1e6), nodes.num_ranks
    layer = linear(model, ranks, rows=960, chunks_per_rank=1)
    shard = 960 / ranks * WIDTH * 2
    rails_us = (nodes.num_nodes - 1) * (NCCL_US + shard / 10)
    # Of three copies, two are a batch.
    batches_us = COPY_US if nodes.per_node == 2 else 2 * COPY_US + FURTHER_US
    copies_us = (nodes.per_node - 1) * (2 * FLAG_US + shard / 1e4) + batches_us
    assert layer.column_forward().time_us == pytest.approx(rails_us + copies_us + FLAG_US, rel=1e-4)
    assert layer.row_forward().time_us == pytest.approx(copies_us + FLAG_US + rails_us, rel=1e-4)
    # The gather of the input, then the sums.
    assert layer.column_backward().time_us == pytest.approx(2 * rails_us + copies_us + FLAG_US, rel=0.01)


def test_messages_are_in_the_order_of_the_package() -> None:
    """Column-parallel backward. The gather of the input inside the own node waits for no sums of other nodes."""
    slow = linear(machine(Nodes(3, 2), 0.01, tflops=1e6), 6, rows=960, chunks_per_rank=1).column_backward()
    rail_us = NCCL_US + 960 / 6 * WIDTH * 2 / 10
    # The sums precede the second message of the gather, as `NodesGather.finish` enqueues it.
    arrived = [slow.arrived_us[0][number] for number in (0, 2, 4, 7)]
    assert arrived == pytest.approx([rail_us * count for count in (1, 2, 3, 4)], rel=0.01)
    fast = linear(machine(Nodes(2, 2), 1e6, gbps=1e6, tflops=0.1), 4, chunks_per_rank=1).column_backward()
    gathered, partial, summed, own, _ = fast.arrived_us[0][:5]
    assert gathered < partial < own < summed


def test_fast_links_leave_computation() -> None:
    """Two nodes of two: the gather inside the second node starts when its rows have arrived, as in `NodesGather`."""
    nodes = Nodes(2, 2)
    model = machine(nodes, 1e6, gbps=1e6, latency_us=0.0)
    layer, gemm_us = linear(model, 4, chunks_per_rank=1), 2.0 * 1024 * WIDTH * WIDTH / 1e6
    for name, gemms, flags in (("column_forward", 1, 2), ("row_forward", 1, 2), ("row_backward", 2, 2)):
        run = getattr(layer, name)()
        assert run.time_us == pytest.approx(gemms * gemm_us + flags * FLAG_US, rel=1e-3), name
        assert run.exposed_us == pytest.approx(0.0, abs=0.1)


def test_only_messages_between_nodes_take_sms() -> None:
    nodes = Nodes(2, 2)
    free, taken = (linear(machine(nodes, 100.0, collective=share), 4).row_forward().compute_us for share in (0.0, 0.5))
    # The message is hidden by the GEMM of the own rows, which takes a quarter of the time or more.
    message_us = NCCL_US + 256 * WIDTH * 2 / 1e5
    assert taken - free == pytest.approx(0.5 * message_us, rel=0.2)
    copying = linear(machine(Nodes(1, 4), collective=0.5), 4).row_forward().compute_us
    assert copying == linear(machine(Nodes(1, 4)), 4).row_forward().compute_us


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("method", ["stock", "p2p", "fused", "sliced", "userbuffers"])
def test_one_node_is_a_group_without_nodes(method: str, name: str) -> None:
    """Whatever its NICs, and however many other ranks the node has."""
    runs = [
        getattr(linear(machine(Nodes(1, devices), nic), 4, method=method), name)()
        for devices, nic in ((4, 1.0), (4, 0.01), (8, 1.0))
    ]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize(
    ("devices", "ranks", "overlap"),
    [(1, 4, {}), (4, 6, {}), (8, 12, {}), (2, 4, {"copies": False})],
    ids=["one rank on each node", "4 + 2", "8 + 4", "transport nccl"],
)
def test_nccl_carries_all_messages_where_the_plugin_has_no_copies(
    devices: int, ranks: int, overlap: dict[str, Any]
) -> None:
    model = machine(Nodes(1, devices), tflops=1e6, collective=0.5)
    run = linear(model, ranks, rows=960, chunks_per_rank=1, **overlap).column_forward()
    message_us = NCCL_US + 960 / ranks * WIDTH * 2 / 1e3
    assert run.time_us == pytest.approx((ranks - 1) * message_us, rel=1e-3)
    assert run.num_messages == ranks - 1


def test_methods_that_need_one_node() -> None:
    link = machine(Nodes(2, 4)).link(8)
    assert unsupported_reason("fused", link) is None
    for method in ("userbuffers", "compiled"):
        with pytest.raises(ValueError, match=f"method: {method}: 8 ranks are on several nodes"):
            linear(machine(Nodes(2, 4)), 8, method=method)
    assert "several ranks on each node" in str(unsupported_reason("fused", machine(Nodes(1, 1)).link(8)))
    # The plugin runs p2p where the ranks share no memory.
    uneven = machine(Nodes(1, 3))
    given = job(tensor=4, tensor_overlap=LinearOverlap("fused"))
    p2p = replace(given, tensor_overlap=LinearOverlap("p2p"))
    assert Layers(given, uneven).backward == Layers(p2p, uneven).backward


def test_fused_kernels_inside_nodes() -> None:
    """The GEMM of each node is one kernel, and a message passes between the nodes before the sums of the own node."""
    model = machine(Nodes(2, 2), 1e6, gbps=1e6, latency_us=0.0, launch_us=1.0)
    layer, gemm_us = linear(model, 4, method="fused"), 2.0 * 1024 * WIDTH * WIDTH / 1e6
    assert layer.column_forward().time_us == pytest.approx(gemm_us + 2, rel=0.01)
    flat = machine(Nodes(2, 2), 0.01, tflops=1e6)
    # One shard passes along the rail, not two shards to both ranks of the other node.
    assert linear(flat, 4, method="fused").column_forward().time_us < 1.1 * 1024 / 4 * WIDTH * 2 / 10


@settings(max_examples=30)
@given(
    st.sampled_from([Nodes(2, 4), Nodes(3, 2), Nodes(2, 2), Nodes(4, 2), Nodes(2, 3), Nodes(1, 4)]),
    st.sampled_from(["stock", "p2p", "fused", "sliced"]),
    st.sampled_from([96, 1000, 8192]),
    st.floats(0.05, 20.0),
    st.floats(1.01, 10.0),
)
def test_faster_nics_are_not_slower(nodes: Nodes, method: str, rows: int, gbps: float, factor: float) -> None:
    slow, fast = (
        linear(machine(nodes, rate, launch_us=1.0, collective=0.1, copy=0.05), nodes.num_ranks, rows, method=method)
        for rate in (gbps, gbps * factor)
    )
    for name in PASSES:
        assert getattr(fast, name)().time_us <= getattr(slow, name)().time_us * (1 + 1e-9), name


@pytest.mark.parametrize("method", ["stock", "p2p", "fused", "auto"])
def test_more_nodes_are_not_faster(method: str) -> None:
    """The same ranks of H100, each with its NIC, an eighth of NVLink."""
    tree = load_cluster_profile("h100_dgx").model_dump(by_alias=True)
    steps = []
    for per_node in (12, 6, 4, 3, 2, 1):
        tree |= {"devices_per_node": per_node, "between": tree["between"] | {"nics_per_node": per_node}}
        model = CostModel(ClusterProfile.model_validate(tree))
        shape = {"num_attention_heads": 12, "hidden_size": 6144, "seq_length": 4092, "global_batch_size": 2}
        given = job(tensor=12, tensor_overlap=LinearOverlap(method), **shape)  # type: ignore[arg-type]
        steps.append(simulate_step(given, model).step_us)
    assert steps == sorted(steps)


def test_parts_over_nodes_are_collectives_of_nccl() -> None:
    """No gather of a part by copies, however large: rings over all ranks, with one hop between two nodes."""
    given = job(tensor=4, micro_batch_size=32, global_batch_size=96, split="batch")
    model = machine(Nodes(2, 2), 0.1, tflops=1e6, between_us=50.0)
    forward = layer_passes(given, model)[0]
    part = 16 * 1024 * 1024 * 2 * 3 / 4
    assert forward.time_us == pytest.approx(8 * (part / 200 + 2 * NCCL_US + 50.0), rel=0.001)


def test_groups_over_nodes_have_no_copies() -> None:
    model = machine(Nodes(2, 4))
    assert [model.mover(model.link(size)) for size in (2, 4, 8)] == ["copy", "copy", "message"]


def test_auto_over_nodes_takes_the_faster_method() -> None:
    for nic_gbps, selected in ((0.1, "p2p"), (1e6, "stock")):
        model = machine(Nodes(2, 4), nic_gbps, gbps=1e6, launch_us=5.0)
        assert fastest(linear(model, 8, method="auto"), column=True).overlap.method == selected


def test_the_command_lists_what_the_plugin_runs(tmp_path: Path) -> None:
    file = tmp_path / "simulated.json"
    given = ["model.num_query_groups=16", "model.num_layers=16", "parallel.pipeline=1"]

    def methods(tensor: int, *overrides: str) -> dict[str, dict[str, float]]:
        assert simulate(CONFIG, [f"parallel.tensor={tensor}", *given, *overrides], generation=True, output=file) == 0
        content = json.loads(file.read_text())
        assert content["generation_us"].keys() <= content["methods"].keys()
        found: dict[str, dict[str, float]] = content["methods"]
        return found

    inside, over_nodes = methods(8), methods(16)
    assert inside.keys() - over_nodes.keys() == {"userbuffers-like pipeline"}
    assert over_nodes["this plugin, p2p"]["step_ms"] < over_nodes["no overlap"]["step_ms"]
    uneven = tmp_path / "uneven.yaml"
    uneven.write_text(f"base: {CONFIG.parents[2]}/clusters/h100_dgx.yaml\nname: uneven\ndevices_per_node: 3\n")
    with pytest.raises(ConfigError, match=r"overlap\.transport: copies: the nodes have one tensor parallel rank"):
        simulate(CONFIG, ["overlap.transport=copies"], cluster=str(uneven))
    by_nccl = methods(16, "overlap.transport=nccl")
    assert by_nccl["this plugin, p2p"]["step_ms"] > over_nodes["this plugin, p2p"]["step_ms"]
