"""Times a data parallel step, in variants with and without overlap, over links with a limited rate.

    python scripts/bench/data_parallel.py --hosts 2 --gbps 1.0 --layers 12 --hidden 768 --tokens 512 --dtype bf16 \\
        --json data_parallel.json

One rank a host, one thread a rank. Every figure is the median over rounds in which all variants run in turn. `sliced`
is what Megatron does with --overlap-grad-reduce and --overlap-param-gather.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Run, Timings, link_parser, rates_for, run_job, run_rates

from megatron_overlap.comm import Transport, destroy_process_groups, transport_of
from megatron_overlap.ops import Gathering, GradientReduce

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


_LEARNING_RATE = 1e-3


class DataCase:
    """A stack of square linear layers with one bucket each: backward, sharded Adam, next forward, in all variants.

    Gradients are summed in fp32, parameters are sent in `dtype`, the optimizer's copy of a shard is fp32, as in the
    distributed optimizer of Megatron.

    Args:
        layers: number of layers and of buckets.
        hidden: rows and columns of each weight; divisible by the number of ranks.
        tokens: rows of the activations on each rank.
    """

    def __init__(self, layers: int, hidden: int, tokens: int, dtype: torch.dtype, transport: Transport) -> None:
        self.transport = transport
        self.size, self.rank = transport.size, transport.rank
        self.dtype, self.shape = dtype, (hidden, hidden)
        generator = torch.Generator().manual_seed(5)
        scale = hidden**-0.5
        self.start = [torch.randn(hidden * hidden, generator=generator) * scale for _ in range(layers)]
        generator.manual_seed(6 + self.rank)
        self.x = [torch.randn(tokens, hidden, generator=generator).to(dtype) for _ in range(layers)]
        self.dy = torch.randn(tokens, hidden, generator=generator).to(dtype)
        shard = hidden * hidden // self.size
        self.own = slice(self.rank * shard, (self.rank + 1) * shard)
        self.grads = [torch.zeros(hidden * hidden) for _ in range(layers)]
        self.weights = [torch.empty(hidden * hidden, dtype=dtype) for _ in range(layers)]
        self.masters = [torch.empty(shard) for _ in range(layers)]
        # Sent by the variants whose communication is independent of their computation.
        self.idle_grads = [torch.zeros(hidden * hidden) for _ in range(layers)]
        self.idle_weights = [torch.zeros(hidden * hidden, dtype=dtype) for _ in range(layers)]
        self.reduce = GradientReduce(transport)
        self.reset()

    def reset(self) -> None:
        """Restore the initial parameters and optimizers."""
        for start, weight, master in zip(self.start, self.weights, self.masters, strict=True):
            weight.copy_(start)
            master.copy_(weight[self.own])
        self.adams = [torch.optim.AdamW([master], lr=_LEARNING_RATE) for master in self.masters]

    def variants(self) -> dict[str, Run]:
        """Name to callable: one step each."""
        layers = range(len(self.weights))

        def compute() -> None:
            self._backward(lambda layer: None)
            for layer in layers:
                self._step(layer)
            self._forward(lambda layer: None)

        def collectives(grads: list[torch.Tensor], weights: list[torch.Tensor]) -> list[Any]:
            works = [self._scatter(grads[layer], async_op=True) for layer in layers]
            return works + [self._gather(weights[layer], async_op=True) for layer in layers]

        def messages(grads: list[torch.Tensor], weights: list[torch.Tensor]) -> list[Any]:
            p2p_works: list[Any] = [self.reduce.begin(grads[layer]) for layer in layers]
            return p2p_works + [Gathering(self.transport, weights[layer]) for layer in layers]

        def serial() -> None:
            self._backward(lambda layer: None)
            for layer in layers:
                self._scatter(self.grads[layer], async_op=False)
            for layer in layers:
                self._step(layer)
            for layer in layers:
                self._gather(self.weights[layer], async_op=False)
            self._forward(lambda layer: None)

        def serial_p2p() -> None:
            self._backward(lambda layer: None)
            _wait([self.reduce.begin(self.grads[layer]) for layer in layers])
            for layer in layers:
                self._step(layer)
            _wait([Gathering(self.transport, self.weights[layer]) for layer in layers])
            self._forward(lambda layer: None)

        def roof(begin: Callable[[list[torch.Tensor], list[torch.Tensor]], list[Any]]) -> None:
            begun = begin(self.idle_grads, self.idle_weights)
            compute()
            _wait(begun)

        return {
            "compute": compute,
            "comm_collective": lambda: _wait(collectives(self.idle_grads, self.idle_weights)),
            "comm_p2p": lambda: _wait(messages(self.idle_grads, self.idle_weights)),
            "serial": serial,
            "serial_p2p": serial_p2p,
            "sliced": self._sliced,
            "overlap": self.overlap,
            "roof_collective": lambda: roof(collectives),
            "roof_p2p": lambda: roof(messages),
        }

    def overlap(self) -> None:
        """The plugin: the gradients of a bucket are sent when complete, its parameters after their optimizer step."""
        begun: list[Any] = [None] * len(self.weights)

        def send(layer: int) -> None:
            begun[layer] = self.reduce.begin(self.grads[layer])

        self._backward(send)
        _wait(begun[::-1])
        for layer in range(len(self.weights)):
            self._step(layer)
            begun[layer] = Gathering(self.transport, self.weights[layer])
        self._forward(lambda layer: begun[layer].wait())

    def _sliced(self) -> None:
        """The overlap of Megatron: one collective for each bucket; each gather begins after the previous one."""
        works: list[Any] = [None] * len(self.weights)

        def send(layer: int) -> None:
            works[layer] = self._scatter(self.grads[layer], async_op=True)

        self._backward(send)
        _wait(works[::-1])
        for layer in range(len(self.weights)):
            self._step(layer)
        works[0] = self._gather(self.weights[0], async_op=True)

        def receive(layer: int) -> None:
            works[layer].wait()
            if layer + 1 < len(works):
                works[layer + 1] = self._gather(self.weights[layer + 1], async_op=True)

        self._forward(receive)

    def exact(self, steps: int) -> list[torch.Tensor]:
        """The parameters after some steps of the plain program: all gradients summed, everything stepped everywhere."""
        weights = [start.to(self.dtype) for start in self.start]
        masters = [weight.float() for weight in weights]
        adams = [torch.optim.AdamW([master], lr=_LEARNING_RATE) for master in masters]
        for _ in range(steps):
            for layer, weight in enumerate(weights):
                grad = torch.mm(self.dy.t(), self.x[layer]).float().flatten()
                dist.all_reduce(grad)
                masters[layer].grad = grad
                adams[layer].step()
                weight.copy_(masters[layer])
        return weights

    def _backward(self, ready: Callable[[int], None]) -> None:
        for layer in reversed(range(len(self.weights))):
            torch.mm(self.dy, self.weights[layer].view(self.shape))
            grad = torch.mm(self.dy.t(), self.x[layer])
            self.grads[layer].view(self.shape).copy_(grad)
            ready(layer)

    def _step(self, layer: int) -> None:
        self.masters[layer].grad = self.grads[layer][self.own]
        self.adams[layer].step()
        self.weights[layer][self.own].copy_(self.masters[layer])

    def _forward(self, arrived: Callable[[int], None]) -> None:
        for layer, weight in enumerate(self.weights):
            arrived(layer)
            torch.mm(self.x[layer], weight.view(self.shape).t())

    def _scatter(self, grad: torch.Tensor, *, async_op: bool) -> Any:
        return dist.reduce_scatter_tensor(grad[self.own], grad, async_op=async_op)

    def _gather(self, weight: torch.Tensor, *, async_op: bool) -> Any:
        return dist.all_gather_into_tensor(weight, weight[self.own], async_op=async_op)


def _wait(begun: list[Any]) -> None:
    for work in begun:
        work.wait()


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    run_rates(__file__, args, rates(args), print_row)


def moved_bytes(args: argparse.Namespace) -> float:
    """Bytes that a rank sends in one step: fp32 gradients, and parameters."""
    elements = args.layers * args.hidden**2 * (args.hosts - 1) / args.hosts
    return elements * (4 + DTYPES[args.dtype].itemsize)


def rates(args: argparse.Namespace) -> list[float | None]:
    """Those asked for; for `--ratios` from the computation, measured over loopback."""
    if args.loopback or not args.ratios:
        return [None] if args.loopback else args.gbps
    compute_ms = run_job(__file__, [*sys.argv[1:], "--probe"], args.hosts, None, args.timeout)["compute_ms"]
    return rates_for(moved_bytes(args), compute_ms, args.ratios)


def work(args: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = transport_of(dist.group.WORLD)
    case = DataCase(args.layers, args.hidden, args.tokens, DTYPES[args.dtype], transport)
    if args.probe:
        variants = {"compute": case.variants()["compute"]}
        result: dict[str, Any] = {"compute_ms": Timings(variants, args.rounds, 2).ms("compute")}
    else:
        gate(case)
        result = {"rows": [measure(case, args)]}
    if transport.rank == 0:
        Path(args.json).write_text(json.dumps(result))
    destroy_process_groups()


def gate(case: DataCase) -> None:
    """Check the result before anything is timed."""
    steps = 3
    for _ in range(steps):
        case.overlap()
    for layer, (got, expected) in enumerate(zip(case.weights, case.exact(steps), strict=True)):
        # More than two terms are summed in another order; a step moves a parameter by at most the learning rate.
        exact = case.size == 2
        close = torch.equal(got, expected) if exact else torch.allclose(got, expected, rtol=1e-2, atol=1e-4)
        if not close:
            off = (got.float() - expected.float()).abs().max()
            raise SystemExit(f"layer {layer}: parameters are off by {off:.2e} of the plain program: nothing is timed")
    case.reset()


def measure(case: DataCase, args: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    variants = case.variants()
    exposed: list[float] = []

    def watched() -> None:
        before = case.transport.exposed_s
        case.overlap()
        exposed.append((case.transport.exposed_s - before) * 1e3)

    timings = Timings({**variants, "overlap": watched}, args.rounds, args.warmup)
    mine = torch.tensor(sorted(exposed[args.warmup :])[args.rounds // 2], dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    comm = min(timings.ms("comm_collective"), timings.ms("comm_p2p"))
    roof = min(("roof_collective", "roof_p2p"), key=timings.ms)
    return {
        "ranks": case.size,
        "layers": args.layers,
        "hidden": args.hidden,
        "tokens": args.tokens,
        "dtype": args.dtype,
        "sent_bytes": moved_bytes(args),
        "compute_ms": timings.ms("compute"),
        "comm_ms": comm,
        **{f"{name}_ms": timings.ms(name) for name in variants if name not in ("compute", roof)},
        "limit_ms": max(timings.ms("compute"), comm),
        "roof_ms": timings.ms(roof),
        "roof_kind": roof.removeprefix("roof_"),
        "overlap_over_roof": timings.ratio("overlap", roof),
        "speedup_over_sliced": timings.ratio("sliced", "overlap"),
        "speedup_over_serial": timings.ratio("serial", "overlap"),
        "exposed_ms": mine.item(),
        "exposed_over_comm": mine.item() / comm,
        "rounds": args.rounds,
    }


def print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['ranks']} ranks  {row['gbps'] or 'loopback'} Gbit/s  compute {row['compute_ms']:.1f}  "
        f"comm {row['comm_ms']:.1f} (collectives {row['comm_collective_ms']:.1f}, p2p {row['comm_p2p_ms']:.1f})  "
        f"serial {row['serial_ms']:.1f}  p2p serial {row['serial_p2p_ms']:.1f}  sliced {row['sliced_ms']:.1f}  "
        f"overlap {row['overlap_ms']:.1f}  roof {row['roof_ms']:.1f} ({row['roof_kind']})  "
        f"limit {row['limit_ms']:.1f} ms  overlap/roof {row['overlap_over_roof']:.3f}  "
        f"sliced/overlap {row['speedup_over_sliced']:.3f}  exposed {100 * row['exposed_over_comm']:.1f} %",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = link_parser(__doc__, "communication : computation")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=512, help="rows of the activations on each rank")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of parameters; gradients are summed in fp32")
    return parser.parse_args()


if __name__ == "__main__":
    main()
