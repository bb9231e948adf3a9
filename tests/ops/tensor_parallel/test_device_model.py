"""Operations on a model of eight GPUs: overlap with one hardware queue, and the kernels that are launched."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_overlap.ops import flash_attention
from megatron_overlap.ops.tensor_parallel.p2p import LinearPlan
from megatron_overlap.ops.tensor_parallel.part_messages import GatherScatterMessages, PartGathers
from megatron_overlap.ops.wgrad import DeferredWgrad
from megatron_overlap.schedules.heuristics import default_chunks
from tests.comm.device import Recorder, play
from tests.comm.makespan import Work, makespan
from tests.ops.tensor_parallel import device_layers
from tests.ops.tensor_parallel.device_layers import (
    CASES,
    GPU,
    LAYERS,
    MODELS,
    PLAIN_CASES,
    RANKS,
    TRANSPORTS,
    Case,
    record,
    record_messages_first,
    sent_bytes,
    times,
)

# All-reduces of GEMMs that take about as long as their messages exceed the bound, by this factor.
_EXCEEDING = {
    "8b 8192 fc2 forward plain copies": 1.001,
    "70b 4096 fc2 forward plain copies": 1.18,
    "70b 8192 fc2 forward plain copies": 1.09,
}

# Every day one size of the small model with each transport.
_DAILY = {("8b", 8192, "nccl"), ("8b", 4096, "copies")}


@pytest.mark.parametrize(
    ("case", "transport"),
    [
        pytest.param(case, name, id=f"{case} {name}", marks=() if daily else pytest.mark.long)
        for case in CASES
        for name in TRANSPORTS
        for daily in [(case.model, case.rows, name) in _DAILY]
    ],
)
def test_one_hardware_queue_overlaps_as_eight_do(monkeypatch: pytest.MonkeyPatch, case: Case, transport: str) -> None:
    """Megatron sets CUDA_DEVICE_MAX_CONNECTIONS=1. Each rank sends its rows, or partial sums, to every other once."""
    devices = record(monkeypatch, case, transport)
    took = times(devices)
    assert took.one <= 1.05 * took.eight
    assert took.one <= took.bound * _EXCEEDING.get(f"{case} {transport}", 1)
    num_collectives = 2 if (LAYERS[case.layer], case.direction) == ("column", "backward") else 1
    shard_bytes = case.rows // RANKS * MODELS[case.model].hidden * 2
    assert sent_bytes(devices[0]) == pytest.approx(num_collectives * (RANKS - 1) * shard_bytes)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if (case.model, case.rows) == ("8b", 4096) else pytest.mark.long)
        for case in PLAIN_CASES
    ],
)
def test_an_all_reduce_by_copy_engines(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Forward exposes the sums that each rank sends to all others after the last GEMM; backward hides them.

    The messages of shallow GEMMs are longer than the GEMMs and hide them.
    """
    devices = record(monkeypatch, case, "copies")
    took = times(devices)
    assert took.one <= 1.05 * took.eight
    assert took.one <= took.bound * _EXCEEDING.get(f"{case} copies", 1)
    if case.layer == "proj":  # the first kernel adds all terms but those of the last call, before these arrive
        assert sum(op.label == "add_terms" for op in devices[0].ops) == 2
    chunk_bytes = case.rows // RANKS * MODELS[case.model].hidden * 2
    assert sent_bytes(devices[0]) == pytest.approx(2 * (RANKS - 1) * chunk_bytes)


@pytest.mark.parametrize(
    ("layer", "direction", "rows", "transport", "num_gemms", "plain"),
    [
        ("qkv", "forward", 4096, "copies", 5, False),  # own rows, one slice, and three of two slices
        ("qkv", "forward", 8192, "copies", 5, False),
        ("qkv", "forward", 16384, "copies", 8, False),
        ("qkv", "forward", 4096, "nccl", 9, False),  # the last slice is cut
        ("fc2", "backward", 4096, "copies", 5, False),
        ("qkv", "backward", 4096, "copies", 5, False),
        ("fc1", "backward", 4096, "copies", 5, False),
        ("fc1", "backward", 4096, "nccl", 8, False),
        ("fc2", "forward", 4096, "copies", 5, False),
        ("fc2", "forward", 8192, "copies", 8, False),  # no work follows that hides the messages
        ("fc2", "forward", 2048, "nccl", 8, False),
        ("qkv", "backward", 4096, "copies", 5, True),
        ("fc1", "backward", 4096, "nccl", 8, True),
        ("fc2", "forward", 8192, "copies", 8, True),
        ("fc2", "forward", 4096, "copies", 5, True),
        ("fc2", "forward", 1024, "nccl", 8, True),
    ],
)
def test_short_slices_share_a_gemm_beside_copy_engines(
    monkeypatch: pytest.MonkeyPatch, layer: str, direction: str, rows: int, transport: str, num_gemms: int, plain: bool
) -> None:
    for device in record(monkeypatch, Case(layer, rows, direction, plain=plain), transport):
        assert sum(op.kind == "work" and op.label.startswith("mm") for op in device.ops) == num_gemms


