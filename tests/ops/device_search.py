"""Random programs of operations on the device model, checked in all orders in which the devices may run them.

`python -m tests.ops.device_search --seeds 0 1000` prints each seed that fails. A program has one or two lanes. The
host takes turns between the lanes, as where gradient buckets start during backward. All ranks run the same program.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_overlap.comm import PART_CHANNELS, Transport, TransportOptions, nccl
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.symmetric.nodes import CopyNodesTransport
from megatron_overlap.kernels import gemm_rs
from megatron_overlap.ops import data_parallel, flash_attention
from megatron_overlap.ops.call import unobserved
from megatron_overlap.ops.data_parallel import Gathering, GradientReduce
from megatron_overlap.ops.expert_parallel.exchange import ExpertPass, Rows
from megatron_overlap.ops.tensor_parallel.linear import _ColumnParallel, _RowParallel
from megatron_overlap.ops.tensor_parallel.method import LinearOptions
from megatron_overlap.ops.tensor_parallel.p2p import LinearPlan, method_for
from megatron_overlap.ops.tensor_parallel.part_messages import GatherScatterMessages, PartGathers
from megatron_overlap.ops.ulysses import attention as ulysses
from megatron_overlap.ops.varlen.attention import _BalancedAttention, _rebalances
from megatron_overlap.ops.varlen.ring import CallOptions, VarlenTransports
from megatron_overlap.ops.wgrad import WgradTarget
from megatron_overlap.schedules import ChunkLayout, SequenceLayout
from megatron_overlap.schedules.expert_parallel import Segments, expert_plan
from megatron_overlap.schedules.gather_scatter import Nodes
from megatron_overlap.schedules.varlen import Topology
from tests.comm.copy_engines import EngineBackend
from tests.comm.device import NcclGroup, Recorder
from tests.comm.device_orders import Accesses, OrderError, check
from tests.comm.makespan import Gpu
from tests.ops.tensor_parallel.device_layers import Context
from tests.ops.varlen.test_attention import one_pass

Lane = Iterator[None]
"""An operation, or several in order. It yields where the host may run the other lane."""


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes, in tensor-parallel groups of consecutive ranks, and the transport of groups inside a node."""

    nodes: int
    per_node: int
    tp: int
    copies: bool

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.per_node


