"""The timeline of a simulated step as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_overlap.tools.simulate.layer import Layers
from megatron_overlap.tools.simulate.step import StepTime

TRACKS = ("compute", "pipeline", "data")
_TRACK_NAMES = {"compute": "compute", "pipeline": "pipeline messages", "data": "data parallel"}
_LAYER = "one layer (waits: exposed tensor and context parallel communication)"


def trace_events(step: StepTime, layers: Layers) -> list[dict[str, Any]]:
    """Trace events of every stage and of one layer in detail. Times are simulated.

    Args:
        step: step time with its timeline.
        layers: layers of the same job.
    """
    events: list[dict[str, Any]] = []
    stages = sorted({item.stage for item in step.slices})
    for stage in stages:
        events.append(_name("process_name", stage, 0, f"stage {stage} (simulated)"))
        events += [_name("thread_name", stage, track, _TRACK_NAMES[name]) for track, name in enumerate(TRACKS)]
    for item in step.slices:
        events.append(_event(item.name, item.stage, TRACKS.index(item.track), item.start_us, item.stop_us))
    process = len(stages)
    events.append(_name("process_name", process, 0, _LAYER))
    events += [
        _name("thread_name", process, track, text) for track, text in enumerate(("operations", "exposed communication"))
    ]
    clock = 0.0
    for op in (*layers.forward.ops, *layers.backward.ops):
        stop = clock + op.time_us
        events.append(_event(op.name, process, 0, clock, stop))
        waits = op.tensor_us + op.context_us
        if waits > 0:
            events.append(_event(f"{op.name}: exposed", process, 1, stop - waits, stop))
        clock = stop
    return events


def write_trace(path: Path, events: Iterable[dict[str, Any]]) -> None:
    """Write the trace.

    Raises:
        OSError: the file cannot be written.
    """
    content = {"traceEvents": list(events), "displayTimeUnit": "ms", "otherData": {"what": "simulated, not measured"}}
    path.write_text(json.dumps(content), encoding="utf-8")


def _name(what: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": text}}


def _event(name: str, process: int, thread: int, start: float, stop: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": round(start, 3),
        "dur": round(stop - start, 3),
    }
