"""Models a layer on documents of published lengths on clusters of GPUs, in the order of Zeppelin's ablation.

    python scripts/simulate_varlen.py [--ranks 16 32 64 128] [--json FILE]
    python scripts/simulate_varlen.py --assume                 # what the paper may have run otherwise, one by one

Everything printed is modelled (`varlen_model.py`): a layer, forward and backward, and its part of logits, gradient
reduction (exposed, one micro-batch a step) and optimizer. The plans are the real planners'. Speeds are over a ring of
all ranks that cuts every document (TransformerEngine's p2p), in the same model. Clusters are `configs/clusters`, one
profile a machine.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from bench.document_lengths import sample
from varlen_model import layer_of, times_us

PROFILES = ("a800", "h800", "h200")
DISTRIBUTIONS = ("arxiv", "github", "prolong64k")
STEPS = ("routing", "partition", "partition+engine", "partition+engine+routing", "+remap")
OTHERS = ("all-gather", "hybrid")
# Of the paper, on ArXiv; partition and engine are one step there.
PUBLISHED = {"routing": 1.6, "partition+engine": 3.2, "partition+engine+routing": 3.51, "+remap": 3.64}
PUBLISHED_AVERAGE = 2.80


@dataclass(frozen=True)
class Setting:
    """What is assumed of the runs.

    Attributes:
        ranks: of the job.
        tokens: of a rank.
        group: most ranks that share documents; others are data parallel copies. None is all.
        longest: documents are cut to parts of so many tokens. None leaves them.
    """

    ranks: int
    tokens: int = 4096
    group: int | None = None
    longest: int | None = None

    def batches(self, name: str, seed: int) -> list[list[int]]:
        """Documents of every group of a step."""
        size = min(self.group or self.ranks, self.ranks)
        copies = self.ranks // size
        batches = [sample(name, size * self.tokens, seed * copies + copy) for copy in range(copies)]
        if self.longest is None:
            return batches
        return [[part for length in batch for part in _cut(length, self.longest)] for batch in batches]


def _cut(length: int, longest: int) -> list[int]:
    return [min(longest, length - start) for start in range(0, length, longest)]


def speeds(profile: str, name: str, setting: Setting, preset: str, seeds: int, *, whole_step: bool) -> dict[str, float]:
    """Every way's speed over the ring, geometric mean over batches. Data parallel copies wait for the slowest."""
    layer = layer_of(profile, preset, min(setting.group or setting.ranks, setting.ranks))
    rest = layer_of(profile, preset, setting.ranks).rest_us(setting.tokens) if whole_step else 0.0
    found = []
    for seed in range(seeds):
        copies = [times_us(layer, batch, setting.tokens) for batch in setting.batches(name, seed)]
        us = {way: max(copy[way] for copy in copies) + rest for way in copies[0]}
        found.append({way: us["ring"] / us[way] for way in (*OTHERS, *STEPS)})
    return {way: geometric_mean(each[way] for each in found) for way in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 32, 64, 128])
    parser.add_argument("--profiles", nargs="+", default=list(PROFILES))
    parser.add_argument("--distributions", nargs="+", default=list(DISTRIBUTIONS))
    parser.add_argument("--preset", default="llama2_7b", help="a model of the presets")
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank")
    parser.add_argument("--layer", action="store_true", help="a layer alone: no logits, gradients, optimizer")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the rows there")
    parser.add_argument("--assume", action="store_true", help="the ablation under other assumptions than these")
    options = parser.parse_args()
    if options.assume:
        assume(options)
        return
    rows = []
    print(f"| profile | documents | ranks | {' | '.join((*OTHERS, *STEPS))} |")
    print("|---" * (3 + len(OTHERS) + len(STEPS)) + "|")
    for profile in options.profiles:
        for name in options.distributions:
            for ranks in options.ranks:
                setting = Setting(ranks, options.tokens)
                means = speeds(profile, name, setting, options.preset, options.seeds, whole_step=not options.layer)
                rows.append({"profile": profile, "documents": name, "ranks": ranks, **means})
                figures = " | ".join(f"{means[way]:.2f}" for way in (*OTHERS, *STEPS))
                print(f"| {profile} | {name} | {ranks} | {figures} |", flush=True)
    report(rows)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


ASSUMED: dict[str, dict[str, int]] = {
    "as above": {},
    "16 ranks share documents, the rest are data parallel": {"group": 16},
    "documents of 16,384 tokens at most": {"longest": 16384},
    "16 ranks share, 32,768 at most": {"group": 16, "longest": 32768},
    "16 ranks share, 16,384 at most": {"group": 16, "longest": 16384},
    "16 ranks share, 8,192 at most": {"group": 16, "longest": 8192},
    "16 ranks share 8,192 tokens each, 32,768 at most": {"group": 16, "longest": 32768, "tokens": 8192},
    "16 ranks share 16,384 tokens each, 65,536 at most": {"group": 16, "longest": 65536, "tokens": 16384},
}


def assume(options: argparse.Namespace) -> None:
    """The ablation on ArXiv under each assumption, over all profiles and ranks; the last column is of all documents."""
    print(f"| assumed | {' | '.join(PUBLISHED)} | all documents, everything |")
    print("|---" * (len(PUBLISHED) + 2) + "|")
    published = " | ".join(f"{value:.2f}" for value in PUBLISHED.values())
    print(f"| published | {published} | {PUBLISHED_AVERAGE:.2f} |")
    rows = []
    for text, given in ASSUMED.items():
        found: dict[str, list[dict[str, float]]] = defaultdict(list)
        for profile in options.profiles:
            for ranks in options.ranks:
                setting = Setting(ranks, **{"tokens": options.tokens, **given})
                for name in options.distributions:
                    means = speeds(profile, name, setting, options.preset, options.seeds, whole_step=not options.layer)
                    found[name].append(means)
                    rows.append({"assumed": text, "profile": profile, "documents": name, "ranks": ranks, **means})
        arxiv = [geometric_mean(each[step] for each in found["arxiv"]) for step in PUBLISHED if found["arxiv"]]
        average = geometric_mean(each["+remap"] for of_name in found.values() for each in of_name)
        print(f"| {text} | {' | '.join(f'{value:.2f}' for value in arxiv)} | {average:.2f} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def report(rows: Sequence[dict[str, float]]) -> None:
    """The paper's ablation and average beside the model's."""
    print("\n| ArXiv, all profiles and ranks | published | modelled, mean | least | most |\n|---|---|---|---|---|")
    arxiv = [row for row in rows if row["documents"] == "arxiv"]
    for step, published in PUBLISHED.items():
        values = [row[step] for row in arxiv]
        if values:
            print(f"| {step} | {published} | {geometric_mean(values):.2f} | {min(values):.2f} | {max(values):.2f} |")
    values = [row["+remap"] for row in rows]
    print(f"| average of everything | {PUBLISHED_AVERAGE} | {geometric_mean(values):.2f} | ", end="")
    print(f"{min(values):.2f} | {max(values):.2f} |")


if __name__ == "__main__":
    main()