@pytest.mark.parametrize("transport", ["nccl", "copies"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_weight_gradient_is_one_gemm(monkeypatch: pytest.MonkeyPatch, layer: str, transport: str) -> None:
    """By copy engines, half of it is computed before the last GEMMs of a dgrad with few features, that of `proj`."""
    case = Case(layer, 8192, "backward")
    one = ["mm", "addmm"]
    for has_main_grad, wanted in (True, one * (2 if (layer, transport) == ("proj", "copies") else 1)), (False, ["mm"]):
        for device in record(monkeypatch, case, transport, has_main_grad=has_main_grad):
            gemms = [op.label.split()[0] for op in device.ops if op.kind == "work" and "mm" in op.label]
            assert [name for name, _ in groupby(gemms)] == wanted
            assert "addmm" not in gemms[:3]
            assert gemms.count("addmm") <= len(wanted) - 1  # rows of two ranges of ranks
            assert gemms.count("mm") <= RANKS + 1 + (not has_main_grad)


@pytest.mark.parametrize("transport", ["nccl", "copies"])
@pytest.mark.parametrize("layer", ["proj", "fc2"])
def test_the_kernels_of_a_scatter(monkeypatch: pytest.MonkeyPatch, layer: str, transport: str) -> None:
    """Forward launches a GEMM for each slice, of which the first is cut into the chunks of a rank, and the sum.

    By copy engines two slices share a GEMM, but not the first and the own one. After shallow GEMMs, which end before
    the messages, a first kernel adds the terms before the last call.
    """
    device = record(monkeypatch, Case(layer, 4096, "forward"), transport)[0]
    labels = [op.label for op in device.ops if op.kind == "work"]
    chunks = default_chunks("reduce_scatter", RANKS, 4096, 2 * 4096, copy_engines=transport == "copies")
    sums = {"proj": 2, "fc2": 1}[layer]
    assert [label for label in labels if not label.startswith("mm")] == ["add_terms"] * sums
    assert len(labels) == (RANKS - 1 + chunks if transport == "nccl" else 5) + sums


@pytest.mark.parametrize("transport", ["nccl", "copies"])
def test_messages_alone_are_summed_early_too(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    """With split `edge` the partial sums of an all-reduce are no calls of several messages."""
    monkeypatch.setattr(device_layers, "LinearPlan", lambda: LinearPlan(split="edge"))
    device = record(monkeypatch, Case("proj", 4096, "forward", plain=True), transport)[0]
    assert [op.label for op in device.ops].count("add_terms") == 2


@pytest.mark.parametrize("layer", ["qkv", "fc1"])
def test_the_kernels_of_a_gradient_with_a_scatter(monkeypatch: pytest.MonkeyPatch, layer: str) -> None:
    """Backward of a column-parallel layer: the own rows are copied, one weight gradient, one sum or two."""
    device = record(monkeypatch, Case(layer, 4096, "backward"))[0]
    labels = [str(op.label).split()[0] for op in device.ops if op.kind == "work"]
    assert [label for label in labels if label != "mm"] == [
        "copy_",
        "addmm",
        *["add_terms"] * {"qkv": 2, "fc1": 1}[layer],
    ]


def test_the_model_has_the_cost_of_one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the model: without places, all messages of a gather are enqueued first, and nothing overlaps."""
    devices = record_messages_first(monkeypatch, Case("fc1", 8192, "forward"))
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


def test_the_second_gather_of_a_part_delays_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """In backward of a split layer. In one queue a collective waits for the one before it, and delays what follows."""
    device = Recorder(0, RANKS)
    messages = GatherScatterMessages(TRANSPORTS["nccl"](monkeypatch, device), DeferredWgrad(num_terms=2))
    messages.gather("output gradient", torch.zeros(2, 3))
    messages.gather_next("input", torch.zeros(2, 3))
    device.put("work", "of the other part")
    messages.finish("output gradient")
    device.put("work", "of this part")
    messages.finish("input")
    order = [op.label for op in device.ops if op.kind == "work" or op.kind == "collective"]
    first, second = (("all_gather", number, 7 * 24) for number in (1, 2))
    assert order == [first, "of the other part", second, "of this part"]
    play([device, *(Recorder(rank, RANKS) for rank in range(1, RANKS))], connections=1)
    assert [op.label for op in device.ops if op.kind == "work" and op.done] == ["of the other part"]


def test_copy_engines_gather_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both gathers start at once, no SM moves rows, and the GEMM is whole. The reduce-scatter is one of NCCL's."""
    device = Recorder(0, RANKS)
    with FakeTensorMode():
        transport, copies = (TRANSPORTS[name](monkeypatch, device) for name in ("nccl", "copies"))
        shard, weight = (torch.empty(2, 3, device="cuda") for _ in range(2))
        gathers = PartGathers(copies, min_bytes=shard.nbytes)
        assert gathers.carries(shard)
        assert not gathers.carries(shard[:1])
        messages = GatherScatterMessages(transport, DeferredWgrad(num_terms=2), gathers=gathers)
        device.ops.clear()
        with Work(device, GPU):
            messages.gather("output gradient", shard)
            messages.gather_next("input", shard)
            device.put("work", "of the other part")
            messages.full("output gradient", shard).matmul(weight.t())
            messages.reduce("input gradient", torch.empty(2 * RANKS, 3, device="cuda"))
    ops = device.ops
    place = next(number for number, op in enumerate(ops) if op.label == "of the other part")
    product = next(number for number, op in enumerate(ops) if str(op.label).startswith("mm"))
    # The own rows, and all messages.
    assert [op.kind for op in ops[:place] if op.kind in ("copy", "work", "collective")] == ["copy"] * 2 * 2
    assert [op.kind for op in ops[place:] if op.kind in ("copy", "work", "collective")] == [
        "work",
        "work",
        "collective",
    ]
    # The GEMM follows the copy of the own rows.
    own = next(number for number, op in enumerate(ops) if op.kind == "copy" and op.label[0, 0])
    copied = next(op.label for op in ops[own:] if op.kind == "record" and op.stream == ops[own].stream)
    assert any(op.kind == "wait" and op.label == copied and op.stream == "compute" for op in ops[place:product])
