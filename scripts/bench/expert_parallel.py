"""Times a layer of experts under expert parallelism and its alternatives over links with a limited rate.

    python scripts/bench/expert_parallel.py --hosts 2 --gbps 0.4 --rows 2048 --hidden 1024 --ffn 2048

One rank a host, one thread a rank. Every figure is the median over rounds; each round runs all variants.

`stock` is all-to-all, experts, all-to-all. `messages` sends the messages of `overlap` before and after the computation.
`halves` overlaps two halves of the tokens by asynchronous all-to-alls. `own_first` computes own rows before all chunks,
as FasterMoE does. `roof` computes and sends a pass at the same time, as if neither depended on the other.

`--routing FILE` takes the routings of `record_routing.py` in place of a drawn one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Run, Timings, link_parser, run_rates

from megatron_overlap.comm import Transport, destroy_process_groups, transport_of
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.ops import ExpertOptions, MLPExperts, Projection, expert_parallel
from megatron_overlap.schedules.expert_parallel import Counts, expert_plan
from tests.helpers import reference

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DIRECTIONS = ("forward", "forward_backward")
OWN_FIRST = ExpertOptions(compute_per_message=0.0, fixed_order=True)
SERIAL = ExpertOptions(schedule="serial")


def activation(hidden: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """GELU, scaled by the probabilities."""
    return (F.gelu(hidden, approximate="tanh") * probs[:, None]).to(hidden.dtype)


Routing = list[list[list[int]]]
"""Tokens by source, owner and expert, the same on every rank."""


def drawn(size: int, experts: int, rows: int, skew: float) -> Routing:
    """Experts are drawn in proportion to `uniform ** skew`."""
    generator = torch.Generator().manual_seed(5)
    weights = torch.rand(size * experts, generator=generator) ** skew
    chosen = [torch.multinomial(weights, rows, replacement=True, generator=generator) for _ in range(size)]
    return [torch.bincount(each, minlength=size * experts).view(size, experts).tolist() for each in chosen]


def recorded(path: Path, size: int, rows: int) -> dict[str, Routing]:
    """Samples of a file, one sequence a rank, each with `rows` tokens in the recorded proportion."""
    found = {}
    for sample in json.loads(path.read_text())["samples"]:
        local = len(sample["counts"][0]) // size
        sources = []
        for counts in sample["counts"][:size]:
            ends = [round(total * rows / sum(counts)) for total in accumulate(counts, initial=0)]
            scaled = [stop - start for start, stop in pairwise(ends)]
            sources.append([scaled[owner * local : (owner + 1) * local] for owner in range(size)])
        found[f"step {sample['step']}, layer {sample['layer']}"] = sources
    return found


@dataclass(frozen=True)
class Shape:
    """Tokens of one rank, H, F, and experts of one rank."""

    rows: int
    hidden: int
    ffn: int
    experts: int


class ExpertCase:
    """One layer on one rank, in all variants."""

    def __init__(self, shape: Shape, dtype: torch.dtype, transport: Transport, counts: Routing, backward: bool) -> None:
        self.shape, self.transport, self.backward = shape, transport, backward
        rank, size = transport.rank, transport.size
        self.sent: Counts = counts[rank]
        self.received: Counts = [counts[source][rank] for source in range(size)]
        generator = torch.Generator().manual_seed(100 + rank)

        def draw(*dims: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*dims, generator=generator) * scale).to(dtype)

        self.x, self.dy = draw(shape.rows, shape.hidden), draw(shape.rows, shape.hidden)
        self.probs = torch.rand(shape.rows, generator=generator).to(dtype)
        self.fc1 = [draw(shape.ffn, shape.hidden, scale=shape.hidden**-0.5) for _ in range(shape.experts)]
        self.fc2 = [draw(shape.hidden, shape.ffn, scale=shape.ffn**-0.5) for _ in range(shape.experts)]
        self.group_rows = [sum(column) for column in zip(*self.received, strict=True)]

    def variants(self) -> dict[str, Run]:
        """Name to callable."""
        return {
            "compute": self.compute,
            "comm_collective": self.comm_collective,
            "comm_p2p": self.send,
            "stock": lambda: self.layer(reference.expert_parallel, group=dist.group.WORLD),
            "messages": lambda: self.layer(expert_parallel, group=self.transport, options=SERIAL),
            "halves": self.halves,
            "own_first": lambda: self.layer(expert_parallel, group=self.transport, options=OWN_FIRST),
            "overlap": lambda: self.layer(expert_parallel, group=self.transport),
            "roof": lambda: self.send(self.passes()),
        }

    def layer(self, function: Callable[..., torch.Tensor], **options: Any) -> list[torch.Tensor]:
        """The output, and with backward all gradients."""
        leaves = [t.detach().requires_grad_(self.backward) for t in (self.x, self.probs, *self.fc1, *self.fc2)]
        x, probs, *weights = leaves
        each, count = [Projection(weight) for weight in weights], self.shape.experts
        experts = MLPExperts(tuple(each[:count]), tuple(each[count:]), activation)
        y = function(x, probs, self.sent, self.received, experts, **options)
        if not self.backward:
            return [y]
        y.backward(self.dy)
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def compute(self) -> None:
        """The arithmetic of whole experts."""
        for run in self.passes():
            run()

    def passes(self) -> list[Run]:
        """The arithmetic of whole experts in each pass."""
        made: list[tuple[torch.Tensor, torch.Tensor]] = []

        def forward() -> None:
            for expert, rows in enumerate(self.group_rows):
                x, probs = self.x.new_zeros(rows, self.shape.hidden), self.probs.new_ones(rows)
                w1, w2 = self.fc1[expert], self.fc2[expert]
                leaves = [t.detach().requires_grad_(self.backward) for t in (x, probs, w1, w2)]
                made.append((activation(leaves[0] @ leaves[2].t(), leaves[1]) @ leaves[3].t(), x))

        def backward() -> None:
            for y, dy in made:
                y.backward(dy)

        return [forward, backward] if self.backward else [forward]

    def comm_collective(self) -> None:
        """The all-to-alls of the stock order alone."""
        splits = [sum(counts) for counts in self.sent], [sum(counts) for counts in self.received]
        rows = self.x.new_empty(sum(splits[1]), self.shape.hidden)
        for _ in range(2 if self.backward else 1):
            dist.all_to_all_single(rows, self.x, splits[1], splits[0])
            dist.all_to_all_single(torch.empty_like(self.x), rows, splits[0], splits[1])

    def send(self, beside: Sequence[Run] = ()) -> None:
        """All messages of each pass at once, and the pass of `beside` while they are sent."""
        plan = expert_plan(self.transport.rank, self.sent, self.received)
        rows = self.x.new_zeros(plan.num_received, self.shape.hidden)
        back, y = torch.empty_like(rows), torch.empty_like(self.x)
        half = len(plan.messages)
        transfers = []
        for index, message in enumerate(plan.transfers):
            each = plan.messages[index % half]
            tokens, arrived = (y, rows) if index >= half else (self.x, back)
            sent = tokens[each.sent[0].start : each.sent[-1].stop] if each.sent else tokens[:0]
            received = arrived[each.arrives : each.arrives + each.num_received]
            send, recv = (sent, received) if index < half else (received, sent)
            transfers.append(Transfer(replace(message, after_work=0), send, recv))
        for run in beside or [lambda: None] * (2 if self.backward else 1):
            work = self.transport.begin(transfers, "bench")
            run()
            work.wait_all()

    def halves(self) -> None:
        """Two halves of the tokens: the all-to-alls of one run beside the computation of the other. For times only:
        a half is cut from the tokens as one piece, without the gather that its rows need."""
        parts = [self._half(part) for part in (0, 1)]
        for backward in (False, True) if self.backward else (False,):
            there = [self._start(part, *splits) for part, splits in enumerate(parts)]
            home = []
            for part, (sent, received) in enumerate(parts):
                work, rows = there[part]
                work.wait()
                groups = [
                    sum(count * (part + 1) // 2 - count * part // 2 for count in column)
                    for column in zip(*self.received, strict=True)
                ]
                self._half_compute(rows, groups, backward)
                y = rows.new_empty(sum(sent), self.shape.hidden)
                home.append((dist.all_to_all_single(y, rows, sent, received, async_op=True), y))
            for work, _ in home:
                work.wait()

    def _half(self, part: int) -> tuple[list[int], list[int]]:
        """Rows of half `part` to and from each rank."""

        def cut(counts: Counts) -> list[int]:
            return [sum(n * (part + 1) // 2 - n * part // 2 for n in each) for each in counts]

        return cut(self.sent), cut(self.received)

    def _start(self, part: int, sent: list[int], received: list[int]) -> tuple[Any, torch.Tensor]:
        rows = self.x.new_empty(sum(received), self.shape.hidden)
        start = 0 if part == 0 else self.shape.rows - sum(sent)
        x = self.x[start : start + sum(sent)]
        return dist.all_to_all_single(rows, x, received, sent, async_op=True), rows

    def _half_compute(self, rows: torch.Tensor, groups: list[int], backward: bool) -> None:
        """The GEMMs of one half, with the sort by expert before and after them."""
        pieces = [piece.clone() for piece in rows.split(groups)]
        for expert, piece in enumerate(pieces):
            w1, w2 = self.fc1[expert], self.fc2[expert]
            probs = self.probs.new_ones(len(piece))
            if not backward:
                result = activation(piece @ w1.t(), probs) @ w2.t()
            else:
                hidden = piece.new_zeros(len(piece), self.shape.ffn).requires_grad_()
                grad = piece @ w2
                activated = activation(hidden, probs)
                activated.backward(grad)
                assert hidden.grad is not None
                result = hidden.grad @ w1
                piece.t() @ activated.detach()
                hidden.grad.t() @ piece
            piece.copy_(result)
        torch.cat(pieces, out=rows)


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    run_rates(__file__, args, [None] if args.loopback else args.gbps, print_row)


def work(args: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = transport_of(dist.group.WORLD)
    if args.routing is None:
        routings = {f"skew {args.skew:g}": drawn(transport.size, args.experts, args.rows, args.skew)}
    else:
        routings = recorded(args.routing, transport.size, args.rows)
    rows = []
    for (name, counts), direction in product(routings.items(), args.directions):
        shape = Shape(args.rows, args.hidden, args.ffn, len(counts[0][0]))
        case = ExpertCase(shape, DTYPES[args.dtype], transport, counts, direction == "forward_backward")
        gate(case)
        rows.append({"routing": name, **measure(case, direction, args)})
    if transport.rank == 0:
        Path(args.json).write_text(json.dumps({"rows": rows}))
    destroy_process_groups()


def gate(case: ExpertCase) -> None:
    """Check the results before anything is timed."""
    expected = case.layer(reference.expert_parallel, group=dist.group.WORLD)
    for options in (None, OWN_FIRST, SERIAL):
        got = case.layer(expert_parallel, group=case.transport, options=options)
        for one, other in zip(got, expected, strict=True):
            error = (one.float() - other.float()).norm() / other.float().norm()
            if not error < 4 * torch.finfo(one.dtype).eps:
                raise SystemExit(f"the overlapped result is off by {error:.2e} of the reference: nothing is timed")


def measure(case: ExpertCase, direction: str, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one direction."""
    variants = case.variants()
    timings = Timings(variants, args.rounds, args.warmup)
    return {
        "direction": direction,
        "ranks": case.transport.size,
        **vars(case.shape),
        "dtype": args.dtype,
        **{f"{name}_ms": timings.ms(name) for name in variants},
        "speedup_over_stock": timings.ratio("stock", "overlap"),
        "speedup_of_messages_alone": timings.ratio("stock", "messages"),
        "speedup_over_halves": timings.ratio("halves", "overlap"),
        "speedup_over_own_first": timings.ratio("own_first", "overlap"),
        "overlap_over_roof": timings.ratio("overlap", "roof"),
        "rounds": args.rounds,
    }


def print_row(row: dict[str, Any]) -> None:
    names = ("compute", "comm_collective", "comm_p2p", "stock", "messages", "halves", "own_first", "overlap", "roof")
    print(
        f"{row['routing']}  {row['direction']:17}{row['ranks']} ranks  {row['gbps'] or 'loopback'} Gbit/s  "
        + "  ".join(f"{name} {row[f'{name}_ms']:.0f}" for name in names)
        + f" ms  stock/overlap {row['speedup_over_stock']:.2f}  overlap/roof {row['overlap_over_roof']:.2f}",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = link_parser(__doc__, rounds=9, warmup=2)
    parser.add_argument("--rows", type=int, default=2048, help="tokens of a rank")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ffn", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=4, help="experts of a rank")
    parser.add_argument("--skew", type=float, default=1.0, help="0: balanced; more: fewer experts get more tokens")
    parser.add_argument("--routing", type=Path, help="recorded routings, in place of --experts and --skew")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
