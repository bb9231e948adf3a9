"""Prints the modelled MFU of every GPU config on H100, in stock order and as configured.

    python scripts/expected_mfu.py            # prints the MFU of every config
    python scripts/expected_mfu.py --write    # also writes the line `# Expected, modelled: ...` into the configs

The range is that of two profiles of H100 nodes, `grand_teton` (500 W) and `h100_dgx`. Modelled, not measured.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_overlap.autotune.cost_model import CostModel
from megatron_overlap.config import LaunchConfig, load_launch_config
from megatron_overlap.config.cluster import load_cluster_profile
from megatron_overlap.config.resources import resource_folder
from megatron_overlap.tools.simulate.command import figures
from megatron_overlap.tools.simulate.job import job_of
from megatron_overlap.tools.simulate.linear import LinearOverlap
from megatron_overlap.tools.simulate.step import simulate_step

PROFILES = ("grand_teton", "h100_dgx")
LINE = re.compile(r"^# Expected, modelled: .*\n(?:#   .*\n)*", flags=re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the line into the configs")
    write = parser.parse_args(argv).write
    for file in sorted(resource_folder("configs").glob("gpu/*/overlap.yaml")):
        cfg = load_launch_config(file)
        text = sentence(cfg)
        print(f"{file.parent.name}: {text}")
        if write:
            put(file, text)
    return 0


def sentence(cfg: LaunchConfig) -> str:
    """What is expected, or why nothing is."""
    try:
        stock, ours = expected(cfg)
    except ValueError as error:
        return f"nothing: {error}"
    span = " to ".join(f"{100 * value:.0f} %" for value in ours)
    return f"MFU {span} on H100; in stock order {' to '.join(f'{100 * value:.0f} %' for value in stock)}"


def expected(cfg: LaunchConfig) -> tuple[tuple[float, float], tuple[float, float]]:
    """Lowest and highest MFU over the profiles: by the stock path, and as configured.

    Raises:
        ValueError: the model's FLOPs, or its layout's costs, are not known to the simulator.
    """
    if cfg.overlap.varlen.method != "none":
        raise ValueError("the simulator knows sequences of one length only")
    stock, ours = [], []
    for name in PROFILES:
        job = job_of(cfg)
        model = CostModel(load_cluster_profile(name), job.precision)
        ours.append(figures(job, model, simulate_step(job, model))["mfu"])
        experts = None if job.experts is None else replace(job.experts, overlap="none")
        other = replace(job, tensor_overlap=LinearOverlap("stock"), split="none", experts=experts)
        stock.append(figures(other, model, simulate_step(other, model))["mfu"])
    return (min(stock), max(stock)), (min(ours), max(ours))


def put(file: Path, text: str) -> None:
    """Writes the line before the first key of a config, over the one that is there."""
    content = LINE.sub("", file.read_text(encoding="utf-8"))
    first = re.search(r"^(?!#)", content, flags=re.MULTILINE)
    assert first is not None
    line = f"# Expected, modelled: {text}.\n"
    file.write_text(content[: first.start()] + line + content[first.start() :], encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
