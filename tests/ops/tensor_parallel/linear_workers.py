"""What the workers run: an overlapped op and its reference on the same data, forward and backward."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport, close_transport, transport_of
from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.transport import OrderedTransport
from megatron_overlap.ops import (
    LinearPlan,
    all_gather_linear,
    copy_linear,
    linear_all_reduce,
    linear_reduce_scatter,
    reference,
)
from megatron_overlap.ops.tensor_parallel import p2p
from megatron_overlap.ops.tensor_parallel.fused.kernels import FusedPlan
from megatron_overlap.ops.tensor_parallel.fused.linear import FusedMethod
from megatron_overlap.ops.tensor_parallel.p2p import P2PMethod
from megatron_overlap.ops.tensor_parallel.pipelined import Payload, PipelinedAllGather
from megatron_overlap.ops.tensor_parallel.pipelined_reduce_scatter import PipelinedReduceScatter
from megatron_overlap.ops.wgrad import WeightGradient
from megatron_overlap.schedules import ChunkLayout, all_gather_plan, reduce_scatter_plan
from scripts.kernels.cpu_backend import CpuBackend
from tests.helpers.collectives import LateNodesTransport, device_copies
from tests.helpers.fused import fused_transport
from tests.helpers.late import LateTransport, poisoned_transport
from tests.helpers.numerics import assert_close_to_exact


@dataclass(frozen=True)
class LinearCase:
    """Shape and dtype of one linear layer: `[rows, in_features]` to `[rows, out_features]`, over all ranks."""

    rows: int
    in_features: int
    out_features: int
    dtype: torch.dtype = torch.float32


def _data(group: dist.ProcessGroup, op: str, rows: int, k: int, f: int, dtype: torch.dtype, seed: int) -> Any:
    """Input, weight, bias and output gradient of this rank. Small integers would hide wrong roundings; these do not."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    own = ChunkLayout(rows, size).shard_rows(rank)
    rows_in, rows_out = (own, rows) if op == "all_gather_linear" else (rows, own)
    common = torch.Generator().manual_seed(seed)
    x = torch.randn(rows_in, k, generator=generator).to(dtype)
    w = torch.randn(f, k, generator=generator).to(dtype)
    # The bias of a row-parallel layer is the same on every rank.
    bias = torch.randn(f, generator=generator if op == "all_gather_linear" else common).to(dtype)
    dy = torch.randn(rows_out, f, generator=generator).to(dtype)
    return x, w, bias, dy


def _reference(op: str, x: Any, w: Any, bias: Any, dy: Any, group: dist.ProcessGroup, rows: int) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in (x, w, bias)]
    if op == "all_gather_linear":
        y = reference.all_gather_linear(*leaves, group=group, num_rows=rows)
    else:
        y = reference.linear_reduce_scatter(*leaves, group=group)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


