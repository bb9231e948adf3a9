"""Buckets are summed and gathered right: uneven sizes, many at once, as late as the contract allows."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_overlap.comm import nccl
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.ops import data_parallel
from megatron_overlap.ops.data_parallel import GradientReduce, Reduction
from tests.comm.copy_protocol import RecordedBackend, Recording, ordered, play
from tests.comm.device import Recorder
from tests.comm.makespan import Work, makespan
from tests.helpers.world import World, assert_same
from tests.ops import data_parallel_workers as cases
from tests.ops.tensor_parallel.device_layers import GPU, TRANSPORTS


@pytest.mark.parametrize("late", [False, True], ids=["gloo", "late"])
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_own_shard_is_the_sum(world: World, num_ranks: int, dtype: str, wide: bool, late: bool) -> None:
    """Also a bucket with fewer elements a shard than pieces, and an empty one."""
    numels = [num_ranks * shard for shard in (61, 2, 0, 33)]
    for mean in (False, True):
        world.run(num_ranks, cases.sums, numels, dtype, late=late, wide=wide, mean=mean)


@pytest.mark.parametrize("late", [False, True], ids=["gloo", "late"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_all_reduce_is_the_sum_on_all_ranks(world: World, num_ranks: int, dtype: str, late: bool) -> None:
    """Sizes that ranks do not divide, and fewer elements than ranks."""
    bits = world.run(num_ranks, cases.sums, [101, 3, 40], dtype, late=late, whole=True)
    assert_same(bits)


def test_waited_for_in_another_order(world: World) -> None:
    for whole in (False, True):
        world.run(4, cases.sums, [44, 88, 20], "fp32", late=True, whole=whole, backwards=True)


def test_wide_sums_of_large_buckets_go_block_by_block(world: World) -> None:
    world.run(2, cases.sums, [2 * (600_001), 10], "bf16", late=False, wide=True, pieces=1)
    world.run(4, cases.sums, [4 * 300_001], "bf16", late=False, wide=True, pieces=None)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_fp32_sum_on_a_device_is_one_kernel(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, wide: bool, mean: bool
) -> None:
    added: list[object] = []

    def add_terms(terms: torch.Tensor, own: torch.Tensor, out: torch.Tensor, divisor: int) -> None:
        added.append((tuple(terms.shape), tuple(own.shape), out is own, divisor))

    monkeypatch.setattr("megatron_overlap.kernels.gemm_rs.add_terms", add_terms)
    monkeypatch.setattr("megatron_overlap.ops.wgrad.triton_unsupported_reason", lambda: "")
    reduction: Any = SimpleNamespace(_owner=SimpleNamespace(wide=wide), _mean=mean)
    with FakeTensorMode():
        terms = torch.empty(7, 64, device="cuda", dtype=dtype)
        Reduction._sum(reduction, terms[0], terms)
    one = [((7, 1, 64), (1, 64), True, 8 if mean else 1)]
    assert added == (one if wide or dtype == torch.float32 else [])


@pytest.mark.parametrize("late", [False, True], ids=["gloo", "late"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_parameters_are_gathered(world: World, num_ranks: int, dtype: str, late: bool) -> None:
    world.run(num_ranks, cases.gathers, [num_ranks * shard for shard in (57, 1, 0, 8)], dtype, late)


def test_landing_buffers_are_used_again(world: World) -> None:
    for first, last in world.run(4, cases.landing_memory, 5):
        assert first == last == 3 * 300 * 4


def test_reducers_of_one_transport_have_separate_buffers(world: World) -> None:
    assert all(world.run(2, cases.two_reducers))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_has_landed_is_added_on_the_way(world: World, num_ranks: int) -> None:
    assert all(world.run(num_ranks, cases.sums_on_the_way))


def test_what_does_not_fit_is_refused(world: World) -> None:
    texts = world.run(2, cases.refused)
    assert_same(texts)
    assert texts[0] == [
        "bucket: shape (4, 4): must be one contiguous dimension",
        "bucket: shape (4,): must be one contiguous dimension",
        "bucket: 9 elements: not divisible by 2 ranks; pad it",
    ]


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_sums_over_copies_in_every_order(size: int, in_turn: bool) -> None:
    """Also with one hardware queue. Later calls enqueue prepared steps."""
    arenas: dict[tuple[str, int], list[torch.Tensor]] = {}
    backends = [RecordedBackend(rank, size, arenas, "cuda") for rank in range(size)]
    of_ranks = [[bucket + rank for bucket in torch.ones(4, 8 * size).cumsum(0)] for rank in range(size)]
    expected = [bucket.clone() for bucket in map(sum, zip(*of_ranks, strict=True))]
    for rank, (backend, buckets) in enumerate(zip(backends, of_ranks, strict=True)):
        transport = CopyTransport(backend)
        reduce = GradientReduce(transport, pieces=2)
        with Recording(backend.computing):
            notes = set()  # the number of waits that are prepared
            for bucket in buckets:
                reduction = reduce.begin(bucket)
                notes.add(transport.waits._num_repeated)
                if in_turn:
                    reduction.wait()
            reduce.close()
        assert len(notes) == (1 if in_turn else 4), rank
    ordered([queue for backend in backends for queue in backend.queues])
    ordered([backend.one_hardware_queue() for backend in backends])
    for rank, buckets in enumerate(of_ranks):
        for bucket, number in zip(buckets, range(1, 5), strict=True):
            bucket.fill_(float(number + rank))
    play([queue for backend in backends for queue in backend.queues], random.Random(size).randrange)
    for rank, buckets in enumerate(of_ranks):
        own = slice(8 * rank, 8 * rank + 8)
        assert all(torch.equal(bucket[own], total[own]) for bucket, total in zip(buckets, expected, strict=True))


@pytest.mark.parametrize("whole", [False, True], ids=["reduce-scatter", "all-reduce"])
@pytest.mark.parametrize("transport", ["nccl", "copies"])
def test_one_hardware_queue_hides_buckets_behind_backward(
    monkeypatch: pytest.MonkeyPatch, transport: str, whole: bool
) -> None:
    """Backward takes longer than the messages of a bucket, which are one NCCL call. Those of the last one are exposed.

    Reused receive buffers are those of two buckets.
    """
    size, num_buckets, numel, backward_s = 4, 5, 40_000_000, 4e-4
    devices = []
    for rank in range(size):
        device = Recorder(rank, size)
        with FakeTensorMode():
            data, sums = (TRANSPORTS[name](monkeypatch, device) for name in (transport, "nccl"))
            on_device = device.torch

            def add_terms(terms: Any, own: Any, out: Any, divisor: int, device: Recorder = device) -> None:
                device.put("work", "sum", seconds=GPU.move_s(terms.nbytes + 2 * own.nbytes), uses_sms=True)

            monkeypatch.setattr("megatron_overlap.kernels.gemm_rs.add_terms", add_terms)
            monkeypatch.setattr("megatron_overlap.ops.wgrad.triton_unsupported_reason", lambda: "")
            for module in (nccl, data_parallel):
                monkeypatch.setattr(module, "torch", on_device)
            reduce = GradientReduce(data, gather=sums if whole else None, wide=True)
            device.ops.clear()
            with Work(device, GPU):
                pending = []
                for _ in range(num_buckets):
                    device.put("work", "backward", seconds=backward_s, uses_sms=True)
                    pending.append(reduce.begin(torch.empty(numel, device="cuda", dtype=torch.bfloat16)))
                for reduction in pending:
                    reduction.wait()
            assert sorted(data.buffer_pool.sizes()) == ["bucket0", "bucket1"]
        devices.append(device)
    one, eight = (makespan(devices, GPU, connections=number) for number in (1, None))
    work = sum(op.seconds for op in devices[0].ops if op.kind == "work")
    message_s = (1 + whole) * (size - 1) * GPU.message_s(numel * 2 // size)
    assert message_s < backward_s * (1 + whole)
    assert one <= 1.08 * eight
    assert one <= 1.05 * work + message_s
    calls = [len(op.sends) for op in devices[0].ops if op.kind == "messages"]
    assert calls == [size - 1] * (((transport == "nccl") + whole) * num_buckets)
