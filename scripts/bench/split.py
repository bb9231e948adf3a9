"""Times forward and backward of a LLaMA under sequence parallelism: layer by layer, and in parts of batch or sequence.

    python scripts/bench/split.py --hosts 2 --gbps 0.65 --batch 2 --te --json split.json

One rank a host, one thread a rank. Every figure is the median over rounds; each round runs all variants.

`stock` is Megatron. `layers` overlaps each linear layer alone. `batch` and `sequence` split the micro-batch or each
sequence; `messages` sends the messages of the split without overlap. `auto` has measured before. `roof` computes and
sends the same as the split and waits for no message before the end, as if nothing depended on them; its results are
wrong. `communication` is the share of the stock time in which the rank waits for a collective. `best_over_auto` is the
time of `stock`, `layers` or the split, whichever has the smallest median, divided by that of `auto`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from gpt import build_gpt
from harness import link_parser, run_rates

from megatron_overlap.comm import PART_CHANNELS, destroy_process_groups
from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.comm.transport import OrderedTransport, P2PWork, Transfer, Transport

if TYPE_CHECKING:
    from megatron_overlap import Session

VOCABULARY = 4096


class UnorderedTransport(OrderedTransport):
    """A transport that reports every message as completed at once. `finish` waits for all of them."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._begun: list[P2PWork] = []

    def begin(self, transfers: Sequence[Transfer], op: str) -> P2PWork:
        self._begun.append(self._inner.begin(transfers, op))
        return _UnorderedWork(self._begun[-1])

    def finish(self) -> None:
        for work in self._begun:
            work.wait_all()
        self._begun.clear()


class _UnorderedWork:
    def __init__(self, inner: P2PWork) -> None:
        self.mark_ready = inner.mark_ready

    def is_completed(self, message: int) -> bool:
        return True

    def wait(self, *messages: int) -> None:
        pass

    def wait_all(self) -> None:
        pass


