"""Runs `pretrain_gpt.py` of unmodified Megatron-LM checkouts with and without the overlap, TP2 with SP, on CPU ranks.

    python scripts/check_checkouts.py ~/Megatron-LM-core_v0.16.1 ~/Megatron-LM-core_v0.19.0
    MEGATRON_LM_PATH=~/a:~/b python scripts/check_checkouts.py

Each runs twice, 5 steps in fp32 on two CPU ranks: with every method of `--overlap-config` `none`, and overlapped.
Loss and grad-norm of every step must be within 1e-5. Prints a table; exit code 1 where one differs or fails.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_overlap.config import load_launch_config
from megatron_overlap.config.resources import resource_folder
from megatron_overlap.tools.launch.processes import RunError
from megatron_overlap.tools.launch.rehearsal import Rehearsal, rehearse
from megatron_overlap.tools.launch.run_records import RunRecordError, deviation

OVERRIDES = (
    "train.iterations=5",
    "train.precision=fp32",
    "data.kind=mock",
    "data.path=null",
    "train.lr_warmup_iterations=0",
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = [Path(text) for text in os.environ.get("MEGATRON_LM_PATH", "").split(os.pathsep) if text]
    parser.add_argument("checkouts", nargs="*", type=Path, default=named, help="folders that hold pretrain_gpt.py")
    checkouts = parser.parse_args(argv).checkouts
    if not checkouts:
        parser.error("name a Megatron-LM checkout, or set MEGATRON_LM_PATH")
    print("| Megatron-LM | loss, step 5: off | on | loss apart | grad-norm apart | calls overlapped | s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    return max(check(checkout) for checkout in checkouts)


def check(checkout: Path) -> int:
    """Runs one checkout and prints its row; 1 where it failed or differs."""
    script = checkout / "pretrain_gpt.py"
    config = resource_folder("configs") / "cpu/gpt_tp2/overlap.yaml"
    started = time.monotonic()
    try:
        cfg = load_launch_config(config, (*OVERRIDES, f"launch.entry={script}"))
        with tempfile.TemporaryDirectory() as folder:
            result = rehearse(cfg, cfg, Path(folder))
    except (ValueError, RunError, RunRecordError) as error:
        print(f"| {release_of(checkout)} | failed | | | | | {time.monotonic() - started:.0f} |")
        print(error, file=sys.stderr)
        return 1
    print(row(checkout, result, time.monotonic() - started), flush=True)
    for failure in result.failures:
        print(f"{checkout}: {failure}", file=sys.stderr)
    return 1 if result.failures else 0


def row(checkout: Path, result: Rehearsal, seconds: float) -> str:
    off, on = result.stock.losses[-1], result.overlapped.losses[-1]
    loss, norm = (max(deviation(*pair) for pair in pairs) for _, _, pairs in result.columns)
    report = result.overlapped.report
    calls = report.overlapped_calls if report is not None else 0
    return f"| {release_of(checkout)} | {off:.7g} | {on:.7g} | {loss:.1e} | {norm:.1e} | {calls} | {seconds:.0f} |"


def release_of(checkout: Path) -> str:
    """What the checkout calls itself."""
    package = checkout / "megatron" / "core" / "package_info.py"
    if not package.is_file():
        return str(checkout)
    parts = re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", package.read_text(), flags=re.MULTILINE)
    return f"{checkout.name} ({'.'.join(parts)})"


if __name__ == "__main__":
    sys.exit(main())
