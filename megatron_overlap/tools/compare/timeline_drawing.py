"""Where everything stands in the report's own drawings: a step's timelines on one axis. Pure.

Numbers are units of a drawing that is `WIDTH` wide, one unit a pixel on a screen of 1280. A template write the SVG.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_overlap.tools.trace.timeline import Lane, Span, Timeline

WIDTH = 1200
LEFT, RIGHT = 150, 1190
"""Where lanes begin, and where the last millisecond is."""

# Every wait is darker than computation. On paper without colours some differ by their hatching alone.
FILLS: tuple[tuple[str, str], ...] = (
    ("#d55e00", "solid"),
    ("#123f7a", "solid"),
    ("#0a8f6a", "rising"),
    ("#8a2f7c", "falling"),
    ("#e0a100", "solid"),
    ("#3c82c4", "level"),
    ("#7a1420", "level"),
    ("#d4689f", "falling"),
    ("#7d8590", "upright"),
)
"""Colour and hatching of the ops, in order of their time; last of all others together."""
_OTHERS = len(FILLS) - 1

BAR, MESSAGES, _GAP = 24, 8, 15
_HEAD, _AFTER, _AXIS = 30, 4, 24
_SHARE = 0.002
"""Ops that waited for less of the drawn time have no colour of their own."""
_FINEST = 0.3
"""Spans of one op that are nearer than this are one: nobody could see them apart."""


@dataclass(frozen=True)
class Block:
    """A rectangle of a lane; `fill` is an index of `FILLS`."""

    x: float
    width: float
    fill: int
    title: str


@dataclass(frozen=True)
class DrawnLane:
    """A rank: its computation from `x` on, waits over it, and messages below."""

    y: float
    label: str
    role: str
    notes: tuple[str, ...]
    x: float
    width: float
    waits: tuple[Block, ...]
    messages: tuple[Block, ...]


@dataclass(frozen=True)
class Strip:
    """The lanes of one run under a line of text; `saved` is how much sooner it ends than the first one."""

    y: float
    run: str
    title: str
    lanes: tuple[DrawnLane, ...]
    top: float
    bottom: float
    end: float
    saved: str | None


@dataclass(frozen=True)
class Drawing:
    """All runs on one axis.

    Attributes:
        height: of the whole.
        strips: one for each run.
        ticks: place and label.
        first_end: where the first run ends.
        legend: ops and their index of `FILLS`.
    """

    height: float
    strips: tuple[Strip, ...]
    ticks: tuple[tuple[float, str], ...]
    first_end: float
    legend: tuple[tuple[str, int], ...]


def draw_timelines(found: Sequence[Timeline]) -> Drawing:
    """Lay out the timelines of a comparison, at least one, one below the other from the same zero."""
    ends = [max(lane.stop_ms for lane in one.lanes) for one in found]
    scale = (RIGHT - LEFT) / max(ends)
    fills = _fills(found)
    strips: list[Strip] = []
    y = 4.0
    for one, end in zip(found, ends, strict=True):
        lanes = []
        at = top = y + _HEAD
        for lane in one.lanes:
            lanes.append(_lane(lane, at, scale, fills))
            at += BAR + MESSAGES + _GAP
        less = ends[0] - end
        saved = f"{less:,.0f} ms less" if strips and less * scale > 1 else None
        strips.append(Strip(y, one.run, _title(one), tuple(lanes), top, at - _GAP + 3, LEFT + end * scale, saved))
        y = at + _AFTER
    legend = list(fills.items())
    if any(span.op not in fills for one in found for lane in one.lanes for span in lane.waits):
        legend.append(("all others", _OTHERS))
    ticks = tuple((LEFT + value * scale, f"{value:,g}") for value in nice_ticks(max(ends)))
    return Drawing(y + _AXIS, tuple(strips), ticks, LEFT + ends[0] * scale, tuple(legend))


def nice_ticks(largest: float) -> list[float]:
    """Round numbers from 0 to `largest`, 5 to 11 of them."""
    raw = largest / 10
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    return [number * step for number in range(int(largest / step + 1e-9) + 1)]


def _fills(found: Sequence[Timeline]) -> dict[str, int]:
    """The ops that waited longest in all steps that are drawn, and their place in `FILLS`."""
    times: dict[str, float] = {}
    for span in (span for one in found for lane in one.lanes for span in lane.waits):
        times[span.op] = times.get(span.op, 0.0) + span.stop_ms - span.start_ms
    least = _SHARE * sum(lane.stop_ms - lane.start_ms for one in found for lane in one.lanes)
    longest = sorted((op for op in times if times[op] >= least), key=lambda op: (-times[op], op))[:_OTHERS]
    return {op: place for place, op in enumerate(longest)}


def _lane(lane: Lane, y: float, scale: float, fills: dict[str, int]) -> DrawnLane:
    return DrawnLane(
        y=y,
        label=f"rank {lane.rank}",
        role=lane.role,
        notes=(f"waits {lane.waited_ms:,.0f} ms",)
        + ((f"messages {lane.in_flight_ms:,.0f} ms",) if lane.messages else ()),
        x=LEFT + lane.start_ms * scale,
        width=(lane.stop_ms - lane.start_ms) * scale,
        waits=_blocks(lane.waits, scale, fills, "waits for"),
        messages=_blocks(lane.messages, scale, fills, "messages of"),
    )


def _blocks(spans: Sequence[Span], scale: float, fills: dict[str, int], what: str) -> tuple[Block, ...]:
    joined: list[Span] = []
    open_at: dict[str, int] = {}
    for span in spans:
        place = open_at.get(span.op)
        if place is not None and (span.start_ms - joined[place].stop_ms) * scale < _FINEST:
            before = joined[place]
            joined[place] = Span(before.start_ms, max(before.stop_ms, span.stop_ms), span.op)
        else:
            open_at[span.op] = len(joined)
            joined.append(span)
    return tuple(
        Block(
            LEFT + span.start_ms * scale,
            (span.stop_ms - span.start_ms) * scale,
            fills.get(span.op, _OTHERS),
            f"{what} {span.op}: {span.stop_ms - span.start_ms:.1f} ms from {span.start_ms:.1f} ms on",
        )
        for span in joined
    )


def _title(one: Timeline) -> str:
    step = one.step
    ranks = "" if len(one.lanes) == one.num_ranks else f"; {len(one.lanes)} of {one.num_ranks} ranks"
    return (
        f"round {step.round}, iteration {step.iteration}: {step.time_ms:,.1f} ms, median {one.median_ms:,.1f} ms{ranks}"
    )
