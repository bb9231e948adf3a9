"""The cost of a plan: load of every rank, balance and lower bound, as numbers and as text."""

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron_overlap.schedules.varlen.plan import Pass, Plan
from megatron_overlap.schedules.varlen.topology import FS_PER_US


@dataclass(frozen=True, slots=True)
class Load:
    """Modelled load of one rank in one pass: attention time and message time in femtoseconds, and tokens."""

    attention_fs: int
    message_fs: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly a plan uses its ranks.

    A balance is the mean load divided by the largest load; 1 is perfect. Over several stages it is the sum of the means
    divided by the sum of the largest loads.

    Attributes:
        attention: balance of attention time.
        compute: balance of attention and linear layers, if the linear layers use the attention layout.
        tokens: balance of tokens.
        lower_bound_us: total attention time divided by the number of ranks. No plan takes less.
        attention_us: sum over stages of the largest attention time.
        step_us: sum over stages of the largest step time. The step time of a rank is the longer of its attention and
            its messages, or their sum where the plan uses an all-gather.
        message_us: sum over stages of the largest message time.
        passes: largest number of non-empty passes of a rank.
    """

    attention: float
    compute: float
    tokens: float
    lower_bound_us: float
    attention_us: float
    step_us: float
    message_us: float
    passes: int


def loads(plan: Plan, index: int) -> list[Load]:
    """The load of every rank in pass `index`. Each ring member receives all chunks that it does not hold."""
    cost, topology, lengths = plan.cost, plan.topology, plan.lengths
    attention, message = [0] * topology.ranks, [0] * topology.ranks
    part = plan.passes[index]
    whole = {length: cost.attention_fs(length * (length + 1) // 2, length) for length in set(lengths)}
    for rank, documents in enumerate(part.local):
        attention[rank] = sum(whole[lengths[document]] for document in documents)
    for ring in part.rings:
        hops, inter = len(ring.ranks) - 1, ring.zone == "inter"
        for position, rank in enumerate(ring.ranks):
            tokens = ring.tokens(position)
            attention[rank] += cost.attention_fs(ring.pairs(position), tokens)
            message[rank] += cost.ring_fs(ring.length - tokens, hops, topology, inter=inter)
    return [Load(*load) for load in zip(attention, message, plan.tokens(index), strict=True)]


def balance(plan: Plan) -> Balance:
    """Computes the balance and the modelled times of a plan."""
    ranks = plan.topology.ranks
    peaks = [0] * 5
    sums = [0, 0, 0]
    linear = plan.cost.linear_fs
    for _, group in groupby(range(len(plan.passes)), key=lambda index: plan.passes[index].stage):
        attention, message, tokens = [0] * ranks, [0] * ranks, [0] * ranks
        for index in group:
            for rank, load in enumerate(loads(plan, index)):
                attention[rank] += load.attention_fs
                message[rank] += load.message_fs
                tokens[rank] += load.tokens
        compute = [a + linear * t for a, t in zip(attention, tokens, strict=True)]
        # A ring overlaps its messages with attention. An all-gather completes before attention starts.
        both = max if plan.exchange == "ring" else operator.add
        step = list(map(both, attention, message))
        for number, values in enumerate((attention, compute, tokens, step, message)):
            peaks[number] += max(values)
        for number, values in enumerate((attention, compute, tokens)):
            sums[number] += sum(values)
    ratios = [total / (ranks * peak) if peak else 1.0 for total, peak in zip(sums, peaks, strict=False)]
    return Balance(
        attention=ratios[0],
        compute=ratios[1],
        tokens=ratios[2],
        lower_bound_us=sums[0] / ranks / FS_PER_US,
        attention_us=peaks[0] / FS_PER_US,
        step_us=peaks[3] / FS_PER_US,
        message_us=peaks[4] / FS_PER_US,
        passes=max(_num_busy_passes(plan), default=0),
    )


def describe(plan: Plan, *, ranks: int = 16) -> str:
    """The plan as text: balance, zones, and the first `ranks` ranks of every pass."""
    result, topology = balance(plan), plan.topology
    lines = [
        f"{plan.method}: {len(plan.lengths)} documents, {sum(plan.lengths)} tokens on {topology.ranks} ranks "
        f"({topology.nodes} x {topology.devices_per_node}), at most {plan.capacity} tokens per rank and pass",
        f"attention {result.attention_us:.0f} us modelled, lower bound {result.lower_bound_us:.0f} us; balance "
        f"{result.attention:.3f}, with linear layers {result.compute:.3f}, of tokens {result.tokens:.3f}; "
        f"messages {result.message_us:.0f} us; at most {result.passes} passes per rank",
    ]
    for index, part in enumerate(plan.passes):
        lines.append(f"pass {index} (stage {part.stage}): {_describe_zones(part)}")
        table = loads(plan, index)
        for rank, load in enumerate(table[:ranks]):
            member = [ring for ring in part.rings if rank in ring.ranks]
            cut = ", ".join(f"{ring.document}/{len(ring.ranks)}" for ring in member[:6])
            more = f" and {len(member) - 6} more" if len(member) > 6 else ""
            lines.append(
                f"  rank {rank}: {load.tokens} tokens, attention {load.attention_fs / FS_PER_US:.0f} us, "
                f"{len(part.local[rank])} whole documents" + (f", rings (document/ranks) {cut}{more}" if member else "")
            )
        if len(table) > ranks:
            lines.append(f"  ... {len(table) - ranks} more ranks")
    return "\n".join(lines)


def _num_busy_passes(plan: Plan) -> Sequence[int]:
    """Number of passes in which each rank holds tokens."""
    counts = [0] * plan.topology.ranks
    for index in range(len(plan.passes)):
        for rank, tokens in enumerate(plan.tokens(index)):
            counts[rank] += tokens > 0
    return counts


def _describe_zones(part: Pass) -> str:
    texts = [f"{sum(map(len, part.local))} whole documents"]
    for zone in ("intra", "inter"):
        sizes = Counter(len(ring.ranks) for ring in part.rings if ring.zone == zone)
        if sizes:
            rings = ", ".join(f"{count} x {size}" for size, count in sorted(sizes.items()))
            texts.append(f"{zone}-node rings (count x ranks): {rings}")
    return "; ".join(texts)
