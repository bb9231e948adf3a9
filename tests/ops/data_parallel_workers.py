"""What the workers run in tests of data parallel buckets."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.ops import Gathering, GradientReduce
from tests.helpers.late import LateTransport, poisoned_transport

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _transport(group: dist.ProcessGroup, late: bool) -> Transport:
    return LateTransport(group) if late else poisoned_transport(group)


def _gradients(size: int, numel: int, dtype: torch.dtype, number: int) -> list[torch.Tensor]:
    """The same bucket as every rank has it."""
    generator = torch.Generator().manual_seed(1000 * number + numel)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(size)]


def _check_sum(name: str, got: torch.Tensor, terms: list[torch.Tensor], mean: bool, wide: bool) -> None:
    exact = torch.stack(terms).double().sum(0)
    magnitude = torch.stack(terms).double().abs().sum(0)
    roundings = len(terms) - 1
    eps = torch.finfo(got.dtype).eps / 2
    # Rounded once at the end where it is summed in fp32; otherwise after each addition, and by the division.
    own = eps * (exact.abs() if wide else roundings * magnitude)
    allowed = own + roundings * torch.finfo(torch.float32).eps * magnitude
    if mean:
        exact, allowed = exact / len(terms), allowed / len(terms) + (0 if wide else eps * magnitude / len(terms))
    excess = (got.double() - exact).abs() - allowed
    assert (excess <= 1e-12).all(), f"{name}: {excess.max():.3e} too far off"


def sums(
    group: dist.ProcessGroup,
    numels: list[int],
    dtype: str,
    *,
    late: bool,
    whole: bool = False,
    mean: bool = False,
    wide: bool = False,
    pieces: int | None = 3,
    backwards: bool = False,
) -> list[str]:
    """All buckets on their way at once; their sums against float64. Returns bits of the results, to compare ranks."""
    size, rank = group.size(), group.rank()
    transport = _transport(group, late)
    gather = _transport(group, late) if whole else None
    reduce = GradientReduce(transport, gather=gather, wide=wide, pieces=pieces)
    everyone = [_gradients(size, numel, DTYPES[dtype], k) for k, numel in enumerate(numels)]
    buckets = [grads[rank].clone() for grads in everyone]
    begun = [reduce.begin(bucket, mean=mean) for bucket in buckets]
    for reduction in reversed(begun) if backwards else begun:
        reduction.wait()
    for number, (bucket, grads) in enumerate(zip(buckets, everyone, strict=True)):
        if whole:
            _check_sum(f"bucket {number}", bucket, grads, mean, wide)
            continue
        shard = bucket.numel() // size
        own = slice(rank * shard, (rank + 1) * shard)
        _check_sum(f"bucket {number}", bucket[own], [grad[own] for grad in grads], mean, wide)
        others = torch.ones(bucket.numel(), dtype=torch.bool)
        others[own] = False
        assert torch.equal(bucket[others], grads[rank][others]), "what is not ours to sum was changed"
    reduce.close()
    transport.close()
    if gather is not None:
        gather.close()
    return [str(bucket.double().sum().item()) for bucket in buckets] if whole else []


def gathers(group: dist.ProcessGroup, numels: list[int], dtype: str, late: bool) -> None:
    """Parameters are the same bytes everywhere."""
    size, rank = group.size(), group.rank()
    transport = _transport(group, late)
    p2p_works, buckets = [], []
    for number, numel in enumerate(numels):
        bucket = torch.full((numel,), float("nan"), dtype=DTYPES[dtype])
        shard = numel // size
        expected = torch.cat(_gradients(size, shard, DTYPES[dtype], number))
        own = slice(rank * shard, (rank + 1) * shard)
        bucket[own] = expected[own]
        buckets.append((bucket, expected))
        p2p_works.append(Gathering(transport, bucket))
    for p2p_work, (bucket, expected) in zip(p2p_works, buckets, strict=True):
        p2p_work.wait()
        assert torch.equal(bucket, expected)
    transport.close()


def landing_memory(group: dist.ProcessGroup, rounds: int) -> tuple[int, int]:
    """Bytes of landing buffers after one bucket was reduced, and after more of them, each waited for."""
    transport = GlooTransport(group)
    reduce = GradientReduce(transport)
    bucket = torch.ones(1200)
    held = []
    for _ in range(rounds):
        reduce.begin(bucket).wait()
        held.append(sum(transport.buffer_pool.sizes().values()))
    transport.close()
    return held[0], held[-1]


def two_reducers(group: dist.ProcessGroup) -> bool:
    """The buckets of a sharded and of a plain model of the same ranks are reduced at the same time."""
    transport, gather = GlooTransport(group), GlooTransport(group)
    sharded, plain = GradientReduce(transport), GradientReduce(transport, gather=gather)
    size, rank, equal = group.size(), group.rank(), True
    for number in range(1, 9):
        first, second = torch.full((64 * size,), float(number)), torch.full((64 * size,), 100.0 * number)
        begun = sharded.begin(first), plain.begin(second)
        for each in begun:
            each.wait()
        equal &= bool((first[64 * rank :][:64] == size * number).all() and (second == 100 * size * number).all())
    transport.close()
    gather.close()
    return equal


def sums_on_the_way(group: dist.ProcessGroup) -> bool:
    """A bucket that has landed is added when the next one begins, and its landing buffer serves the one after."""
    transport = GlooTransport(group)
    reduce = GradientReduce(transport)
    size, rank = group.size(), group.rank()
    first, second = torch.ones(4 * size), torch.ones(4 * size)
    begun = reduce.begin(first)
    for message in range(size - 1):
        begun._p2p_work.wait(message)
    before = first[4 * rank].item()
    later = reduce.begin(second)
    added = first[4 * rank].item()
    held = sum(transport.buffer_pool.sizes().values())
    later.wait()
    begun.wait()
    transport.close()
    return before == 1 and added == size and held == 4 * 4 * (size - 1)


def refused(group: dist.ProcessGroup) -> list[str]:
    """What is said of buckets that do not fit."""
    transport = GlooTransport(group)
    reduce = GradientReduce(transport)
    texts = []
    for bucket in (torch.zeros(4, 4), torch.zeros(8)[::2], torch.zeros(4 * group.size() + 1)):
        try:
            reduce.begin(bucket)
        except ValueError as error:
            texts.append(str(error))
    transport.close()
    return texts
