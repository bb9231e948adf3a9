"""Worker functions: all operations of the package over `CopyTransport` on the host, and over gloo in fixed order."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

import torch
import torch.distributed as dist

from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.transport import OrderedTransport, Transport
from megatron_overlap.ops import (
    Gathering,
    GradientReduce,
    LinearPlan,
    Projection,
    all_gather_linear,
    attention_linear_reduce_scatter,
    balanced_attention,
    copy_linear,
    expert_parallel,
    linear_all_reduce,
    ulysses_attention,
    ulysses_self_attention,
)
from megatron_overlap.schedules import SequenceLayout
from megatron_overlap.schedules.varlen import CostModel, Topology
from scripts.bench.placements import METHODS
from scripts.kernels.cpu_backend import CpuBackend
from tests.ops.expert_parallel.workers import ExpertCase, Kind, Problem
from tests.ops.ulysses import attention_workers as ulysses
from tests.ops.varlen import attention_workers as varlen

Operation = Callable[[Sequence[Transport], dist.ProcessGroup, int], list[torch.Tensor]]
"""Results and gradients of one step, with input by its seed. A second transport gathers data-parallel buckets."""


def _draw(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.bfloat16).requires_grad_() for shape in shapes]


def _all_reduce(transports: Sequence[Transport], group: dist.ProcessGroup, seed: int) -> list[torch.Tensor]:
    (x, dy), (v, w) = _draw(seed, (37, 16), (37, 16)), _draw(64 * seed + group.rank() + 1, (24, 16), (16, 24))
    hidden = copy_linear(x, v, group=transports[0])
    y = linear_all_reduce(hidden, w, group=transports[0])
    return [hidden, y, *torch.autograd.grad(y, [x, v, w], dy.detach())]


def _all_gather(transports: Sequence[Transport], group: dist.ProcessGroup, seed: int) -> list[torch.Tensor]:
    plan = LinearPlan(pattern="direct")
    x, z, w, v, dy = _draw(64 * seed + group.rank(), (6, 16), (6, 16), (24, 16), (24, 16), (6 * group.size(), 24))
    # The second gather uses the buffers of the first one before its backward.
    ys = [all_gather_linear(*each, group=transports[0], plan=plan) for each in ((x, w), (z, v))]
    return [*ys, *torch.autograd.grad(ys, [x, z, w, v], [dy.detach()] * 2)]


def _attention_projection(transports: Sequence[Transport], group: dist.ProcessGroup, seed: int) -> list[torch.Tensor]:
    positions, heads, size = 8 * group.size(), 2, 8
    shape = positions, 1, heads, size
    *qkv, w, dy = _draw(64 * seed + group.rank(), shape, shape, shape, (16, heads * size), (8, 1, 16))
    y = attention_linear_reduce_scatter(*qkv, w, group=transports[0])
    return [y, *torch.autograd.grad(y, [*qkv, w], dy.detach())]


def _ulysses(transports: Sequence[Transport], group: dist.ProcessGroup, seed: int) -> list[torch.Tensor]:
    results = []
    # In the second call the ranks have different numbers of rows and of key/value heads.
    for rows, heads, kv_heads in ((32, 8, 4), (30, 12, 3)):
        layout = SequenceLayout.zigzag(rows, group.size())
        tensors = ulysses.make_tensors(group, layout, heads=heads, kv_heads=kv_heads, seed=seed)
        results += ulysses.run(ulysses_attention, tensors, group=transports[0], layout=layout)
    return results


def _ulysses_layer(transports: Sequence[Transport], group: dist.ProcessGroup, seed: int) -> list[torch.Tensor]:
    heads, size, hidden = 4, 8, 16
    (qkv, out), (x, dy) = (
        _draw(seed, (3 * heads * size, hidden), (hidden, heads * size)),
        _draw(64 * seed + group.rank() + 1, (8, 2, hidden), (8, 2, hidden)),
    )
    y = ulysses_self_attention(
        x, Projection(qkv), None, Projection(out), num_heads=heads, num_kv_heads=heads, group=transports[0]
    )
    return [y, *torch.autograd.grad(y, [x, qkv, out], dy.detach())]


def _varlen(transports: Sequence[Transport], group: dist.ProcessGroup, seed: int) -> list[torch.Tensor]:
    lengths = [97, 9, 3, 1]  # the first one is longer than the rows of a rank: a ring
    topology, capacity = Topology(1, group.size()), -(-sum(lengths) // group.size())
    plan = METHODS["balanced"](lengths, topology, capacity=capacity, cost=CostModel(linear_fs=10**15))
    results = []
    for passing, layout in (("kv", "attention"), ("q", "attention"), ("kv", "linear")):
        case = varlen.Case(plan, passing=passing, layout=layout)  # type: ignore[arg-type]
        batch = varlen.make_batch(group, case, 0, seed)
        results += varlen.run(balanced_attention, batch, plan, group=transports[0], passing=passing, layout=layout)
    return results


def _buckets(transports: Sequence[Transport], group: dist.ProcessGroup, seed: int) -> list[torch.Tensor]:
    shapes = [(count,) for count in (480, 480, 479, 482, 480, 480)]  # the shards of the third and fourth differ
    buckets = [bucket.detach() for bucket in _draw(64 * seed + group.rank(), *shapes)]
    for gather, some in ((None, buckets[:2]), (transports[1], buckets[2:4])):
        reduce = GradientReduce(transports[0], gather=gather, wide=True, pieces=3)
        for reduction in [reduce.begin(bucket, mean=True) for bucket in some]:
            reduction.wait()
        reduce.close()
    for gathering in [Gathering(transports[1], bucket) for bucket in buckets[4:]]:
        gathering.wait()
    return buckets


def _gradient_buckets(transports: Sequence[Transport], group: dist.ProcessGroup, seed: int) -> list[torch.Tensor]:
    """Several buckets at once, of two sizes and dtypes."""
    size = group.size()
    shapes = [(480,), (480,), (120 * size,), (124 * size,)]
    buckets = [bucket.detach() for bucket in _draw(64 * seed + group.rank(), *shapes)]
    buckets += [bucket.float() for bucket in buckets]
    reduce = GradientReduce(transports[0], wide=True, pieces=3)
    for reduction in [reduce.begin(bucket, mean=True) for bucket in buckets]:
        reduction.wait()
    reduce.close()
    return buckets


def _experts(transports: Sequence[Transport], group: dist.ProcessGroup, seed: int) -> list[torch.Tensor]:
    """The routing changes in each call, so the buffers grow in some and hold fewer rows in others."""
    results = []
    for number, kind in enumerate(get_args(Kind)):
        dtype = torch.bfloat16 if (number + seed) % 2 else torch.float32
        problem = Problem(ExpertCase(kind, dtype=dtype, probs_dtype=torch.float32, seed=64 * number + seed), group)
        options = problem.case.options
        results += problem.run(expert_parallel, totals=problem.totals, group=transports[0], options=options)
    return results


OPERATIONS: dict[str, Operation] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "attention projection": _attention_projection,
    "Ulysses attention": _ulysses,
    "Ulysses layer": _ulysses_layer,
    "balanced attention": _varlen,
    "buckets": _buckets,
    "gradient buckets": _gradient_buckets,
    "experts": _experts,
}


def compare(group: dist.ProcessGroup, name: str, num_steps: int) -> list[int]:
    """Run an operation, forward and backward, with new input in each step.

    Return the steps whose results differ between copies and messages.
    """
    operation, different = OPERATIONS[name], []
    with opened(group) as (copies, messages):
        for step in range(1, num_steps + 1):
            got, expected = operation(copies, group, step), operation(messages, group, step)
            if len(got) != len(expected) or not all(map(torch.equal, got, expected)):
                different.append(step)
    return different


@contextmanager
def opened(group: dist.ProcessGroup) -> Iterator[tuple[list[Transport], list[Transport]]]:
    """Transports of copies and of messages, two of each: see `Operation`."""
    messages: list[Transport] = [OrderedTransport(GlooTransport(group)) for _ in range(2)]
    copies: list[Transport] = [CopyTransport(CpuBackend(HostGroup(group))), OrderedTransport(GlooTransport(group))]
    yield copies, messages
    dist.barrier(group)
    for transport in (*copies, *messages):
        transport.close()


def num_uncollected(group: dist.ProcessGroup, name: str) -> list[int]:
    """Tensors that only the garbage collector frees after an operation over copies, and over messages."""
    found = []
    with opened(group) as both:
        for transports in both:
            OPERATIONS[name](transports, group, 1)
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
            OPERATIONS[name](transports, group, 2)
            gc.collect()
            found.append(sum(isinstance(each, torch.Tensor) for each in gc.garbage))
            gc.set_debug(0)
            gc.garbage.clear()
    return found
