"""Draws the layout of a batch of documents over the ranks: the tokens that each rank holds, and its modelled time.

python scripts/draw_partition.py --output plan.png --distribution wlb --ranks 16 --nodes 2 --nics 8 --tokens 500000
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_overlap.schedules.varlen import Topology, partition
from megatron_overlap.schedules.varlen.plan import Plan, balance, loads
from megatron_overlap.schedules.varlen.topology import FS_PER_US

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.bench.document_lengths import DISTRIBUTIONS, sample

MOST_RANKS, MOST_PASSES = 64, 3
_WHOLE, _INK, _GRID = "#c9ced4", "#24292f", "#d0d7de"
_INTRA = ("#0072b2", "#009e73", "#56b4e9", "#2f6f5e")
_INTER = ("#d55e00", "#e69f00", "#cc79a7", "#a63d00")
_ATTENTION, _MESSAGE = "#5f6b76", "#d55e00"


def draw(layout: Plan) -> bytes:
    """The layout as a PNG: at most 64 ranks of at most three passes."""
    ranks, shown = min(layout.topology.ranks, MOST_RANKS), min(len(layout.passes), MOST_PASSES)
    height = 1.7 + shown * max(1.6, 0.13 * ranks + 0.6)
    figure: Any = Figure(figsize=(12, height), dpi=130, layout="constrained")
    axes = figure.subplots(shown, 2, width_ratios=(2.6, 1), squeeze=False, sharey="row")
    for index in range(shown):
        _draw_tokens(axes[index][0], layout, index, ranks)
        _draw_load(axes[index][1], layout, index, ranks)
    result, passes = balance(layout), f"; {shown} of {len(layout.passes)} passes" if len(layout.passes) > 1 else ""
    figure.suptitle(
        f"{layout.method}: {len(layout.lengths)} documents, {sum(layout.lengths):,} tokens on "
        f"{layout.topology.ranks} ranks; attention balance {result.attention:.3f}, with linear layers "
        f"{result.compute:.3f}{passes}",
        fontsize=10.5,
        color=_INK,
        x=0.01,
        ha="left",
    )
    figure.legend(
        handles=[
            Patch(color=_WHOLE, label="whole documents"),
            Patch(color=_INTRA[0], label="part of a document, intra-node ring (one colour per ring)"),
            Patch(color=_INTER[0], label="part of a document, inter-node ring"),
        ],
        loc="outside lower left",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    out = io.BytesIO()
    figure.savefig(out, format="png", facecolor="white")
    return out.getvalue()


def _draw_tokens(axes: Any, layout: Plan, index: int, ranks: int) -> None:
    part = layout.passes[index]
    left = [0] * layout.topology.ranks
    for number, ring in enumerate(part.rings):
        palette = _INTER if ring.zone == "inter" else _INTRA
        members = [(position, rank) for position, rank in enumerate(ring.ranks) if rank < ranks]
        counts = [ring.tokens(position) for position, _ in members]
        rows = [rank for _, rank in members]
        starts = [left[rank] for rank in rows]
        axes.barh(rows, counts, left=starts, height=0.86, color=palette[number % 4], edgecolor="white", lw=0.3)
        for rank, count in zip(rows, counts, strict=True):
            left[rank] += count
    whole = [sum(layout.lengths[document] for document in part.local[rank]) for rank in range(ranks)]
    axes.barh(range(ranks), whole, left=left[:ranks], height=0.86, color=_WHOLE)
    for rank in range(ranks):
        ends, end = [], left[rank]
        for document in part.local[rank]:
            end += layout.lengths[document]
            ends.append(end)
        axes.vlines(ends, rank - 0.43, rank + 0.43, color="white", lw=0.4)
    axes.axvline(layout.capacity, color=_INK, lw=0.8, ls=":")
    axes.set_ylim(ranks - 0.4, -0.6)
    axes.set_ylabel("rank")
    number = f", pass {index}" if len(layout.passes) > 1 else ""
    _style_axes(axes, f"tokens held{number} (dotted: capacity)", layout, ranks)


def _draw_load(axes: Any, layout: Plan, index: int, ranks: int) -> None:
    table = loads(layout, index)
    mean = sum(load.attention_fs for load in table) / len(table) / FS_PER_US
    axes.barh(range(ranks), [load.attention_fs / FS_PER_US for load in table[:ranks]], height=0.86, color=_ATTENTION)
    axes.barh(range(ranks), [load.message_fs / FS_PER_US for load in table[:ranks]], height=0.3, color=_MESSAGE)
    axes.axvline(mean, color=_INK, lw=0.8, ls=":")
    _style_axes(axes, "modelled us: attention, messages (thin); dotted: mean", layout, ranks)


def _style_axes(axes: Any, title: str, layout: Plan, ranks: int) -> None:
    axes.set_title(title, fontsize=8.5, loc="left", color=_INK)
    axes.grid(axis="x", color=_GRID, lw=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=7.5, length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    for boundary in range(layout.topology.devices_per_node, ranks, layout.topology.devices_per_node):
        axes.axhline(boundary - 0.5, color=_INK, lw=0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="PNG file")
    parser.add_argument("--distribution", choices=tuple(DISTRIBUTIONS), default="prolong")
    parser.add_argument("--tokens", type=int, default=500_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--nics", type=int, default=1, help="network cards per node")
    args = parser.parse_args()
    share = -(-args.tokens // args.ranks)
    topology = Topology(args.nodes, args.ranks // args.nodes, args.nics)
    batch = sample(args.distribution, args.tokens, args.seed)
    args.output.write_bytes(draw(partition(batch, topology, capacity=share + share // 16)))


if __name__ == "__main__":
    main()
