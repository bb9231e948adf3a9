"""Runs the dry run and the rehearsal of every GPU config on a machine without a GPU.

    python scripts/rehearse_all.py                       # all of them, about half a minute each on two cores
    python scripts/rehearse_all.py llama3_8b_tp8 gpt3_13b_tp8 --precision fp32

Prints a Markdown table. Exit code 1 if a config fails. Configs that train on documents need the data that
`python scripts/prepare_data.py --output data/stdlib` makes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_overlap import cli
from megatron_overlap.config import ConfigError, LaunchConfig, load_launch_config
from megatron_overlap.config.resources import resource_folder
from megatron_overlap.tools.launch.downscale import downscale
from megatron_overlap.tools.launch.processes import RunError
from megatron_overlap.tools.launch.rehearsal import Rehearsal, max_local_ranks, rehearse
from megatron_overlap.tools.launch.run_records import RunRecordError, deviation

HEAD = "| config | dry-run | downscaled to | loss apart | grad-norm apart | calls overlapped | verdict | s |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", help="folders of configs/gpu; none: every config for GPUs")
    parser.add_argument("--precision", default=None, choices=("fp32", "bf16"), help="fp32 has the smaller bounds")
    parser.add_argument("--ranks", type=int, default=None, help="ranks of a rehearsal; default: as many as fit")
    arguments = parser.parse_args(argv)
    names = arguments.configs or on_gpus()
    overrides = [] if arguments.precision is None else [f"train.precision={arguments.precision}"]
    print(f"{HEAD}\n{'|---' * (HEAD.count('|') - 1)}|", flush=True)
    verdicts = [check(name, overrides, arguments.ranks or max_local_ranks()) for name in names]
    return 0 if all(verdicts) else 1


def on_gpus() -> list[str]:
    """Folders of the shipped configs for GPUs."""
    return sorted(file.parent.name for file in resource_folder("configs").glob("gpu/*/overlap.yaml"))


def check(name: str, overrides: Sequence[str], max_ranks: int) -> bool:
    """Plans both configs of a pair, rehearses the overlapped one, and prints the row."""
    started = time.monotonic()
    files = [resource_folder("configs") / "gpu" / name / f"{kind}.yaml" for kind in ("baseline", "overlap")]
    with contextlib.redirect_stdout(io.StringIO()):
        planned = all(cli.main(["launch", str(file), "--dry-run", *overrides]) == 0 for file in files)
    cells = ["failed", "", "", "", ""]
    proven = False
    try:
        cfg = load_launch_config(files[1], overrides)
        downscaled, _ = downscale(cfg, max_ranks)
        with tempfile.TemporaryDirectory() as folder:
            result = rehearse(cfg, downscaled, Path(folder))
        proven = planned and not result.failures
        cells = [*figures(downscaled, result), "passed" if proven else "FAILED"]
        for failure in result.failures:
            print(f"{name}: {failure}", file=sys.stderr)
    except (ConfigError, RunError, RunRecordError) as error:
        print(f"{name}: {error}", file=sys.stderr)
    row = [f"`{name}`", "yes" if planned else "no", *cells, f"{time.monotonic() - started:.0f}"]
    print(f"| {' | '.join(row)} |", flush=True)
    return proven


def figures(downscaled: LaunchConfig, result: Rehearsal) -> list[str]:
    parallel = downscaled.parallel
    sizes = {
        "TP": parallel.tensor,
        "CP": parallel.context,
        "PP": parallel.pipeline,
        "DP": downscaled.data_parallel_size,
    }
    layout = " ".join(f"{kind}{size}" for kind, size in sizes.items() if size > 1)
    loss, norm = (max(deviation(*pair) for pair in pairs) for _, _, pairs in result.columns)
    report = result.overlapped.report
    calls = report.overlapped_calls if report is not None else 0
    return [layout, f"{loss:.1e}", f"{norm:.1e}", str(calls)]


if __name__ == "__main__":
    sys.exit(main())
