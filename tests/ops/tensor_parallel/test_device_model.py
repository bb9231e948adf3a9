"""Operations on a model of eight GPUs: overlap with one hardware queue, and the kernels that are launched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_overlap.comm import TransportOptions, nccl
from megatron_overlap.ops import flash_attention, wgrad
from megatron_overlap.ops.tensor_parallel import p2p
from megatron_overlap.ops.tensor_parallel.linear import _AllGatherLinear, _LinearReduceScatter
from megatron_overlap.ops.tensor_parallel.method import LinearOptions
from megatron_overlap.ops.tensor_parallel.p2p import LinearPlan, P2PMethod
from megatron_overlap.ops.wgrad import WgradTarget
from megatron_overlap.schedules import gather_scatter
from tests.comm.device import Gpu, Recorder, Work, makespan

RANKS = 8
HIDDEN, FFN, HEADS = 4096, 14336, 4096 + 2 * 1024
LAYERS = {"qkv": ("column", HEADS), "proj": ("row", 4096), "fc1": ("column", 2 * FFN), "fc2": ("row", FFN)}
GPU = Gpu()


class Context(SimpleNamespace):
    """The context of an autograd function, for calls without the autograd engine, which needs a GPU."""

    needs_input_grad = (True, True, False, False)

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


def record(monkeypatch: pytest.MonkeyPatch, layer: str, rows: int, direction: str) -> list[Recorder]:
    """Run one pass of a layer of LLaMA-3 8B at TP8 on the device model of every rank."""
    kind, features = LAYERS[layer]
    devices = []
    for rank in range(RANKS):
        device = Recorder(rank, RANKS)
        monkeypatch.setattr(nccl, "torch", device.torch)
        monkeypatch.setattr(nccl, "dist", device.dist)
        monkeypatch.setattr(nccl, "store_beside", lambda group: None)
        transport = nccl.NcclTransport(SimpleNamespace(), TransportOptions(timeout_s=5))  # type: ignore[arg-type]
        with FakeTensorMode():

            def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
                return torch.empty(shape, device="cuda", dtype=dtype)

            column = kind == "column"
            w = empty(features // RANKS, HIDDEN) if column else empty(HIDDEN, features // RANKS)
            x = empty(rows // RANKS, HIDDEN) if column else empty(rows, features // RANKS)
            dy = empty(rows, features // RANKS) if column else empty(rows // RANKS, HIDDEN)
            target = WgradTarget(empty(*w.shape, dtype=torch.float32), buffer_pool=transport.buffer_pool)
            call = LinearOptions(P2PMethod(transport, LinearPlan()), target, num_rows=rows)
            context = Context(saved_tensors=(x, w), call=call, gathered=False, saved_input=None)
            # Megatron's gradient accumulation fusion needs this kernel of apex on a GPU.
            monkeypatch.setattr(
                wgrad,
                "_fused_wgrad",
                lambda x, dy, total, device=device: device.put(
                    "work", f"mm wgrad {tuple(x.shape)}", seconds=GPU.gemm_s(*total.shape, x.shape[0]), uses_sms=True
                ),
            )
            function = _AllGatherLinear if column else _LinearReduceScatter
            with Work(device, GPU):
                if direction == "backward":
                    function.backward(context, dy)
                elif column:
                    _AllGatherLinear.forward(context, x, w, None, call)
                else:
                    _LinearReduceScatter.forward(context, x, w, call)
        devices.append(device)
    return devices


@pytest.mark.parametrize("rows", [4096, 8192])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("layer", LAYERS)
def test_one_hardware_queue_overlaps_as_eight_do(
    monkeypatch: pytest.MonkeyPatch, layer: str, direction: str, rows: int
) -> None:
    """Megatron sets CUDA_DEVICE_MAX_CONNECTIONS=1. Every operation is faster than its kernels and messages in turn."""
    devices = record(monkeypatch, layer, rows, direction)
    one, eight = (makespan(devices, GPU, connections=number) for number in (1, None))
    assert one <= 1.05 * eight
    compute = sum(op.seconds for op in devices[0].ops)
    messages = sum(GPU.message_s(op.tensors[each].nbytes) for op in devices[0].ops for each in op.sends)
    assert one < compute + messages - 0.4 * min(compute, messages)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_weight_gradient_is_one_gemm(monkeypatch: pytest.MonkeyPatch, layer: str) -> None:
    device = record(monkeypatch, layer, 4096, "backward")[0]
    assert sum(op.kind == "work" and op.label.startswith("mm wgrad") for op in device.ops) == 1


@pytest.mark.parametrize("layer", ["proj", "fc2"])
def test_two_kernels_add_the_sums_of_a_scatter(monkeypatch: pytest.MonkeyPatch, layer: str) -> None:
    labels = [op.label for op in record(monkeypatch, layer, 4096, "forward")[0].ops if op.kind == "work"]
    assert [label for label in labels if not label.startswith("mm")] == ["sum", "add"]


def test_the_model_has_the_cost_of_one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the model: without places, all messages of a gather are enqueued first, and nothing overlaps."""
    monkeypatch.setattr(gather_scatter, "_placed", lambda messages, work: tuple(messages))
    p2p._schedule.cache_clear()
    devices = record(monkeypatch, "fc1", 8192, "forward")
    p2p._schedule.cache_clear()
    assert makespan(devices, GPU, connections=1) > 1.3 * makespan(devices, GPU)


def test_cumulative_lengths_are_copied_without_a_synchronisation(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    real = torch.tensor

    def tensor(values: list[int], *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        made.append({"values": values, "pinned": pin_memory})
        return real(values, dtype=dtype)

    monkeypatch.setattr(flash_attention.torch, "tensor", tensor)
    with FakeTensorMode(allow_non_fake_inputs=True):
        lengths = flash_attention._cu_seqlens([3, 2], torch.device("cuda"))
    assert lengths.is_cuda
    assert made == [{"values": [0, 3, 5], "pinned": True}]
