"""Draws the figures of bench/linear.py: time / roof over communication : GEMM, one panel for each op and direction.

python scripts/bench/plot.py linear.json [more.json ...] --output linear.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

# Colour and marker tell the variants apart in print too.
VARIANTS = {
    "serial_ms": ("stock order", "#8c8c8c", "s"),
    "serial_p2p_ms": ("the same messages, not overlapped", "#bf9000", "^"),
    "sliced_ms": ("sliced: one asynchronous collective for each slice", "#3d78b8", "D"),
    "overlap_ms": ("overlapped", "#c0392b", "o"),
    "limit_ms": ("max(GEMM, communication)", "#2e7d32", "_"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("json", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("linear.png"))
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for path in args.json:
        result = json.loads(path.read_text())
        rows += result["rows"]
    draw(rows, result["versions"], args.output)
    print(f"drawn: {args.output}")


def draw(rows: list[dict[str, Any]], versions: dict[str, Any], output: Path) -> None:
    """One panel for each op, direction and number of ranks."""
    panels = sorted({(row["ranks"], row["op"], row["direction"]) for row in rows})
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.2 * columns, 3.6 * lines), squeeze=False, sharey=True)
    for axis, key in zip(axes.flat, panels, strict=False):
        mine = [row for row in rows if (row["ranks"], row["op"], row["direction"]) == key]
        mine.sort(key=lambda row: row["comm_ms"] / row["gemm_ms"])
        ratios = [row["comm_ms"] / row["gemm_ms"] for row in mine]
        for name, (label, colour, marker) in VARIANTS.items():
            values = [row[name] / row["roof_ms"] for row in mine]
            axis.plot(ratios, values, color=colour, marker=marker, markersize=5, linewidth=1.4, label=label)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(FixedLocator([0.125, 0.25, 0.5, 1, 2, 4, 8]))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.grid(alpha=0.25)
        ranks, op, direction = key
        axis.set_title(f"{op}, {direction.replace('_', ' + ')}, {ranks} ranks", fontsize=10)
        axis.set_xlabel("communication : GEMM", fontsize=9)
    for axis in list(axes.flat)[len(panels) :]:
        axis.axis("off")
    for axis in axes[:, 0]:
        axis.set_ylabel("time / roof", fontsize=9)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=9, frameon=False)
    figure.suptitle(
        "Tensor-parallel linear on CPUs, hosts as network namespaces. Roof: the same GEMMs and bytes at once,\n"
        f"with no order between them. torch {versions['torch']}, {versions['processor']}",
        fontsize=10,
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(output, dpi=140)
    plt.close(figure)


if __name__ == "__main__":
    main()
