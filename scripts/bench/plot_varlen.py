"""Draws the figures of bench/varlen.py: the speedup of each method over the p2p ring, batch by batch.

python scripts/bench/plot_varlen.py varlen.json --output varlen.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {
    "ring": "#8c8c8c",
    "all_gather": "#bf9000",
    "ulysses": "#3d78b8",
    "hybrid": "#7b4fa3",
    "packing": "#c9c9c9",
    "partition": "#f0b7ae",
    "engine": "#dd7466",
    "routing": "#c0392b",
    "remap": "#7e1d13",
}
LABELS = {
    "ring": "p2p ring of all ranks",
    "all_gather": "all-gather",
    "ulysses": "Ulysses",
    "hybrid": "Megatron-Core's hybrid schedule",
    "packing": "packing: whole documents",
    "partition": "balanced plan, one ring after another",
    "engine": "balanced plan, all rings at once",
    "routing": "the same with routing",
    "remap": "the same with routing and rebalancing",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("--output", type=Path, default=Path("varlen.png"))
    args = parser.parse_args()
    draw(json.loads(args.json.read_text()), args.output)
    print(f"drawn: {args.output}")


def draw(result: dict[str, Any], output: Path) -> None:
    """One panel for each scope and direction: the ring's time over that of each method, in each batch."""
    rows = result["rows"]
    panels = sorted({(row["scope"], row["direction"]) for row in rows})
    figure, axes = plt.subplots(len(panels), 1, figsize=(11, 3.1 * len(panels)), squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=True):
        mine = [row for row in rows if (row["scope"], row["direction"]) == panel]
        names = [name for name in COLOURS if name in mine[0]["ms"]]
        width = 0.85 / len(names)
        for number, name in enumerate(names):
            places = [place + (number - (len(names) - 1) / 2) * width for place in range(len(mine))]
            values = [row["ms"]["ring"] / row["ms"][name] for row in mine]
            axis.bar(places, values, width, color=COLOURS[name], label=LABELS[name])
        if "roof" in mine[0]["ms"]:
            for place, row in enumerate(mine):
                roof = row["ms"]["ring"] / row["ms"]["roof"]
                label = "roof: computation and messages at once" if not place else None
                axis.plot([place - 0.43, place + 0.43], [roof, roof], color="#2e7d32", linewidth=1.6, label=label)
        axis.set_yscale("log")
        for write in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            write(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "1235" else "")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.grid(alpha=0.25, axis="y")
        labels = [f"{row['batch']} {row['seed']}\n{row['documents']} docs" for row in mine]
        axis.set_xticks(range(len(mine)), labels, fontsize=8)
        axis.set_ylabel("speedup over the p2p ring", fontsize=9)
        axis.set_title(f"{panel[0]}, {panel[1].replace('_', ' + ')}", fontsize=10)
    handles, names = {}, []
    for axis in axes.flat:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    names = list(handles)
    figure.legend(handles.values(), names, loc="lower center", ncols=4, fontsize=8, frameon=False)
    link, versions = result["link"], result["versions"]
    figure.suptitle(
        f"{mine[0]['tokens']} tokens on 2 nodes of 2 ranks, CPUs, links of {link['gbps']} between nodes and "
        f"{link['intra_node_gbps']} Gbit/s inside. torch {versions['torch']}, {versions['processor']}",
        fontsize=10,
    )
    figure.tight_layout(rect=(0, 0.55 / figure.get_figheight(), 1, 0.99))
    figure.savefig(output, dpi=140)
    plt.close(figure)


if __name__ == "__main__":
    main()
