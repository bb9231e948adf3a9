"""Runs several launches in turns, so that whatever else the machine does hits all of them alike."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_overlap.config import LaunchConfig, load_launch_config
from megatron_overlap.tools.launch.execute import execute
from megatron_overlap.tools.launch.netlab import NetlabError
from megatron_overlap.tools.launch.plan import LaunchPlan, plan
from megatron_overlap.tools.launch.results import RunError
from megatron_overlap.tools.launch.run_records import ArtefactError, RunRecord, read_run

_ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+\s*\|.*?elapsed time per iteration \(ms\):\s*([\d.]+)")


class LaunchFailedError(RuntimeError):
    """One launch of a comparison failed; the text names the round, the run and the rank."""


@dataclass(frozen=True)
class Progress:
    """Where a comparison stands.

    Attributes:
        round: from 1.
        rounds: how many there will be.
        name: the run that is on.
        iteration: the last one it has done; 0: none yet.
        step_time_ms: of that iteration as Megatron logs it, None before the first.
    """

    round: int
    rounds: int
    name: str
    iteration: int
    step_time_ms: float | None


@dataclass(frozen=True)
class Recorded:
    """One launch of all rounds: its records and its link."""

    records: tuple[RunRecord, ...]
    link: Mapping[str, Any]


def run_rounds(
    configs: Sequence[LaunchConfig],
    rounds: int,
    folder: Path,
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> list[Recorded]:
    """Launch every config once in each round, in alternating order, and read what the runs recorded.

    Args:
        configs: their names must differ.
        rounds: how many times.
        folder: gets a folder `round{i}-{name}` for each launch.
        on_progress: called at the start of a launch and after each of its iterations.
        on_note: called with what a person should know, such as a fallback of the network.

    Raises:
        ConfigError: a config cannot be launched; nothing was started.
        LaunchFailedError: a launch failed; no process of it is left.
    """
    plans = [
        [plan(config, run_folder(folder, number, config.name)) for config in configs] for number in range(1, rounds + 1)
    ]
    records: list[list[RunRecord]] = [[] for _ in configs]
    links: list[Mapping[str, Any]] = [{} for _ in configs]
    told: set[str] = set()

    def note_once(text: str) -> None:
        if text not in told:
            told.add(text)
            on_note(text)

    for number, planned in enumerate(plans, start=1):
        for index in turn(number, len(configs)):
            progress = Progress(number, rounds, configs[index].name, 0, None)
            on_progress(progress)
            records[index].append(_launch(planned[index], progress, on_progress, note_once))
            links[index] = link_of(planned[index])
    return [Recorded(tuple(taken), link) for taken, link in zip(records, links, strict=True)]


def run_folder(folder: Path, number: int, name: str) -> Path:
    """Where the launch of one config in one round, from 1, writes."""
    return folder / f"round{number}-{name}"


def turn(number: int, count: int) -> list[int]:
    """The order within a round: every second one is reversed, so that none is always first, or always after another."""
    order = list(range(count))
    return order if number % 2 else order[::-1]


def link_of(launch_plan: LaunchPlan) -> dict[str, Any]:
    """What carried the communication of a run that has ended: read from its folder, as it may have fallen back."""
    config = load_launch_config(launch_plan.config_path)
    hosts = config.launch.hosts
    if hosts is not None:
        described = hosts.model_dump(mode="json", exclude={"fallback"})
        return {"kind": "network namespaces", "description": launch_plan.link, **described}
    if config.launch.device == "cpu":
        return {"kind": "loopback", "description": "loopback, its rate is not limited"}
    return {"kind": "cuda", "description": launch_plan.link}


def _launch(
    launch_plan: LaunchPlan,
    start: Progress,
    on_progress: Callable[[Progress], None],
    on_note: Callable[[str], None],
) -> RunRecord:
    def on_line(rank: int, line: str) -> None:
        found = _ITERATION.search(line)
        if found is not None:
            on_progress(dataclasses.replace(start, iteration=int(found[1]), step_time_ms=float(found[2])))

    config = launch_plan.config
    try:
        execute(launch_plan, on_line=on_line, on_note=on_note)
        return read_run(launch_plan.run_dir, config.world_size, config.train.iterations)
    except (RunError, NetlabError, ArtefactError) as error:
        raise LaunchFailedError(f"round {start.round} of {start.rounds}, {config.name}: {error}") from error
