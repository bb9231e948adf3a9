"""Draws a column- and a row-parallel forward on a time line: Megatron's order, and the schedules that run here.

python scripts/draw_schedule.py --output docs/images/step.png

The boxes are the pieces of the package's own plan objects; the times are those of an ideal machine, in which the whole
GEMM takes `--gemm` and the whole collective `--communication` units.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from megatron_overlap.schedules import Plan, all_gather_plan, reduce_scatter_plan

GEMM, MESSAGE = "#3d78b8", "#d98c3f"


@dataclass(frozen=True)
class Box:
    """One piece of work or one message of a rank."""

    start: float
    stop: float
    text: str
    message: bool


def play(plan: Plan, gemm: float, communication: float) -> list[Box]:
    """When each piece of `plan` runs on one rank, all ranks being alike: links and GEMMs at a constant rate."""
    num_rows = plan.num_ranks * 9240  # divisible by any small number of parts
    layout = plan.layout(num_rows)
    per_row = communication / max(1, num_rows - num_rows // plan.num_ranks)
    boxes: list[Box] = []
    landed: list[float] = []
    clock, link = 0.0, 0.0

    def post(work_done: int) -> None:
        nonlocal link
        while len(landed) < len(plan.messages) and plan.messages[len(landed)].after_work <= work_done:
            message = plan.messages[len(landed)]
            start = max(link, clock)
            link = start + per_row * layout.num_chunk_rows(message.recv)
            landed.append(link)
            boxes.append(Box(start, link, f"{message.recv.owner}", True))

    post(0)
    for index, work in enumerate(plan.work):
        clock = max([clock, *(landed[k] for k in work.needs)])
        if work.chunks:
            stop = clock + gemm * sum(map(layout.num_chunk_rows, work.chunks)) / num_rows
            boxes.append(Box(clock, stop, f"{work.chunks[0].owner}", False))
            clock = stop
        clock = max([clock, *(landed[k] for k in work.adds)])
        post(index + 1)
    return boxes


def in_order(gather: bool, gemm: float, communication: float) -> list[Box]:
    """Megatron's forward: one collective, one GEMM."""
    if gather:
        return [
            Box(0, communication, "all-gather", True),
            Box(communication, communication + gemm, "GEMM", False),
        ]
    return [Box(0, gemm, "GEMM", False), Box(gemm, gemm + communication, "reduce-scatter", True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=2, help="chunks per rank")
    parser.add_argument("--gemm", type=float, default=10.0)
    parser.add_argument("--communication", type=float, default=7.0)
    parser.add_argument("--output", type=Path, default=Path("docs/images/step.png"))
    args = parser.parse_args()

    def sequence(overlapped: bool) -> list[Box]:
        boxes: list[Box] = []
        for build in (all_gather_plan, reduce_scatter_plan):
            gather = build is all_gather_plan
            plan = build(args.ranks, 0, chunks_per_rank=args.chunks, split="edge")
            part = (
                play(plan, args.gemm, args.communication)
                if overlapped
                else in_order(gather, args.gemm, args.communication)
            )
            shift = max((box.stop for box in boxes), default=0.0)
            boxes += [Box(box.start + shift, box.stop + shift, box.text, box.message) for box in part]
        return boxes

    figure, axes = plt.subplots(2, 1, figsize=(10, 3.4), sharex=True)
    titles = (
        "Megatron: all-gather, GEMM; GEMM, reduce-scatter",
        "overlapped, rank 0: boxes name the owner of the rows",
    )
    for axis, title, overlapped in zip(axes, titles, (False, True), strict=True):
        boxes = sequence(overlapped)
        for box in boxes:
            row = 0 if box.message else 1
            colour = MESSAGE if box.message else GEMM
            axis.broken_barh([(box.start, box.stop - box.start)], (row + 0.06, 0.88), color=colour, edgecolor="white")
            axis.text(
                (box.start + box.stop) / 2, row + 0.5, box.text, ha="center", va="center", color="white", fontsize=8
            )
        axis.set_yticks([0.5, 1.5], ["link", "compute"], fontsize=9)
        axis.set_title(title, fontsize=10, loc="left")
        axis.axvline(max(box.stop for box in boxes), color="black", linewidth=0.8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[1].set_xlabel(
        "time, in units of the whole GEMM / 10 (ideal machine; measured figures are in the README)", fontsize=9
    )
    figure.tight_layout()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=130)
    print(f"drawn: {args.output}")


if __name__ == "__main__":
    main()
