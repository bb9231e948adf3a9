"""All layouts of a job on as many ranks that fit in memory, fastest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_overlap.autotune.cost_model import CostModel
from megatron_overlap.tools.simulate.job import Job
from megatron_overlap.tools.simulate.memory import Memory, memory_of
from megatron_overlap.tools.simulate.step import StepTime, simulate_step


@dataclass(frozen=True)
class Candidate:
    """A layout, what it takes and what it needs."""

    job: Job
    time: StepTime
    memory: Memory


@dataclass(frozen=True)
class Sweep:
    """What a sweep found.

    Attributes:
        best: fastest first.
        tried: layouts that are possible at all.
        too_large: those of them that do not fit in memory.
    """

    best: Sequence[Candidate]
    tried: int
    too_large: int


def sweep(job: Job, model: CostModel, *, keep: int = 10, context: bool = True) -> Sweep:
    """Simulate every layout of the job's model, batch and number of ranks.

    Tensor and context ranks stay inside a node in powers of two; a pipeline is plain, or interleaved with one layer a
    chunk or with two. Micro-batches are as the job has them.

    Args:
        job: gives everything but the layout.
        model: what things cost, and how much memory there is.
        keep: how many layouts to return.
        context: also try context parallelism.
    """
    room = model.profile.device.memory_gib.value
    found: list[Candidate] = []
    tried = too_large = 0
    for layout in layouts(job, model.profile.devices_per_node, context=context):
        tried += 1
        memory = memory_of(layout)
        if memory.total_gib > room:
            too_large += 1
            continue
        found.append(Candidate(layout, simulate_step(layout, model), memory))
    found.sort(key=lambda candidate: candidate.time.step_us)
    return Sweep(found[:keep], tried, too_large)


def layouts(job: Job, per_node: int, *, context: bool = True) -> Iterator[Job]:
    """Every layout of as many ranks that is possible at all."""
    world, layers = job.world_size, job.model.num_layers
    for tensor in _powers(per_node):
        for ring in _powers(per_node // tensor if context else 1):
            for pipeline in (size for size in range(1, layers + 1) if layers % size == 0):
                data, rest = divmod(world, tensor * ring * pipeline)
                if rest or not data:
                    continue
                for virtual in _chunks(layers // pipeline) if pipeline > 1 else (1,):
                    try:
                        yield replace(
                            job,
                            tensor=tensor,
                            context=ring,
                            pipeline=pipeline,
                            data=data,
                            virtual=virtual,
                            sequence_parallel=tensor > 1,
                        )
                    except ValueError:  # heads, rows or the batch cannot be split so
                        continue


def _chunks(layers: int) -> Sequence[int]:
    return sorted({1, layers, layers // 2 if layers % 2 == 0 else 1})


def _powers(largest: int) -> Iterator[int]:
    size = 1
    while size <= largest:
        yield size
        size *= 2
