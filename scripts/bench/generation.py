"""Times prefill, decode and an evaluation pass over two emulated hosts, stock and overlapped in turn.

    python scripts/bench/generation.py --gbps 0.4 --engine dynamic --sp --json generation.json

One rank a host, one thread a rank. Every round enables each method anew, so `auto` starts without measurements: `first
decode` is its first pass of one token. Prefill and evaluation are the faster of two passes. A ratio is the median over
rounds of the time of the stock path divided by that of the method in the same round.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from gpt import build_gpt
from harness import run_job, versions

METHODS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "stock again": None,  # how far a ratio of the same code is from one
    "p2p": {"tensor": {"method": "p2p"}},
    "auto": {"tensor": {"method": "auto", "autotune_cache": None}},
    "deterministic": {"tensor": {"method": "p2p"}, "deterministic": True},
    "tp_invariant": {"tensor": {"method": "p2p"}, "deterministic": "tp_invariant"},
}
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
        for name, row in result["methods"].items():
            print(f"{gbps:g} Gbit/s  {name:6}", "  ".join(f"{what} {value:.2f}" for what, value in row.items()))
        print(f"{gbps:g} Gbit/s  same tokens: {result['same_tokens']}")
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
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["stock", "stock again", "auto"])
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
    times: dict[str, dict[str, list[float]]] = {name: {} for name in args.methods}
    tokens, thresholds = {}, {}
    for number in range(args.rounds):
        turn = args.methods[number % len(args.methods) :] + args.methods[: number % len(args.methods)]
        for name in turn:
            overlap = METHODS[name]
            # A decode step has fewer rows than tp_invariant needs.
            config = {**(overlap or {}), "strict": name != "tp_invariant"}
            session = None if overlap is None else enable(OverlapConfig.model_validate(config))
            dist.barrier()
            first = generator.generate(prompts, 2).summary()
            again = generator.generate(prompts, 2).summary()
            generated = generator.generate(prompts, args.tokens)
            tokens[name] = generated.tokens
            summary = generated.summary()
            measured = {
                "prefill": min(again["first_token_ms"], summary["first_token_ms"]),
                "first decode": first["decode_ms"],
                "decode": summary["decode_ms"],
                "eval": evaluate(model, ids),
            }
            for what, ms in measured.items():
                times[name].setdefault(what, []).append(ms)
            if session is not None:
                thresholds[name] = [asdict(line) for line in session.report().autotuning]
                session.disable()
    methods = {}
    for name, by_pass in times.items():
        row = {f"{what} ms": median(each) for what, each in by_pass.items()}
        if name != "stock":
            for what, each in by_pass.items():
                row[f"{what} x"] = median(a / b for a, b in zip(times["stock"][what], each, strict=True))
        methods[name] = row
    if dist.get_rank() == 0:
        same = all(each == tokens["stock"] for each in tokens.values())
        result = {"methods": methods, "same_tokens": same, "autotuning": thresholds}
        Path(args.json).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def evaluate(model: Any, ids: torch.Tensor) -> float:
    """Milliseconds of a pass without gradients over all prompts, as in evaluation; the faster of two."""
    from megatron.core.inference.utils import InferenceMode

    positions = torch.arange(ids.shape[1]).expand_as(ids)
    times = []
    InferenceMode.unset_active()
    with torch.inference_mode():
        for _ in range(2):
            dist.barrier()
            start = time.perf_counter()
            model(ids, positions, None)
            times.append(1e3 * (time.perf_counter() - start))
    InferenceMode.set_active()
    return min(times)


if __name__ == "__main__":
    main()
