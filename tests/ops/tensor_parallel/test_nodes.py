"""Linear layers over several nodes: copies inside a node, messages between nodes, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_overlap.comm.symmetric.nodes import CopyNodesTransport
from megatron_overlap.ops.tensor_parallel.p2p import LinearPlan, method_for
from megatron_overlap.schedules.gather_scatter import Nodes
from tests.comm.device import Recorder
from tests.comm.makespan import Work
from tests.helpers.world import World
from tests.ops.tensor_parallel import linear_workers
from tests.ops.tensor_parallel.device_layers import GPU, TRANSPORTS

OPS = ["all_gather_linear", "linear_reduce_scatter"]


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("main_grad", [False, True], ids=["own gradient", "main_grad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", OPS)
def test_two_nodes_equal_the_reference(
    world: World, op: str, dtype: torch.dtype, main_grad: bool, device: bool
) -> None:
    """61 rows: not divisible by the ranks, and the nodes have different numbers of rows."""
    plan = LinearPlan(pattern="direct", chunks_per_rank=2)
    for rows in (61, 64):
        world.run(
            4,
            linear_workers.against_reference,
            op,
            rows,
            48,
            33,
            dtype,
            plan,
            late=device,
            main_grad=main_grad,
            hosts=2,
        )


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("pattern", ["direct", "ring"])
def test_layers_over_two_nodes(world: World, pattern: str, device: bool) -> None:
    """Three times: a call uses the buffers of the one before. With `direct` also layers with an all-reduce."""
    for count, different in world.run(4, linear_workers.nodes_equal_messages, pattern, device):
        assert count == (10 if pattern == "direct" else 5)
        assert different == []


def test_messages_between_nodes_precede_the_gemms_that_hide_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of two nodes of four, in the order of the calls, which is that of one hardware queue.

    A gather starts its message at once, before GEMMs that do not use its rows. A scatter sends the sums of the other
    node before the GEMMs of its own node.
    """
    device = Recorder(0, 8)
    monkeypatch.setattr("megatron_overlap.kernels.gemm_rs.add_terms", lambda *tensors: device.put("work", "sum"))
    monkeypatch.setattr("megatron_overlap.ops.wgrad.triton_unsupported_reason", lambda: "")
    with FakeTensorMode():
        between = TRANSPORTS["nccl"](monkeypatch, device)
        inside: Any = TRANSPORTS["copies"](monkeypatch, Recorder(0, 4))
        method = method_for(CopyNodesTransport(inside, between, Nodes(2, 4)), LinearPlan())
        device.ops.clear()
        shard, rows, weight = (torch.empty(shape, device="cuda") for shape in ((64, 32), (512, 32), (32, 32)))
        with Work(device, GPU):
            gather = method.gather(shard, 512, "gather")
            begun = order(device)
            gather.matmul(weight)
            gather.finish()
            gathered = order(device)
            device.ops.clear()
            method.scatter(rows, weight, "scatter").finish()
    assert begun == ["message"]
    assert gathered == ["message", *["mm"] * 6], "of each node own rows, one slice, and two slices"
    inside = [*["mm"] * 3, "sum", "sum"]
    assert order(device) == [*inside, "copy_", "message", *inside, "sum"]


def order(device: Recorder) -> list[str]:
    """The kernels and messages between nodes that a device has recorded."""
    ops = [op for op in device.ops if op.kind in ("messages", "work")]
    return ["message" if op.kind == "messages" else op.label.split()[0] for op in ops]
