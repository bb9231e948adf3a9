"""Balance of the partition and of the baselines on the published distributions, and the time to compute it.

python scripts/bench/partition.py --seeds 5

Balances are computed by the cost model; no attention runs. Times are processor time of one core.
"""

from __future__ import annotations

import argparse
import statistics
import time

from document_lengths import DISTRIBUTIONS, sample
from placements import METHODS

from megatron_overlap.schedules.varlen import Plan, Topology, balance, partition

HYBRID_TOKENS = 8192  # the longest share of a document that a rank takes under hybrid context parallelism


def table(methods: list[str], seeds: int, tokens: int, topology: Topology, capacity: int) -> None:
    """One line per distribution and method: the worst seed of each balance, the median of the others."""
    print("| distribution | method | attention | with linear | tokens | modelled us over bound | passes of a rank |")
    print("|---|---|---|---|---|---|---|")
    for name in DISTRIBUTIONS:
        batches = [sample(name, tokens, seed) for seed in range(seeds)]
        for method in methods:
            room = HYBRID_TOKENS if method == "hybrid" else capacity
            try:
                plans = [METHODS[method](batch, topology, capacity=room, cost=None) for batch in batches]
            except ValueError as error:
                print(f"| {name} | {method} | {error} |")
                continue
            print(f"| {name} | {method} | {_line(plans)} |")


def _line(plans: list[Plan]) -> str:
    results = list(map(balance, plans))
    worst = [min(getattr(result, field) for result in results) for field in ("attention", "compute", "tokens")]
    over = statistics.median(result.step_us / result.lower_bound_us for result in results)
    passes = [most_passes(plan) for plan in plans]
    return " | ".join([*(f"{value:.3f}" for value in worst), f"{over:.2f}", f"{min(passes)}-{max(passes)}"])


def most_passes(plan: Plan) -> int:
    """Largest number of passes in which a rank has tokens."""
    counts = [plan.tokens(index) for index in range(len(plan.passes))]
    return max(sum(map(bool, of_rank)) for of_rank in zip(*counts, strict=True))


def speed(documents: int, topology: Topology, repeats: int) -> None:
    """Processor time of one plan of a large batch."""
    lengths = sample("prolong", documents * 3200, 0)[:documents]
    capacity = -(-sum(lengths) // topology.ranks) * 17 // 16
    times = []
    for _ in range(repeats):
        start = time.process_time()
        plan = partition(lengths, topology, capacity=capacity)
        times.append(time.process_time() - start)
    result = balance(plan)
    print(
        f"{len(lengths)} documents, {topology.ranks} ranks: best {min(times):.2f} s, median "
        f"{statistics.median(times):.2f} s of {repeats}; attention {result.attention:.3f}, with linear "
        f"{result.compute:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4 << 20)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=72 << 10)
    parser.add_argument("--methods", nargs="+", default=["hybrid", "balanced"], choices=sorted(METHODS))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    topology = Topology(arguments.nodes, 8, 8)
    table(arguments.methods, arguments.seeds, arguments.tokens, topology, arguments.capacity)
    speed(100_000, Topology(128, 8, 8), arguments.repeats)


if __name__ == "__main__":
    main()