class Rank:
    """One rank: its device, and the transports of its groups `tp`, `dp` and `all`."""

    def __init__(self, patch: pytest.MonkeyPatch, cluster: Cluster, rank: int) -> None:
        self.cluster, self.rank = cluster, rank
        self.device = device = Recorder(rank, cluster.num_ranks)
        on_device, tp = device.torch, cluster.tp
        patch.setattr(nccl, "torch", on_device)
        patch.setattr(data_parallel, "torch", on_device)
        patch.setattr(nccl, "dist", device.dist)
        patch.setattr(nccl, "store_beside", lambda group: group)
        patch.setattr(gemm_rs, "add_terms", self._add_terms)
        patch.setattr("megatron_overlap.ops.wgrad.triton_unsupported_reason", lambda: "")
        patch.setattr(flash_attention, "_cu_seqlens", lambda lengths, device: self.full(len(lengths) + 1))
        patch.setattr(ulysses, "sequence_forward", _attention_forward)
        patch.setattr(ulysses, "sequence_backward", _attention_backward)
        self._ranks = {
            "tp": range(rank // tp * tp, rank // tp * tp + tp),
            "dp": range(rank % tp, cluster.num_ranks, tp),
            "all": range(cluster.num_ranks),
        }
        self._transports: dict[tuple[str, str], Transport] = {}
        self._reducers: dict[tuple[str, bool, bool], GradientReduce] = {}
        self._megatron: dict[str, NcclGroup] = {}

    def _add_terms(self, terms: torch.Tensor, own: torch.Tensor, out: torch.Tensor, divisor: int) -> None:
        span = self.device.span
        self.device.put("work", "add_terms", reads=(span(terms), span(own)), writes=(span(out),))

    @staticmethod
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, device="cuda", dtype=dtype)

    def full(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """A tensor whose content an earlier operation has written."""
        return self.empty(*shape, dtype=dtype).fill_(0)

    def on_nccl(self, group: str, channel: str = "") -> Transport:
        """As `open_transport` of the adapters."""
        if (group, channel) not in self._transports:
            of: Any = SimpleNamespace(ranks=self._ranks[group])
            self._transports[group, channel] = nccl.NcclTransport(of, TransportOptions(channel, timeout_s=5))
        return self._transports[group, channel]

    def transport(self, group: str, channel: str = "", *, over_nodes: bool = False) -> Transport:
        """As `open_device_transport` of the adapters."""
        if (group, "copies") not in self._transports:
            found = self._open_copies(group, over_nodes=over_nodes) if self.cluster.copies else None
            if found is None:
                return self.on_nccl(group, channel)
            self._transports[group, "copies"] = found
        return self._transports[group, "copies"]

    def _open_copies(self, group: str, *, over_nodes: bool) -> Transport | None:
        ranks = self._ranks[group]
        hosts = [str(rank // self.cluster.per_node) for rank in ranks]
        try:
            nodes = Nodes.of(hosts)
        except ValueError:
            return None
        if nodes.num_nodes > 1 and (nodes.per_node == 1 or not over_nodes):
            return None
        node = nodes.node(ranks.index(self.rank))
        members = [ranks[each] for each in nodes.members(node)]
        backend: Any = EngineBackend(self.device, Gpu(), range(members[0], members[-1] + 1, ranks.step), f"{group} ")
        inside = CopyTransport(backend)
        return inside if nodes.num_nodes == 1 else CopyNodesTransport(inside, self.on_nccl(group), nodes)

    def reducer(self, group: str, *, whole: bool, wide: bool) -> GradientReduce:
        """As of `DataParallelAdapter`."""
        key = group, whole, wide
        if key not in self._reducers:
            gather = self.on_nccl(group, "data sums") if whole else None
            self._reducers[key] = GradientReduce(self.transport(group, "data"), gather=gather, wide=wide)
        return self._reducers[key]

    def megatron(self, group: str) -> NcclGroup:
        """Megatron's communicator of a group."""
        if group not in self._megatron:
            number = 100 + list(self._ranks).index(group)
            self._megatron[group] = NcclGroup(self.device, number, ranks=self._ranks[group])
        return self._megatron[group]


def _attention_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object) -> tuple[torch.Tensor, Any]:
    for each in k, v:
        each.sum()
    return q.clone(), (q, k, v)


def _attention_backward(saved: Any, grad: torch.Tensor, **_: object) -> tuple[torch.Tensor, ...]:
    grad.sum()
    return tuple(each.clone() for each in saved)


def linear(rank: Rank, draw: random.Random, group: str) -> Lane:
    """Forward and backward of one or two linear layers with the same input or output rows."""
    pattern = draw.choice([None, None, "direct", "ring", "serial"])
    plain = pattern != "ring" and draw.random() < 0.4
    plan = LinearPlan(
        pattern=pattern,
        chunks_per_rank=draw.choice([None, 1, 2, 3]),
        split=draw.choice([None, "all", "edge"]),
    )
    transport = rank.transport(group, over_nodes=True)
    method = method_for(transport, plan)
    num_rows, is_column = draw.choice([0, 1, 5, 23, 32, 64]), draw.random() < 0.5
    features, hidden = draw.choice([8, 520]), draw.choice([8, 8, 1600])
    fused, num_layers = draw.random() < 0.5, draw.choice([1, 2])
    own = num_rows if plain else ChunkLayout(num_rows, transport.size).shard_rows(transport.rank)
    w = rank.full(features, hidden) if is_column else rank.full(hidden, features)
    x = rank.full(own, hidden) if is_column else rank.full(num_rows, features)
    contexts = []
    function: Any = _ColumnParallel if is_column else _RowParallel
    for _ in range(num_layers):
        main_grad = rank.full(*w.shape, dtype=torch.float32) if fused else None
        call = LinearOptions(
            method,
            WgradTarget(main_grad, None, transport.buffer_pool),
            sharded=not plain,
            num_rows=num_rows,
        )
        context = Context()
        y = function.forward(context, x, w, *([None] if is_column else []), call)
        y.sum()
        contexts.append(context)
        yield
    for context in reversed(contexts):
        dy = rank.full(*y.shape)
        for gradient in function.backward(context, dy)[:2]:
            if gradient is not None:
                gradient.sum()
        yield


def experts(rank: Rank, draw: random.Random, group: str) -> Lane:
    """Passes of an expert layer with random routings; one may have no tokens."""
    transport = rank.transport(group)
    size, num_experts, me = transport.size, draw.choice([1, 2]), transport.rank
    serial, most = draw.random() < 0.2, draw.choice([1, 40, 150])
    parts, min_rows = draw.choice([(None, 256), (1, 64), (3, 64)])
    for number in range(2):
        counts = [[[draw.choice([0, draw.randrange(most)]) for _ in range(num_experts)] for _ in range(size)]] * 0
        for _ in range(size):
            counts.append([[draw.choice([0, draw.randrange(most)]) for _ in range(num_experts)] for _ in range(size)])
        totals = [[sum(each) for each in sent] for sent in counts]
        known = transport.prepares or draw.random() < 0.5
        plan = expert_plan(
            me,
            counts[me],
            [sent[me] for sent in counts],
            totals=totals if known else None,
            parts=parts,
            min_rows=min_rows,
        )
        w = rank.full(8, 8)
        tokens = (rank.full(plan.num_tokens, 8), *([rank.full(plan.num_tokens)] if number == 0 else []))
        results: Rows = (rank.empty(plan.num_tokens, 8),)

        def compute(segments: Segments, inputs: Rows, outputs: Rows, w: torch.Tensor = w) -> None:
            for each in inputs[1:]:
                each.sum()
            torch.mm(inputs[0], w, out=outputs[0])

        expert_pass = ExpertPass(transport, plan, "experts", tokens, results, serial=serial)
        yield
        expert_pass.run(compute, fixed_order=True)
        expert_pass.expert_rows().sum()
        yield
        expert_pass.finish()
        results[0].sum()
        yield


def buckets(rank: Rank, draw: random.Random, group: str) -> Lane:
    """Gradient buckets that start one after another, then the gathers of their parameters."""
    whole, wide = draw.random() < 0.4, draw.random() < 0.5
    reducer, gathers = rank.reducer(group, whole=whole, wide=wide), not whole and draw.random() < 0.5
    size, pending = reducer.transport.size, []
    reducer.pieces = draw.choice([None, 1, 3])
    grads = [
        rank.full(size * draw.choice([0, 1, 5, 64]) + whole * draw.randrange(3)) for _ in range(draw.randrange(1, 4))
    ]
    for grad in grads:
        grad.add_(1)
        pending.append(reducer.begin(grad, mean=draw.random() < 0.5))
        yield
    for grad, reduction in zip(grads, pending, strict=True):
        reduction.wait()
        grad.add_(1)
        yield
    if gathers:
        gathering = [Gathering(rank.on_nccl(group, "data"), grad) for grad in grads]
        yield
        for grad, each in zip(grads, gathering, strict=True):
            each.wait()
            grad.add_(1)
            yield


def heads(rank: Rank, draw: random.Random, group: str) -> Lane:
    """Ulysses attention with rows that ranks share unevenly."""
    transport = rank.transport(group)
    size, num_rows = transport.size, draw.choice([16, 17, 33])
    layout = SequenceLayout.zigzag(16, size) if draw.random() < 0.3 else None
    rows = layout.rows_of(transport.rank) if layout else num_rows
    plan = ulysses.UlyssesPlan(num_groups=draw.choice([None, 1, 2, 3]), pattern=draw.choice(["direct", "serial"]))
    num_heads, num_kv = size * draw.choice([1, 2, 3]), draw.choice([1, size])
    q, k, v = (rank.full(rows, 1, count, 8) for count in (num_heads, num_kv, num_kv))
    call = ulysses.UlyssesCall.of(transport, layout, q, plan, None)
    split = plan.heads(num_heads, num_kv, size, call.head_bytes(q, 8))
    context: Any = SimpleNamespace()
    attention = ulysses.HeadAttention(split, transport.rank, 8, True, None, None)
    ulysses._Ulysses.forward(context, q, k, v, call, attention).sum()
    yield
    for gradient in ulysses._Ulysses.backward(context, rank.full(*q.shape))[:3]:
        assert gradient is not None
        gradient.sum()
    yield


def documents(rank: Rank, draw: random.Random, group: str) -> Lane:
    """Balanced attention of documents, of one or of both passings."""
    cluster, size = rank.cluster, len(rank._ranks[group])
    topology = Topology(cluster.nodes, cluster.per_node) if group == "all" else Topology(1, size)
    inter = rank.transport(group)
    others = [inter if inter.prepares else rank.on_nccl(group, each) for each in ("intra", "rebalance")]
    transports = VarlenTransports(inter, *others)
    lengths = draw.choices([2000, 40000, 20000, 300, 9000], k=draw.randrange(1, 7))
    method = draw.choice(["balanced", "ring", "packing"])
    plan = one_pass(lengths, topology, max(lengths) if method == "packing" else 0, method)
    rebalances = _rebalances(plan, 0) if draw.random() < 0.5 else None
    if rebalances is not None and not rebalances[0].moves:
        rebalances = None
    rows = (plan.tokens(0) if rebalances is None else rebalances[0].before)[rank._ranks[group].index(rank.rank)]
    passing = draw.choice(["kv", "q", None])
    options = CallOptions(transports, plan, 0, 1.0, passing, rebalances, unobserved)
    q, k, v, dy = (rank.full(rows, count, 1) for count in (2, 1, 1, 2))
    context: Any = Context()
    _BalancedAttention.forward(context, q, k, v, options).sum()
    yield
    for gradient in _BalancedAttention.backward(context, dy)[:3]:
        assert gradient is not None
        gradient.sum()
    yield


class _Postponed:
    """`DeferredWgrad` without the engine of autograd."""

    def __init__(self) -> None:
        self._jobs: list[tuple[torch.Tensor, Any]] = []

    @property
    def num_pending(self) -> int:
        return len(self._jobs)

    def put(self, weight: object, dy: torch.Tensor, x: Any, target: object) -> None:
        self._jobs.append((dy, x))

    def run_while(self, waiting: Callable[[], bool]) -> None:
        while self._jobs and waiting():
            dy, x = self._jobs.pop(0)
            torch.mm(dy.t(), x() if callable(x) else x)


def parts(rank: Rank, draw: random.Random, group: str) -> Lane:
    """The steps of a split micro-batch, in the order of `ops.tensor_parallel.batch_overlap`."""
    transports = [rank.on_nccl(group, each) for each in PART_CHANNELS]
    carrier = rank.transport(group, over_nodes=True)
    gathers = PartGathers(carrier, min_bytes=draw.choice([1, 1 << 30])) if carrier.copy_engines else None
    size, num_steps, rows = carrier.size, draw.randrange(1, 5), draw.choice([1, 4])
    serial = draw.random() < 0.1
    w1, w2 = rank.full(8, 8), rank.full(8, 8)

    def step(part: int, deferred: Any, x: torch.Tensor) -> GatherScatterMessages:
        messages = GatherScatterMessages(transports[part], deferred, serial=serial, gathers=gathers)
        messages.gather("input", x)
        return messages

    deferred = [_Postponed() for _ in range(num_steps)]
    started = [step(part, deferred[0], rank.full(rows, 8)) for part in range(2)]
    inputs, all_steps, before = [rank.full(rows, 8)] * 2, [], None
    for number in range(num_steps):
        for part in range(2):
            messages = started[part]
            hidden = messages.full("input", inputs[part]).matmul(w1)
            if before is not None:
                previous, of = before
                inputs[of] = previous.finish("output").clone()
                following = number + (of == 0)
                if following < num_steps:
                    started[of] = step(of, deferred[following], inputs[of])
            messages.reduce("output", hidden, w2)
            before = messages, part
            all_steps.append((messages, part))
            yield
    assert before is not None
    before[0].finish("output").sum()
    for messages, _ in all_steps:
        messages.abandon()
    yield
    previous_gradient: GatherScatterMessages | None = None
    for messages, _ in reversed(all_steps):
        dy, x = rank.full(rows, 8), rank.full(rows, 8)
        messages.gather("output gradient", dy)
        messages.gather_next("input", x)
        if previous_gradient is not None:
            previous_gradient.finish("input gradient").sum()
        gather = messages.full("output gradient", dy)
        dx = gather.matmul(w2)
        messages.defer_wgrad(w2, gather.finish(), rank.full(size * rows, 8), WgradTarget())
        messages.reduce("input gradient", dx, w1)
        messages.defer_wgrad(w1, dx, messages.take("input").finish, WgradTarget())
        previous_gradient = messages
        yield
    assert previous_gradient is not None
    previous_gradient.finish("input gradient").sum()
    for messages, _ in all_steps:
        messages.deferred_wgrad.run_while(lambda: True)
        messages.abandon()
    yield


def stock(rank: Rank, draw: random.Random, group: str) -> Lane:
    """Collectives of Megatron on its own communicator, one behind the other or beside other work."""
    communicator = rank.megatron(group)
    for _ in range(draw.randrange(1, 4)):
        x, y = rank.full(8), rank.full(8 * len(communicator._all))
        work = communicator._allgather_base(y, x)
        if draw.random() < 0.5:
            yield
        work.wait()
        y.sum()
        yield


FEATURES: dict[str, Callable[[Rank, random.Random, str], Lane]] = {
    each.__name__: each for each in (linear, experts, buckets, heads, documents, parts, stock)
}


@dataclass(frozen=True)
class Program:
    """Operations by lane, each with its group and the seed of its sizes, and the turns of the lanes."""

    cluster: Cluster
    lanes: tuple[tuple[tuple[str, str, int], ...], ...]
    turns: int

    @classmethod
    def of(cls, seed: int, only: str | None = None) -> Program:
        """The program of a seed; with `only` the first operation is one of this feature."""
        draw = random.Random(seed)
        nodes, per_node = draw.choice([(1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (2, 2), (3, 1), (2, 3), (3, 2), (2, 4)])
        num_ranks = nodes * per_node
        tp = draw.choice([each for each in range(2, num_ranks + 1) if num_ranks % each == 0])
        cluster = Cluster(nodes, per_node, tp, copies=draw.random() < 0.7)
        groups = ["tp" if tp < num_ranks else "all", *(["dp"] if tp < num_ranks else [])]
        if draw.random() < 0.3:
            groups = ["all"]
        features = {
            "tp": ["linear", "linear", "parts", "heads", "experts", "stock"],
            "dp": ["buckets", "buckets", "experts", "documents", "heads", "stock"],
            "all": list(FEATURES),
        }
        lanes = tuple(
            tuple((draw.choice(features[group]), group, draw.randrange(1 << 30)) for _ in range(draw.randrange(1, 4)))
            for group in groups
        )
        if only is not None:
            lanes = ((only, groups[0], draw.randrange(1 << 30)), *lanes[0][1:]), *lanes[1:]
        return cls(cluster, lanes, draw.randrange(1 << 30))

    def run(self, rank: Rank) -> None:
        """Records the program on a rank."""
        turns = random.Random(self.turns)
        running = [self._lane(rank, lane) for lane in self.lanes]
        while running:
            lane = turns.choice(running)
            if next(lane, ...) is ...:
                running.remove(lane)

    @staticmethod
    def _lane(rank: Rank, lane: tuple[tuple[str, str, int], ...]) -> Lane:
        for name, group, seed in lane:
            yield from FEATURES[name](rank, random.Random(seed), group)


def search(program: Program) -> int:
    """Records a program on all ranks and checks it; returns the number of operations."""
    devices = []
    for number in range(program.cluster.num_ranks):
        with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
            rank = Rank(patch, program.cluster, number)
            with Accesses(rank.device):
                program.run(rank)
            devices.append(rank.device)
    return check(devices)


def main() -> None:
    """Search."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 100), help="first seed and the one after the last")
    parser.add_argument("--only", choices=FEATURES, help="the first operation")
    arguments = parser.parse_args()
    failures = 0
    for seed in range(*arguments.seeds):
        program = Program.of(seed, arguments.only)
        try:
            search(program)
        except OrderError as error:
            failures += 1
            print(f"seed {seed}: {program}\n{error}\n", flush=True)
    print(f"{failures} failures")


if __name__ == "__main__":
    main()
