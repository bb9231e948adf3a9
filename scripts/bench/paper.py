"""Runs the shapes of the Flash-Overlap paper, scaled to this machine, and prints the numbers of the paper beside.

    python scripts/bench/paper.py --json paper.json

The paper (arXiv 2604.24013): forward, TP = 4, d = 4096, an accelerator that it does not name. Here: four hosts as
network namespaces, link rates set so that communication : compute is its. Absolute times have nothing to do with
each other; the columns that can be compared are ratios. Linear layers: 1/64 of the paper's rows, its d = 4096, and both
halves of the MLP (all-gather + GEMM, GEMM + reduce-scatter). Attention: see attention.py. In fp32, whose GEMMs take a
core four times as long as those in bf16: sending costs this machine's cores time, and less of it beside longer GEMMs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import versions

HERE = Path(__file__).resolve().parent
# Sequence and batch: as many rows in all; the paper measures each.
MLP = ((1024, 128), (2048, 64), (4096, 32), (8192, 16), (16384, 8))
MLP_FEATURES = 4096
ROWS_SCALE = 64
# Row (32, 4096, 4096) in ms: serial 122.3, of which 43.8 exposed.
MLP_RATIO = 43.8 / (122.3 - 43.8)
# Over all rows of the paper's table: exposed communication cut, forward time cut; of serial.
PAPER_CUT = {"sliced": "77.9-85.2 %", "overlap": "99.7-99.8 %"}
PAPER_TIME = {"sliced": "-31.4 % (4096 x 32)", "overlap": "-35.0..-40.2 %"}


def main() -> None:
    args = parse()
    linear, attention = [], []
    with tempfile.TemporaryDirectory() as folder:
        for sequence, batch in MLP if args.shapes is None else MLP[: args.shapes]:
            result = run(args, folder, "linear.py", *linear_options(sequence * batch))
            linear += [{**row, "paper_sequence": sequence, "paper_batch": batch} for row in result["rows"]]
        if not args.no_attention:
            attention = run(args, folder, "attention.py", "--paper")["rows"]
    print_linear(linear)
    if args.json:
        content = {"linear": linear, "attention": attention, "versions": versions(), "command": sys.argv}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


def linear_options(rows: int) -> list[str]:
    shape = {"rows": rows // ROWS_SCALE, "in-features": MLP_FEATURES, "out-features": MLP_FEATURES}
    return [*(f"--{name}={value}" for name, value in shape.items()), "--ratios", f"{MLP_RATIO:.3f}"]


def run(args: argparse.Namespace, folder: str, script: str, *options: str) -> dict[str, Any]:
    """One benchmark on four hosts; its figures."""
    out = Path(folder) / "out.json"
    common = ["--hosts=4", "--dtype=fp32", f"--rounds={args.rounds}", "--warmup=1", f"--json={out}"]
    common += ["--directions", *args.directions]
    subprocess.run([sys.executable, str(HERE / script), *options, *common], check=True)
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def print_linear(rows: list[dict[str, Any]]) -> None:
    """Exposed communication and time, as cuts from serial.

    Exposed is what a variant takes longer than its GEMM alone. What the ranks waited for messages is given too: smaller
    GEMMs and additions cost time, and hide nothing.
    """
    print("\ncut from serial: exposed communication | time; waited: of the communication's time, by our clock")
    print(f"{'paper: sequence x batch':26}{'op':9}{'direction':18}{'sliced':>19}{'overlapped':>19}{'waited':>9}")
    for row in rows:
        shape = f"{row['paper_sequence']} x {row['paper_batch']}"
        cells = [cut(row, name) for name in ("sliced", "overlap")]
        waited = f"{100 * row['exposed_over_comm']:.1f} %"
        print(f"{shape:26}{row['op']:9}{row['direction']:18}{cells[0]:>19}{cells[1]:>19}{waited:>9}")
    there = [f"{PAPER_CUT[name]} | {PAPER_TIME[name]}" for name in ("sliced", "overlap")]
    print(f"paper, 1024..16384, forward: sliced {there[0]}; overlapped {there[1]}")


def cut(row: dict[str, Any], name: str) -> str:
    serial = row["serial_ms"]
    exposed = 1 - (row[f"{name}_ms"] - row["gemm_ms"]) / (serial - row["gemm_ms"])
    return f"{100 * exposed:.1f} % | {100 * (row[f'{name}_ms'] / serial - 1):+.1f} %"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--directions", nargs="+", choices=("forward", "forward_backward"), default=["forward"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shapes", type=int, help="only the first so many of the five linear shapes")
    parser.add_argument("--no-attention", action="store_true")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
