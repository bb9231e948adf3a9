"""Draws the schedule of each feature on a time line: the stock order, and the schedule that the plugin runs.

python scripts/draw_schedule.py                       # all pictures of docs/images
python scripts/draw_schedule.py --feature ulysses

The boxes are the pieces of the package's plan objects, on rank 0 of an ideal machine: GEMMs and links at a constant
rate. Data parallelism has no plan object; its picture has the order of the buckets in `adapters/data_parallel`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from megatron_overlap.schedules import (
    ChunkLayout,
    PartLayout,
    Plan,
    all_gather_plan,
    all_reduce_plan,
    reduce_scatter_plan,
    ulysses_plan,
)
from megatron_overlap.schedules.tile_order import arrival_order, departure_order, row_tiles

RANKS, CHUNKS = 4, 2
GEMM, COMMUNICATION = 10.0, 7.0  # times of a whole GEMM and of a whole collective
BUCKETS = 6
COLOURS = {"compute": "#3d78b8", "link": "#d98c3f"}


@dataclass(frozen=True)
class Box:
    """A computation or a message of a rank."""

    start: float
    stop: float
    text: str
    row: str


@dataclass(frozen=True)
class Step:
    """A computation: its time, its label, and the indices of the messages that it waits for."""

    time: float
    text: str
    needs: Sequence[int] = ()


@dataclass(frozen=True)
class Transfer:
    """A message: its time, its label, and the number of steps after which it may be sent."""

    time: float
    text: str
    after: int = 0


def play(steps: Sequence[Step], transfers: Sequence[Transfer]) -> list[Box]:
    """The times of all steps and messages of one rank. Every rank runs the same, so messages arrive as they leave."""
    boxes: list[Box] = []
    arrived: list[float] = []
    clock = link = 0.0

    def send(done: int) -> None:
        nonlocal link
        while len(arrived) < len(transfers) and transfers[len(arrived)].after <= done:
            message = transfers[len(arrived)]
            start, link = max(link, clock), max(link, clock) + message.time
            arrived.append(link)
            boxes.append(Box(start, link, message.text, "link"))

    send(0)
    for index, step in enumerate(steps):
        clock = max([clock, *(arrived[k] for k in step.needs)])
        if step.time:
            boxes.append(Box(clock, clock + step.time, step.text, "compute"))
            clock += step.time
        send(index + 1)
    return boxes


def play_plan(plan: Plan) -> list[Box]:
    """A plan of a linear layer. Labels name the owners of the rows."""
    num_rows = plan.num_ranks * 9240  # divisible by any small number of parts
    gather = plan.collective == "all_gather"
    if plan.collective == "all_reduce":
        rows: Callable[..., int] = PartLayout(num_rows, plan.num_ranks, plan.chunks_per_rank).num_chunk_rows
    else:
        rows = plan.layout(num_rows).num_chunk_rows
    moved = sum(rows(message.send) for message in plan.messages)
    steps = []
    for work in plan.work:
        owners = dict.fromkeys(str(chunk.owner) for chunk in work.chunks)
        label = "all" if len(owners) == plan.num_ranks else ", ".join(owners)
        steps.append(Step(GEMM * sum(map(rows, work.chunks)) / num_rows, label, work.needs))
        steps.append(Step(0, "", work.adds))
    transfers = [
        Transfer(COMMUNICATION * rows(m.send) / moved, str((m.recv if gather else m.send).owner), 2 * m.after_work)
        for m in plan.messages
    ]
    return play(steps, transfers)


def in_turn(*parts: tuple[str, float, str]) -> list[Box]:
    """Computations and messages of which each begins when the one before has ended: (row, time, label)."""
    boxes: list[Box] = []
    for row, time, text in parts:
        start = boxes[-1].stop if boxes else 0.0
        boxes.append(Box(start, start + time, text, row))
    return boxes


def after(first: list[Box], second: list[Box]) -> list[Box]:
    """Both time lines, the second one after the end of the first one."""
    shift = max(box.stop for box in first)
    return [*first, *(replace(box, start=box.start + shift, stop=box.stop + shift) for box in second)]


def tensor_parallel() -> tuple[list[Box], list[Box]]:
    """A column- and a row-parallel forward with sequence parallelism."""
    stock = in_turn(
        ("link", COMMUNICATION, "all-gather"),
        ("compute", GEMM, "GEMM"),
        ("compute", GEMM, "GEMM"),
        ("link", COMMUNICATION, "reduce-scatter"),
    )
    gather, scatter = (
        play_plan(build(RANKS, 0, chunks_per_rank=CHUNKS, split="edge"))
        for build in (all_gather_plan, reduce_scatter_plan)
    )
    return stock, after(gather, scatter)


def all_reduce() -> tuple[list[Box], list[Box]]:
    """A row-parallel forward without sequence parallelism."""
    stock = in_turn(("compute", GEMM, "GEMM"), ("link", COMMUNICATION, "all-reduce"))
    return stock, play_plan(all_reduce_plan(2, 0, chunks_per_rank=5))


def ulysses() -> tuple[list[Box], list[Box]]:
    """Attention with its projections over context ranks."""
    names = {"produce": "QKV", "attend": "attention", "consume": "out"}

    def timeline(pattern: str, groups: int) -> list[Box]:
        plan = ulysses_plan(2, 0, num_groups=groups, pattern="serial" if pattern == "serial" else "direct")
        times = {"produce": 0.4 * GEMM / groups, "attend": GEMM / groups, "consume": 0.2 * GEMM / groups}
        steps = [
            Step(times[task.step] * len(task.peers) / (1 if task.step == "attend" else 2), names[task.step], task.needs)
            for task in plan.work
        ]
        messages = [
            Transfer(
                (0.75 if m.send.direction == "in" else 0.25) * COMMUNICATION / groups, m.send.direction, m.after_work
            )
            for m in plan.messages
        ]
        return play(steps, messages)

    return timeline("serial", 1), timeline("direct", 4)


def data_parallel() -> tuple[list[Box], list[Box]]:
    """Backward, optimizer step and the next forward over four buckets of the distributed optimizer."""
    backward, forward, update = GEMM / BUCKETS, GEMM / 2 / BUCKETS, 0.3 * GEMM / BUCKETS
    message = COMMUNICATION / BUCKETS
    last_first = range(BUCKETS - 1, -1, -1)
    gradients = [Transfer(message, str(bucket), BUCKETS - bucket) for bucket in last_first]
    steps = [Step(backward, str(bucket)) for bucket in last_first]
    steps.append(Step(0.3, "norm", range(BUCKETS)))
    first = len(steps)
    by_bucket = [*steps, *(Step(update, "") for _ in range(BUCKETS))]
    by_bucket += [Step(forward, str(bucket), (BUCKETS + bucket,)) for bucket in range(BUCKETS)]
    overlapped = play(by_bucket, [*gradients, *(Transfer(message, str(b), first + b + 1) for b in range(BUCKETS))])
    # Stock: one optimizer step, then each gather starts when the forward has received the bucket before.
    whole = [*steps, Step(update * BUCKETS, "step")]
    for bucket in range(BUCKETS):
        whole += [Step(0, "", (BUCKETS + bucket,)), Step(forward, str(bucket))]
    starts = [first + 1 + max(0, 2 * bucket - 1) for bucket in range(BUCKETS)]
    stock = play(whole, [*gradients, *(Transfer(message, str(b), starts[b]) for b in range(BUCKETS))])
    return stock, overlapped


def fused_kernels() -> tuple[list[Box], list[Box]]:
    """A column- and a row-parallel forward, each one kernel whose row tiles wait for, or store to, other ranks."""
    layout = ChunkLayout(RANKS * 1024, RANKS, CHUNKS)
    tile = GEMM / (layout.num_rows // 256)
    arrivals = arrival_order(layout, 0)
    remote = [chunk for chunk in arrivals if chunk.owner != 0]
    message = COMMUNICATION / len(remote)
    gather = play(
        [
            Step(tile, str(row.owner), (remote.index(arrivals[0]._replace(owner=row.owner, part=row.part)),))
            if row.remote
            else Step(tile, str(row.owner))
            for row in row_tiles(layout, 0, arrivals, 256)
        ],
        [Transfer(message, str(chunk.owner)) for chunk in remote],
    )
    rows = row_tiles(layout, 0, departure_order(layout, 0), 256)
    stored = message / (rows[0].tiles_in_chunk)
    scatter = play(
        [Step(tile, str(row.owner)) for row in rows],
        [Transfer(stored, str(row.owner), number + 1) for number, row in enumerate(rows) if row.remote],
    )
    return tensor_parallel()[0], after(gather, scatter)


OWNERS = "overlapped, rank 0; the numbers are the owners of the rows"
FEATURES = {
    "tensor_parallel": (tensor_parallel, "stock: all-gather, GEMM; GEMM, reduce-scatter", OWNERS),
    "all_reduce": (all_reduce, "stock: GEMM, all-reduce", OWNERS.replace("rank 0", "rank 0 of 2")),
    "data_parallel": (
        data_parallel,
        "stock, both overlap flags: backward, norm, step, forward; the numbers are buckets",
        "overlapped: one optimizer step per bucket, then its gather",
    ),
    "ulysses": (
        ulysses,
        "serial: projection, all-to-all, attention, all-to-all, projection",
        "overlapped, rank 0 of 2, four head groups",
    ),
    "fused_kernels": (
        fused_kernels,
        "stock: all-gather, GEMM; GEMM, reduce-scatter",
        "fused, rank 0; the boxes are row tiles of one kernel, the numbers the owners of the rows",
    ),
}


def draw(feature: str, output: Path) -> None:
    """Draw the stock order above the overlapped schedule."""
    function, *titles = FEATURES[feature]
    figure, axes = plt.subplots(2, 1, figsize=(10, 3.4), sharex=True)
    for axis, title, boxes in zip(axes, titles, function(), strict=True):
        end = max(box.stop for box in boxes)
        for box in boxes:
            bottom = 0.06 + (box.row == "compute")
            width = box.stop - box.start
            axis.broken_barh([(box.start, width)], (bottom, 0.88), color=COLOURS[box.row], edgecolor="white")
            if width > 0.011 * end * len(box.text):
                centre = (box.start + width / 2, bottom + 0.44)
                axis.text(*centre, box.text, ha="center", va="center", color="white", fontsize=8)
        axis.set_yticks([0.5, 1.5], ["link", "compute"], fontsize=9)
        axis.set_title(title, fontsize=10, loc="left")
        axis.axvline(end, color="black", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xlabel("time; an ideal machine, not a measurement", fontsize=9)
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)
    plt.close(figure)
    print(f"drawn: {output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--feature", choices=list(FEATURES), help="one picture; without it all of them")
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    for feature in [args.feature] if args.feature else FEATURES:
        draw(feature, args.folder / f"{feature}.png")


if __name__ == "__main__":
    main()