def against_reference(
    group: dist.ProcessGroup,
    op: str,
    rows: int,
    k: int,
    f: int,
    dtype: torch.dtype,
    plan: LinearPlan | FusedPlan,
    *,
    late: bool,
    main_grad: bool = False,
    seed: int = 1,
    repeats: int = 2,
    hosts: int = 1,
    copies: bool = False,
) -> None:
    """Output and every gradient against the reference, twice over the same buffers; p2p or fused, as the plan says.

    `copies`: copy engines carry all messages, in the order of a device. Over several hosts they always carry those
    inside a host; with `late` in the order of a device.
    """
    fused = isinstance(plan, FusedPlan)
    transport: Any
    if fused:
        transport = fused_transport(group, hosts)
    elif copies:
        transport = device_copies(HostGroup(group))
    elif hosts > 1:
        transport = LateNodesTransport(group, hosts, on_device=late)
    else:
        transport = LateTransport(group) if late else transport_of(group)
    size = dist.get_world_size(group)
    for repeat in range(repeats):
        x, w, bias, dy = _data(group, op, rows, k, f, dtype, seed + repeat)
        unfused = _reference(op, x, w, bias, dy, group, rows)
        exact = _reference(op, x.double(), w.double(), bias.double(), dy.double(), group, rows)
        size_of = _reference(
            op, x.double().abs(), w.double().abs(), bias.double().abs(), dy.double().abs(), group, rows
        )
        leaves = [tensor.clone().requires_grad_() for tensor in (x, w, bias)]
        # Not contiguous, as what a transpose or a narrow leaves behind.
        leaves[0] = torch.stack([x, x], dim=-1)[..., 0].requires_grad_()
        into = torch.ones(f, k, dtype=torch.float32) if main_grad else None
        options = {"num_rows": rows} if op == "all_gather_linear" else {}
        function: Any = all_gather_linear if op == "all_gather_linear" else linear_reduce_scatter
        how = {"group": FusedMethod(transport, plan)} if fused else {"group": transport, "plan": plan}
        y = function(*leaves, main_grad=into, **how, **options)
        y.backward(dy)
        wgrad = leaves[1].grad
        if into is not None:
            assert wgrad is None
            wgrad = into - 1
            # 1 was there before: what is rounded away of it counts too.
            size_of[2] = size_of[2] + 1
        got = [y.detach(), leaves[0].grad, wgrad, leaves[2].grad]
        terms = {"y": k * size, "dx": f * size, "dw": rows, "dbias": rows}
        for name, mine, plain, true, magnitude in zip(terms, got, unfused, exact, size_of, strict=True):
            assert mine is not None
            assert_close_to_exact(f"{op} {name}", mine, plain, true, magnitude, terms[name])
    if late or fused or hosts > 1 or copies:
        dist.barrier(group)
        transport.close()


def gathered_bytes_are_equal(group: dist.ProcessGroup, pattern: str) -> None:
    """With the identity as weight, an all-gather moves bits: torch.equal."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    everything = torch.randn(size * 6, 8, generator=torch.Generator().manual_seed(5))
    plan = LinearPlan(pattern=pattern, chunks_per_rank=4)  # type: ignore[arg-type]
    y = all_gather_linear(everything[rank * 6 : rank * 6 + 6], torch.eye(8), group=group, plan=plan)
    assert torch.equal(y, everything)


def three_dimensions(group: dist.ProcessGroup) -> None:
    """[S, B, H] in, [S, B, H] out, as Megatron's layers."""
    size = dist.get_world_size(group)
    x = torch.randn(3, 2, 8)
    y = all_gather_linear(x, torch.randn(5, 8), group=group)
    assert y.shape == (3 * size, 2, 5)
    z = linear_reduce_scatter(y, torch.randn(8, 5), group=group)
    assert z.shape == (3, 2, 8)


def frozen(group: dist.ProcessGroup, op: str, which: str) -> list[bool]:
    """Backward with a weight, or an input, that needs no gradient; which gradients were made."""
    x, w, bias, dy = _data(group, op, 12, 8, 6, torch.float32, 3)
    expected = _reference(op, x, w, bias, dy, group, 12)
    x.requires_grad_(which != "x")
    w.requires_grad_(which != "w")
    function = all_gather_linear if op == "all_gather_linear" else linear_reduce_scatter
    function(x, w, bias, group=group, plan=LinearPlan(chunks_per_rank=2)).backward(dy)
    for grad, plain in ((x.grad, expected[1]), (w.grad, expected[2])):
        assert grad is None or torch.allclose(grad, plain, rtol=1e-5, atol=1e-5)
    return [x.grad is not None, w.grad is not None]


def two_layers_recomputed(group: dist.ProcessGroup, *, checkpoint: bool) -> list[float]:
    """A column- and a row-parallel layer, with and without activation recomputation."""
    from torch.utils.checkpoint import checkpoint as recompute

    generator = torch.Generator().manual_seed(7 + dist.get_rank(group))
    x = torch.randn(8, 16, generator=generator, requires_grad=True)
    w1 = torch.randn(24, 16, generator=generator, requires_grad=True)
    w2 = torch.randn(16, 24, generator=generator, requires_grad=True)

    def block(hidden: torch.Tensor) -> torch.Tensor:
        plan = LinearPlan(chunks_per_rank=2)
        inner = torch.relu(all_gather_linear(hidden, w1, group=group, plan=plan))
        return linear_reduce_scatter(inner, w2, group=group, plan=plan)

    y = recompute(block, x, use_reentrant=False) if checkpoint else block(x)
    assert isinstance(y, torch.Tensor)
    y.square().sum().backward()
    return [float(t.double().sum()) for t in (y, x.grad, w1.grad, w2.grad) if t is not None]


