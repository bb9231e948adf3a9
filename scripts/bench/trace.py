"""The cost of recording events: the same layers with and without a trace, interleaved, on hosts joined by a link."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from harness import Timings, run_job

from megatron_overlap.comm import destroy_process_groups
from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.ops import all_gather_linear, linear_reduce_scatter
from megatron_overlap.tracing import EventFile, Kind, Trace, exposed_in


def worker(args: argparse.Namespace) -> None:
    """Times steps with and without events."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    size, group = dist.get_world_size(), dist.group.WORLD
    trace = Trace()
    transport = GlooTransport(group)
    x = torch.randn(args.rows // size, args.width).requires_grad_()
    up, down = (torch.randn(args.width, args.width).requires_grad_() for _ in range(2))

    def layers(events: Trace | None) -> None:
        # One transport for both: two transports would add their own difference to the figure.
        transport.trace = events
        y = x
        for _ in range(args.layers):
            y = linear_reduce_scatter(all_gather_linear(y, up, group=transport), down, group=transport) * 1e-3
        y.sum().backward()

    with TemporaryDirectory() as folder:
        file = EventFile(Path(folder) / "events", dist.get_rank())

        def traced() -> None:
            start = time.perf_counter_ns()
            layers(trace)
            stop = time.perf_counter_ns()
            trace.add(Kind.STEP, start, stop)
            exposed_in(file.write(trace), start, stop)

        timings = Timings({"off": lambda: layers(None), "on": traced, "again": lambda: layers(None)}, args.rounds, 2)
    if dist.get_rank() == 0:
        row = {
            "off_ms": timings.ms("off"),
            "on_ms": timings.ms("on"),
            "on_over_off": timings.ratio("on", "off"),
            "off_over_off": timings.ratio("again", "off"),
        }
        Path(args.json).write_text(json.dumps({**row, **{k: v for k, v in vars(args).items() if k != "json"}}))
    transport.close()
    destroy_process_groups()


def main() -> None:
    """Runs the job and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--gbps", type=float, default=2.0)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    sizes = [f"--{name}={getattr(args, name)}" for name in ("rows", "width", "layers", "rounds")]
    result = run_job(__file__, sizes, args.hosts, args.gbps, 300)
    print(json.dumps(result))
    print(
        f"a step takes {result['on_over_off'] - 1:+.2%} with events on ({result['off_ms']:.1f} ms without; "
        f"without against itself {result['off_over_off'] - 1:+.2%})"
    )


if __name__ == "__main__":
    main()
