"""Times prefill, decode and an evaluation pass over two emulated hosts, stock and overlapped in turn.

    python scripts/bench/generation.py --gbps 0.4 --engine dynamic --sp --json generation.json

One rank a host, one thread a rank. Every forward pass of the engine runs three times on the same input and cache: on
the stock path, on the stock path again, and overlapped, in every order equally often. A ratio is the median, over all
passes of a kind, of the time of the stock path divided by the other time of the same pass; a time is that of the
slowest rank.
`stock_again` shows how far the ratio of the same code is from 1. Every round enables each method anew, so `auto` starts
without measurements: the first prefill, decode and evaluation are counted apart. `autotuning` is of the last round.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from gpt import build_gpt
from harness import run_job, versions

if TYPE_CHECKING:
    from megatron_overlap import Session

METHODS: dict[str, dict[str, Any]] = {
    "p2p": {"tensor": {"method": "p2p"}},
    "auto": {"tensor": {"method": "auto", "autotune_cache": None}},
    "deterministic": {"tensor": {"method": "p2p"}, "deterministic": True},
    "tp_invariant": {"tensor": {"method": "p2p"}, "deterministic": "tp_invariant"},
}
STOCK, STOCK_AGAIN, OVERLAPPED = PATHS = ["stock", "stock again", "overlapped"]
VOCABULARY = 1024


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    results = []
    for gbps in args.gbps:
        result = run_job(__file__, sys.argv[1:], 2, gbps, args.timeout)
        results.append({"gbps": gbps, **result})
        for each in result["rows"]:
            ratios = "  ".join(f"{name} {each[name]:.3f}" for name in ("ratio", "stock_again", "same_tokens"))
            what = f"{each['method']:13} {each['pass']:13} {each['passes']:4} passes"
            print(f"{gbps:g} Gbit/s  {what}  stock {each['stock_ms']:8.2f} ms  {ratios}", flush=True)
    if args.json:
        text = json.dumps({"results": results, "versions": versions(), "command": sys.argv}, indent=1)
        Path(args.json).write_text(text + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbps", type=float, nargs="+", default=[0.4])
    parser.add_argument("--engine", choices=["static", "dynamic"], default="dynamic")
    parser.add_argument("--sp", action="store_true", help="sequence parallelism")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8, help="generated from each prompt")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["auto"])
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--json")
    parser.add_argument("--worker", action="store_true")
    return parser.parse_args()


def work(args: argparse.Namespace) -> None:
    """One rank."""
    from megatron_overlap.adapters import cpu

    torch.set_num_threads(1)
    cpu.install()
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_overlap import OverlapConfig, enable

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from generate_gpt import Generator, Numbers, random_prompts

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_cuda_manual_seed(7)
    model = build_gpt(
        ranks=2,
        sp=args.sp,
        dtype=torch.bfloat16,
        vocabulary=VOCABULARY,
        max_tokens=args.prompt + args.tokens,
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=8,
    )
    prompts = random_prompts(args.batch, args.prompt, VOCABULARY)
    ids = torch.tensor([list(map(int, prompt.split())) for prompt in prompts])
    generator = Generator(
        model,
        Numbers(VOCABULARY),
        engine=args.engine,
        max_requests=args.batch,
        max_tokens=args.prompt + args.tokens,
    )
    in_turn = InTurn(model)
    passes: dict[tuple[str, str], list[Pass]] = {}
    thresholds = {}
    for _ in range(args.rounds):
        for name in args.methods:
            # A decode step has fewer rows than tp_invariant needs.
            config = OverlapConfig.model_validate({**METHODS[name], "strict": name != "tp_invariant"})
            with enable(config) as in_turn.session:
                for prefix, tokens in ("first ", 2), ("", 2), ("", args.tokens):
                    generator.generate(prompts, tokens)
                    prefill, *decode = in_turn.taken()
                    passes.setdefault((name, f"{prefix}prefill"), []).append(prefill)
                    passes.setdefault((name, f"{prefix}decode"), []).extend(decode)
                evaluate(model, ids)
                first, *others = in_turn.taken()
                passes.setdefault((name, "first evaluation"), []).append(first)
                passes.setdefault((name, "evaluation"), []).extend(others)
                thresholds[name] = [asdict(line) for line in in_turn.session.report().autotuning]
    if dist.get_rank() == 0:
        rows = [row(*key, each) for key, each in passes.items()]
        Path(args.json).write_text(json.dumps({"rows": rows, "autotuning": thresholds}))
    dist.barrier()
    dist.destroy_process_group()


@dataclass
class Pass:
    """One forward pass on every path.

    Attributes:
        ms: time of the slowest rank by path.
        same_tokens: fraction of positions at which stock and the method have the same greedy token.
    """

    ms: dict[str, float]
    same_tokens: float


class InTurn:
    """Replaces the forward pass of `model` by one on each of `PATHS` in turn; returns the output of the stock path.

    Attributes:
        session: the overlapped path.
    """

    def __init__(self, model: Any) -> None:
        self._forward, model.forward = model.forward, self
        self._passes: list[Pass] = []
        self._orders: list[tuple[str, ...]] = []
        self._random = random.Random(0)  # the same order on every rank
        self.session: Session

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Runs the pass on all paths."""
        ms, outputs = {}, {}
        for path in self._next_order():
            with nullcontext() if path == OVERLAPPED else self.session.suspended():
                dist.barrier()
                start = time.perf_counter()
                outputs[path] = self._forward(*args, **keywords)
                ms[path] = 1e3 * (time.perf_counter() - start)
        same = (outputs[STOCK].argmax(dim=-1) == outputs[OVERLAPPED].argmax(dim=-1)).float().mean()
        self._passes.append(Pass(ms, same.item()))
        return outputs[STOCK]

    def _next_order(self) -> tuple[str, ...]:
        """Every order comes equally often, so that no path gains from its position."""
        if not self._orders:
            self._orders = list(permutations(PATHS))
            self._random.shuffle(self._orders)
        return self._orders.pop()

    def taken(self) -> list[Pass]:
        """The passes since the last call, with the times of the slowest rank; collective."""
        passes, self._passes = self._passes, []
        times = torch.tensor([[each.ms[path] for path in PATHS] for each in passes])
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        for each, slowest in zip(passes, times.tolist(), strict=True):
            each.ms = dict(zip(PATHS, slowest, strict=True))
        return passes


def row(method: str, kind: str, passes: Sequence[Pass]) -> dict[str, Any]:
    """Medians over passes of one kind."""
    return {
        "method": method,
        "pass": kind,
        "passes": len(passes),
        "stock_ms": median(each.ms[STOCK] for each in passes),
        "ratio": median(each.ms[STOCK] / each.ms[OVERLAPPED] for each in passes),
        "stock_again": median(each.ms[STOCK] / each.ms[STOCK_AGAIN] for each in passes),
        "same_tokens": min(each.same_tokens for each in passes),
    }


def evaluate(model: Any, ids: torch.Tensor) -> None:
    """Three passes without gradients over all prompts, as in evaluation."""
    from megatron.core.inference.utils import InferenceMode

    positions = torch.arange(ids.shape[1]).expand_as(ids)
    InferenceMode.unset_active()
    with torch.inference_mode():
        for _ in range(3):
            model(ids, positions, None)
    InferenceMode.set_active()


if __name__ == "__main__":
    main()