def saved_bytes(group: dist.ProcessGroup) -> int:
    """Bytes of activations that autograd keeps for a column-parallel layer, weights left out."""
    rows, k = 64, 32
    x = torch.randn(rows, k, requires_grad=True)
    w = torch.randn(48, k, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() != w.data_ptr():
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        all_gather_linear(x, w, group=group)
    return sum(kept.values())


def steady_memory(group: dist.ProcessGroup) -> tuple[int, int]:
    """BufferPool bytes after the first and after the tenth step of the same shape."""
    transport = transport_of(group)
    sizes = []
    for _ in range(10):
        x = torch.randn(32, 16, requires_grad=True)
        w = torch.randn(8, 16, requires_grad=True)
        all_gather_linear(x, w, group=group).sum().backward()
        sizes.append(sum(transport.buffer_pool.sizes().values()))
    return sizes[0], sizes[-1]


def refused(group: dist.ProcessGroup) -> list[str]:
    """The messages for arguments that do not fit."""
    x, w = torch.zeros(4, 8), torch.zeros(6, 8)
    calls = [
        lambda: all_gather_linear(torch.zeros(4, 9), w, group=group),
        lambda: all_gather_linear(x.bfloat16(), w, group=group),
        lambda: all_gather_linear(x, w, torch.zeros(5), group=group),
        lambda: all_gather_linear(x, w, group=group, num_rows=13),
        lambda: all_gather_linear(x, w, group=group, main_grad=torch.zeros(8, 6)),
        lambda: linear_reduce_scatter(torch.zeros(5, 2, 8), w, group=group),
    ]
    messages = []
    for call in calls:
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def random_calls(group: dist.ProcessGroup, seed: int, count: int) -> None:
    """Calls with shapes, dtypes, patterns, cuts and lateness drawn from `seed`, the same on all ranks."""
    import random

    draw = random.Random(seed)
    for _ in range(count):
        against_reference(
            group,
            draw.choice(["all_gather_linear", "linear_reduce_scatter"]),
            draw.choice([0, 1, 2, 3, 7, 16, 33, 64]),
            draw.choice([1, 5, 16, 31]),
            draw.choice([1, 3, 16, 40]),
            draw.choice([torch.float32, torch.bfloat16]),
            LinearPlan(
                pattern=draw.choice(["direct", "ring", "serial"]),
                chunks_per_rank=draw.choice([None, 1, 2, 3, 5]),
                split=draw.choice([None, "edge", "all"]),
            ),
            late=draw.random() < 0.5,
            main_grad=draw.random() < 0.3,
            seed=draw.randrange(1000),
            repeats=1,
        )


def closed_and_opened_again(group: dist.ProcessGroup) -> bool:
    """A transport that was closed is made anew on the next call."""
    first = transport_of(group)
    close_transport(group)
    all_gather_linear(torch.zeros(2, 2), torch.zeros(2, 2), group=group)
    return transport_of(group) is not first


def rows_in_order_of_arrival(group: dist.ProcessGroup) -> list[int]:
    """Whose rows rank 2 is handed, while rank 1, which comes first in its plan, has not sent anything yet."""
    transport = GlooTransport(group)
    plan = all_gather_plan(3, transport.rank, chunks_per_rank=2)
    layout = ChunkLayout(6, 3, 2)
    if transport.rank == 1:
        dist.barrier(group)
    arrivals = PipelinedAllGather(
        transport, plan, (torch.ones(2, 4),), layout, (torch.zeros(6, 4),), "all_gather_linear"
    )
    owners = []
    if transport.rank == 2:
        # Rank 0's rows land meanwhile; how long it may take is no part of the contract.
        for message in (2, 3):
            arrivals._p2p_work.wait(message)
        for _ in range(2):
            owners.append(arrivals.next_rows()[0][0] // 2)
    if transport.rank != 1:
        dist.barrier(group)
    for (start, _), _ in arrivals:
        owners.append(start // 2)
    arrivals.finish()
    transport.close()
    return owners


def a_ring_computes_on_while_it_waits(group: dist.ProcessGroup) -> list[str]:
    """What the computing thread of a ring reduce-scatter does, in order, when nothing lands before it is waited for."""
    transport = LateTransport(group)
    plan = reduce_scatter_plan(transport.size, transport.rank, pattern="ring")
    out = torch.zeros(2, 4)
    did: list[str] = []

    def gemm(start: int, stop: int, rows: torch.Tensor) -> None:
        did.append(f"rows of {start // 2}")
        rows.fill_(1.0)

    def meanwhile() -> bool:
        if did.count("other work") == 3:
            return False
        did.append("other work")
        return True

    departures = PipelinedReduceScatter(transport, plan, plan.layout(2 * transport.size), out, "linear_reduce_scatter")
    departures.compute(gemm, meanwhile)
    departures.finish()
    assert torch.equal(out, torch.full_like(out, transport.size))
    transport.close()
    return did


def sums_do_not_depend_on_arrival(group: dist.ProcessGroup) -> bool:
    """Whether a reduce-scatter gives the same bits whatever lands first, fp32 terms being added as the plan lists them.

    That is: the own one, then those of the ranks before this one, nearest first. Every other order has another sum.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(24, 16, generator=generator).to(torch.bfloat16)
    w = torch.randn(8, 16, generator=generator).to(torch.bfloat16)
    terms = torch.tensor([1.0, 3e7, -3e7, 0.25])
    wanted = terms[rank].clone()
    for distance in range(1, ranks):
        wanted += terms[(rank - distance) % ranks]
    plan = LinearPlan(pattern="direct", chunks_per_rank=2)
    results, sums = [], []
    for transport in (GlooTransport(group), LateTransport(group)):
        results.append(linear_reduce_scatter(x, w, group=transport, plan=plan))
        sums.append(linear_reduce_scatter(terms[rank].repeat(24, 1), torch.ones(1, 1), group=transport, plan=plan))
        transport.close()
    return torch.equal(*results) and all(bool((each == wanted).all()) for each in sums)


class Int8Gemm:
    """int8 data and one fp32 scale per row, a power of two. Exact for rows of `scale * [-127..127]`."""

    def encode(self, rows: torch.Tensor) -> Payload:
        largest = rows.abs().amax(dim=1, keepdim=True).clamp_min(1.0)
        scale = torch.exp2(torch.ceil(torch.log2(largest / 127)))
        return (rows / scale).round().to(torch.int8), scale

    def matmul(self, rows: Payload, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        out.copy_(_decode(rows) @ b if bias is None else _decode(rows) @ b + bias)

    def wgrad(self, wgrad: WeightGradient, dy: torch.Tensor | Payload, x: torch.Tensor | Payload) -> None:
        dy, x = (_decode(operand) if isinstance(operand, tuple) else operand for operand in (dy, x))
        wgrad.add(dy, x)


def _decode(payload: Payload) -> torch.Tensor:
    data, scale = payload
    return data.float() * scale


def another_number_format(group: dist.ProcessGroup, op: str, case: LinearCase, pattern: str) -> list[tuple[str, int]]:
    """Gathered rows travel as int8 data and scales. All numbers are exact, so every result equals the reference."""
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    own = ChunkLayout(case.rows, size).shard_rows(rank)
    rows_in, rows_out = (own, case.rows) if op == "all_gather_linear" else (case.rows, own)
    integers = lambda *shape: torch.randint(-8, 9, shape, generator=generator).float()  # noqa: E731
    x, w = integers(rows_in, case.in_features), integers(case.out_features, case.in_features)
    bias, dy = torch.ones(case.out_features), integers(rows_out, case.out_features)
    # Rows of different scales.
    x *= torch.exp2(torch.arange(rows_in) % 5).unsqueeze(1)
    dy *= torch.exp2(torch.arange(rows_out) % 3).unsqueeze(1)
    expected = _reference(op, x, w, bias, dy, group, case.rows)
    leaves = [tensor.requires_grad_() for tensor in (x, w, bias)]
    transport = poisoned_transport(group)
    method = P2PMethod(transport, LinearPlan(pattern=pattern, chunks_per_rank=3), Int8Gemm())  # type: ignore[arg-type]
    sent: list[tuple[str, int]] = []
    options: Any = {"num_rows": case.rows} if op == "all_gather_linear" else {}
    function: Any = all_gather_linear if op == "all_gather_linear" else linear_reduce_scatter
    y = function(*leaves, group=method, observer=lambda *counted: sent.append(counted), **options)
    y.backward(dy)
    for got, exact in zip([y.detach(), *(leaf.grad for leaf in leaves)], expected, strict=True):
        assert torch.equal(got, exact)
    transport.close()
    return sent


class _LateDevice(LateTransport):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.on_device = True


def added_on_a_device(group: dist.ProcessGroup, depth: int, *arguments: Any) -> None:
    """Compare a reduce-scatter whose received terms are added by one kernel or two, as on CUDA, with the reference.

    Args:
        group: of all ranks.
        depth: of the GEMMs that count as shallow.
        arguments: of `against_reference`.
    """
    with (
        patch.object(p2p, "SHALLOW_DEPTH", depth),
        patch.object(sys.modules[__name__], "LateTransport", _LateDevice),
    ):
        against_reference(group, "linear_reduce_scatter", *arguments, late=True)


def _layers_on(transport: Transport, dtype: torch.dtype, pattern: str) -> list[torch.Tensor]:
    """Both kinds of layer with and without sequence parallelism, forward and backward: results and gradients."""
    rank, size = transport.rank, transport.size
    plan = LinearPlan(pattern=pattern, chunks_per_rank=2, add_in_place=True)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(rank)
    own = ChunkLayout(61, size).shard_rows(rank)
    shapes = ((own, 48), (36, 48), (24, 36), (61, 48), (36, 48), (24, 36))
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    x, w1, w2, whole, v1, v2 = tensors
    hidden = all_gather_linear(x, w1, group=transport, plan=plan, num_rows=61)
    y = linear_reduce_scatter(hidden, w2, group=transport, plan=plan)
    results = [hidden, y]
    if pattern != "ring":
        inner = copy_linear(whole, v1, group=transport, plan=plan)
        results += [inner, linear_all_reduce(inner, v2, group=transport, plan=plan)]
    sum(result.float().square().sum() for result in results).backward()  # type: ignore[union-attr]
    return [*results, *(tensor.grad for tensor in tensors if tensor.grad is not None)]


def nodes_equal_messages(group: dist.ProcessGroup, pattern: str, on_device: bool) -> tuple[int, list[int]]:
    """Return the number of results, and which of them differ from those of messages between all ranks."""
    messages = OrderedTransport(GlooTransport(group))
    expected = _layers_on(messages, torch.float32, pattern)
    nodes = LateNodesTransport(group, 2, on_device=on_device)
    for _ in range(3):
        got = _layers_on(nodes, torch.float32, pattern)
    dist.barrier(group)
    nodes.close()
    messages.close()
    errors = [(mine - theirs).norm() / theirs.norm() for mine, theirs in zip(got, expected, strict=True)]
    return len(expected), [k for k, error in enumerate(errors) if not error < 1e-6]


def copies_equal_messages(group: dist.ProcessGroup, dtype: torch.dtype, pattern: str) -> tuple[int, list[int]]:
    """Return the number of results, and those that differ between copies and messages on gloo in fixed order."""
    messages = OrderedTransport(GlooTransport(group))
    expected = _layers_on(messages, dtype, pattern)
    copies = CopyTransport(CpuBackend(HostGroup(group)))
    for _ in range(2):
        got = _layers_on(copies, dtype, pattern)
    dist.barrier(group)
    copies.close()
    messages.close()
    return len(expected), [k for k, pair in enumerate(zip(got, expected, strict=True)) if not torch.equal(*pair)]
