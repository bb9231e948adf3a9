#!/usr/bin/env python
"""Runs TransformerEngine layers with and without the plugin on releases of TransformerEngine and megatron-core.

    python scripts/te_releases.py --json docs/results/te_releases.json

For each pair: a LLaMA of two layers on two ranks with sequence parallelism, one forward and backward, fp32; loss and
gradients with the plugin equal those without it. No GPU is needed: TransformerEngine's Python is real, its native
kernels are PyTorch code. A pair that does not run is listed with the reason. Exit code 1 where a pair differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_overlap.config.resources import transformer_engine_folder
from megatron_overlap.tools.launch.processes import RunError, run_workers

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ("2.8.0", "2.12.0", "2.16.1", "2.19.0", "2.20.2")
MEGATRONS = ("0.17.1", "0.18.2", "0.19.2")
BOUND = 1e-5
"""Relative; another order of the same fp32 sums."""


def main() -> int:
    """0: every pair that runs is equal; 1: one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), help="releases of TransformerEngine")
    parser.add_argument("--megatrons", nargs="+", default=list(MEGATRONS), help="releases of megatron-core")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    needed = transformer_engine_folder()
    if needed is None:
        parser.error("no TransformerEngine: run bash scripts/setup.sh te")
    rows = []
    for engine in options.engines:
        for megatron in options.megatrons:
            folders = [installed("transformer_engine", engine), installed("megatron-core", megatron), needed]
            rows.append({"transformer_engine": engine, "megatron_core": megatron, **compared(folders)})
            print(f"TransformerEngine {engine}, megatron-core {megatron}: {rows[-1]['verdict']}", flush=True)
    shown = Table("TransformerEngine", "megatron-core", "loss", "gradients", "overlapped passes", "verdict")
    for row in rows:
        figures = [f"{row[key]:.1e}" if key in row else "" for key in ("loss", "gradients")]
        cells = (row["transformer_engine"], row["megatron_core"], *figures, str(row.get("overlapped", "")))
        shown.add_row(*cells, row["verdict"])
    Console(width=None if sys.stdout.isatty() else 140).print(shown)
    if options.json:
        command = " ".join(["python", "scripts/te_releases.py", *sys.argv[1:]])
        options.json.write_text(json.dumps({"command": command, "bound": BOUND, "pairs": rows}, indent=1) + "\n")
    return 1 if any(row["verdict"] == "NOT EQUAL" for row in rows) else 0


def installed(package: str, release: str) -> Path:
    """A folder with one release of a package, installed once into `.cache/`."""
    folder = ROOT / ".cache" / f"{package}-{release}"
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--target", str(folder), f"{package}=={release}"], check=True)
    return folder


def compared(folders: list[Path]) -> dict[str, Any]:
    """The figures of one pair and its verdict."""
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, [*folders, ROOT]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        try:
            worker = ROOT / "scripts" / "trust" / "te_rank.py"
            run_workers(worker, [str(file)], 2, timeout_s=300)
        except RunError as error:
            lines = [line.removeprefix("  | ") for line in str(error).splitlines() if "Error" in line]
            return {"verdict": f"does not run: {lines[-1] if lines else error}"}
        result: dict[str, Any] = json.loads(file.read_text())
    equal = result["loss"] <= BOUND and result["gradients"] <= BOUND and result["overlapped"] > 0
    return {**result, "verdict": "equal" if equal else "NOT EQUAL"}


if __name__ == "__main__":
    sys.exit(main())