class Step:
    """Forward and backward of one micro-batch."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._model = build_gpt(
            ranks=args.hosts,
            sp=True,
            dtype=torch.bfloat16,
            vocabulary=VOCABULARY,
            max_tokens=args.sequence,
            te=args.te,
            llama=True,
            num_layers=args.layers,
            hidden_size=args.hidden,
            ffn_hidden_size=args.ffn,
            num_attention_heads=args.heads,
        ).train()
        generator = torch.Generator().manual_seed(5)
        shape = args.batch, args.sequence
        self._tokens, self._labels = (torch.randint(VOCABULARY, shape, generator=generator) for _ in range(2))
        self._positions = torch.arange(args.sequence).expand(shape)
        self.group = self._model.decoder.layers[0].self_attention.linear_proj.tp_group

    def __call__(self) -> float:
        """The loss. Gradients stay in the parameters."""
        for parameter in self._model.parameters():
            parameter.grad = None
        loss = self._model(self._tokens, self._positions, None, labels=self._labels).float().mean()
        loss.backward()
        return float(loss.detach())

    def grad_norm(self) -> float:
        """Of the gradients of this rank."""
        return float(torch.stack([p.grad.float().norm() for p in self._model.parameters()]).norm())


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    run_rates(__file__, args, [None] if args.loopback else args.gbps, print_row)


def work(args: argparse.Namespace) -> None:
    """One rank."""
    from megatron_overlap.adapters import cpu

    torch.set_num_threads(1)
    cpu.install(te_layers=args.te)
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.hosts)
    model_parallel_cuda_manual_seed(3)
    step = Step(args)
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)  # the ranks must have the same settings
        row = measure(step, args, shared[0])
        dist.barrier()
    if dist.get_rank() == 0:
        Path(args.json).write_text(json.dumps({"rows": [row]}))
    destroy_process_groups()


def measure(step: Step, args: argparse.Namespace, cache: str) -> dict[str, Any]:
    """All figures of one rate."""
    split = "batch" if args.batch % 2 == 0 else "sequence"
    variants: dict[str, dict[str, Any]] = {
        "stock": {"method": "none"},
        "layers": {"method": "p2p", "split": "none"},
        "messages": {"method": "p2p", "split": split, "schedule": "serial"},
        split: {"method": "p2p", "split": split},
        "roof": {"method": "p2p", "split": split},
    }
    variants = {name: each for name, each in variants.items() if name not in args.without}
    auto = {"method": "auto", "autotune_cache": cache}
    selected: list[str] = []
    if args.auto_steps:
        with overlapped(step.group, auto) as (session, _):
            for _ in range(args.auto_steps):
                step()
            selected = [
                f"{line.module}, {line.passes}: {line.method} ({line.reason})" for line in session.report().autotuning
            ]
        variants["auto"] = auto
    names = list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}
    shares: list[float] = []
    results: dict[str, tuple[float, float]] = {}
    for number in range(-args.warmup, args.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with overlapped(step.group, variants[name], unordered=name == "roof") as (_, finish), waits() as waited:
                for _ in range(2 if name == "auto" else 1):
                    step()  # with `auto` the second step opens the transports of batch overlap
                finish()
                dist.barrier()
                waited.clear()
                start = time.perf_counter()
                loss = step()
                finish()
                took = time.perf_counter() - start
            slowest = torch.tensor(took, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if number >= 0:
                times[name].append(slowest.item())
                results[name] = loss, step.grad_norm()
                if name == "stock":
                    shares.append(sum(waited) / took)

    def ratio(name: str, other: str) -> float:
        return median(a / b for a, b in zip(times[name], times[other], strict=True))

    ratios = {f"speedup_of_{name}": ratio("stock", name) for name in names if name != "stock"}
    if "messages" in names:
        ratios["messages_over_split"] = ratio("messages", split)
    if "roof" in names:
        ratios["split_over_roof"] = ratio(split, "roof")
    if "auto" in names:
        ratios["best_over_auto"] = ratio(min("stock", "layers", split, key=lambda name: median(times[name])), "auto")
    return {
        "layers": "TransformerEngine" if args.te else "local",
        **{name: getattr(args, name) for name in ("sequence", "batch", "hidden", "ffn", "hosts", "rounds")},
        "num_layers": args.layers,
        "split": split,
        "communication": median(shares),
        **{f"{name}_ms": 1e3 * median(each) for name, each in times.items()},
        **ratios,
        "loss_and_grad_norm": {name: each for name, each in results.items() if name != "roof"},
        "auto_selected": selected,
        "times_ms": {name: [round(1e3 * t, 1) for t in each] for name, each in times.items()},
    }


@contextmanager
def overlapped(
    group: dist.ProcessGroup, tensor: dict[str, Any], *, unordered: bool = False
) -> Iterator[tuple[Session, Callable[[], None]]]:
    """The plugin with the settings of `overlap.tensor`. Yields the session, and what waits for all messages."""
    from megatron_overlap import OverlapConfig, enable

    channels = ("", *PART_CHANNELS) if unordered else ()
    with enable(OverlapConfig.model_validate({"tensor": tensor})) as session:
        opened = [UnorderedTransport(GlooTransport(group)) for _ in channels]
        for channel, transport in zip(channels, opened, strict=True):
            session.transports.insert(group, transport, channel)

        def finish() -> None:
            for transport in opened:
                transport.finish()

        yield session, finish


@contextmanager
def waits() -> Iterator[list[float]]:
    """Collects the seconds of each wait for a collective."""
    found: list[float] = []
    original = dist.Work.wait

    def wait(self: Any, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(self, *args)
        finally:
            found.append(time.perf_counter() - start)

    dist.Work.wait = wait
    try:
        yield found
    finally:
        dist.Work.wait = original


def print_row(row: dict[str, Any]) -> None:
    speedups = "  ".join(f"{name[11:]} {row[name]:.2f}" for name in row if name.startswith("speedup_of_"))
    others = "  ".join(f"{name} {value:.2f}" for name, value in row.items() if "_over_" in name)
    print(
        f"{row['gbps'] or 'loopback'} Gbit/s  {row['layers']}  stock {row['stock_ms']:.0f} ms, of it communication "
        f"{row['communication']:.0%}  speedups: {speedups}  {others}",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = link_parser(__doc__, rounds=5, warmup=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ffn", type=int, default=2816)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2, help="sequences; one is split itself")
    parser.add_argument("--te", action="store_true", help="TransformerEngine layers")
    parser.add_argument("--auto-steps", type=int, default=0, help="of `auto` before it is timed; 240 for four layers")
    parser.add_argument("--without", nargs="+", choices=["messages", "roof"], default=[], help="variants not to run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
