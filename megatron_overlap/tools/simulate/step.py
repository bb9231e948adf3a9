"""A whole training step: every stage's micro-batches in pipeline order, parameters that arrive, gradients that leave.

Ranks that do the same are folded into one: all tensor and context ranks of a stage, and all replicas. What is left is
one clock per pipeline stage. With `fold=False` every replica has clocks of its own, and collectives wait for the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_overlap.autotune.cost_model import CollectiveKind, CostModel
from megatron_overlap.tools.simulate.job import Job
from megatron_overlap.tools.simulate.layer import Layers
from megatron_overlap.tools.simulate.optimizer import optimizer_us
from megatron_overlap.tools.simulate.pipeline import Unit, order
from megatron_overlap.tools.simulate.rank_skew import Pass

_MIN_BUCKET_PARAMETERS = 40e6
_BUCKET_PARAMETERS_PER_RANK = 1e6


@dataclass(frozen=True, slots=True)
class Slice:
    """Something on the timeline of a stage. `lane` is compute, data (parallel) or pipeline."""

    stage: int
    lane: str
    name: str
    start_us: float
    stop_us: float


@dataclass(frozen=True)
class StepTime:
    """Where the time of a step goes, averaged over the stages; the parts add up to the whole.

    Attributes:
        step_us: the whole step.
        compute_us: layers, embedding, logits and loss, waits for messages inside them left out.
        tensor_us, context_us: waits for tensor and context parallel messages inside the layers.
        pipeline_us: waits for other stages: the bubble, and activations on their way.
        data_us: waits for parameters and gradients, and compute that they slowed down.
        optimizer_us: the optimizer's own work, and what the profile says a step costs beside.
        slices: the timeline of the first replica.
    """

    step_us: float
    compute_us: float
    tensor_us: float
    context_us: float
    pipeline_us: float
    data_us: float
    optimizer_us: float
    slices: tuple[Slice, ...] = ()

    @property
    def exposed_us(self) -> float:
        """All waits."""
        return self.tensor_us + self.context_us + self.pipeline_us + self.data_us


@dataclass(slots=True)
class _Stage:
    units: list[Unit]
    at: int = 0
    clock: float = 0.0
    compute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    waited_pipeline: float = 0.0
    waited_data: float = 0.0
    ready: dict[int, float] = field(default_factory=dict)  # gradient of a part of the stage, by part
    slices: list[Slice] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Part:
    """A layer, or an end of the model: what has parameters and two passes."""

    name: str
    parameters: float
    forward: Pass
    backward: Pass


class _Simulation:
    def __init__(self, job: Job, model: CostModel, keep: bool) -> None:
        self.job, self.model, self.keep = job, model, keep
        self.layers = Layers(job, model)
        self.parts = [[self._chunk(stage, c) for c in range(job.virtual)] for stage in range(job.pipeline)]
        self.data_link = model.link(job.data * job.context, job.tensor)
        self.pipe_link = model.link(job.pipeline, job.tensor * job.context * job.data)
        self.hop_us = model.message_us(self.layers.boundary_bytes, self.pipe_link) if job.pipeline > 1 else 0.0

    def _chunk(self, stage: int, chunk: int) -> list[_Part]:
        job, layers = self.job, self.layers
        each = job.layer_parameters() / job.tensor
        table = job.vocabulary * job.model.hidden_size / job.tensor
        parts = [_Part("layer", each, layers.forward, layers.backward)] * job.layers_per_chunk
        if stage == 0 and chunk == 0:
            parts = [_Part("embedding", table, *layers.first), *parts]
        if stage == job.pipeline - 1 and chunk == job.virtual - 1:
            own = job.model.untie_embeddings or job.pipeline > 1
            parts = [*parts, _Part("logits", table if own else 0.0, *layers.last)]
        return parts

    def buckets(self, stage: int) -> list[list[int]]:
        """Parts of a stage, numbered over its chunks, as gradients leave: last first, joined to Megatron's size."""
        sizes = [part.parameters for chunk in self.parts[stage] for part in chunk]
        own = max(_MIN_BUCKET_PARAMETERS, _BUCKET_PARAMETERS_PER_RANK * self.data_link.size)
        least = own if self.job.bucket_parameters is None else self.job.bucket_parameters
        made: list[list[int]] = [[]]
        for part in reversed(range(len(sizes))):
            made[-1].append(part)
            if sum(sizes[index] for index in made[-1]) >= least:
                made.append([])
        return [bucket for bucket in made if bucket]

    def moved_us(self, stage: int, bucket: Sequence[int], *, gradients: bool) -> float:
        """Time of a bucket's collective."""
        sizes = [part.parameters for chunk in self.parts[stage] for part in chunk]
        count = sum(sizes[index] for index in bucket)
        if not gradients:
            return self.model.collective_us("all_gather", count * self.model.item_bytes, self.data_link)
        kind: CollectiveKind = "reduce_scatter" if self.job.distributed_optimizer else "all_reduce"
        return self.model.collective_us(kind, count * self.job.gradient_bytes, self.data_link)

    def arrivals(self, stage: int) -> tuple[dict[int, float], list[Slice]]:
        """When the parameters of each part are there: gathered first part first, from the start of the step."""
        if not (self.job.distributed_optimizer and self.job.data_overlap == "megatron") or self.data_link.size == 1:
            return {}, []
        clock, there, slices = 0.0, {}, []
        for bucket in reversed(self.buckets(stage)):
            start, clock = clock, clock + self.moved_us(stage, bucket, gradients=False)
            slices.append(Slice(stage, "data", "parameters", start, clock))
            there.update(dict.fromkeys(bucket, clock))
        return there, slices

    def pipeline(self, slow: float) -> list[_Stage]:
        """All stages of one replica; computation takes `slow` times as long."""
        job = self.job
        stages = [_Stage(order(job.pipeline, s, job.virtual, job.num_microbatches)) for s in range(job.pipeline)]
        there = [self.arrivals(stage) for stage in range(job.pipeline)]
        done: dict[tuple[Unit, int], float] = {}
        for stage, (_, slices) in zip(stages, there, strict=True):
            stage.slices += slices
        moved = True
        while moved:
            moved = False
            for number, stage in enumerate(stages):
                while stage.at < len(stage.units):
                    needed = self._needed(stage.units[stage.at], number)
                    if needed is not None and needed not in done:
                        break
                    self._run(number, stage, 0.0 if needed is None else done[needed], there[number][0], done, slow)
                    moved = True
        assert all(stage.at == len(stage.units) for stage in stages)
        return stages

    def _needed(self, unit: Unit, stage: int) -> tuple[Unit, int] | None:
        """What must have run elsewhere before: the same micro-batch in the piece before, or after."""
        pieces = self.job.pipeline * self.job.virtual
        piece = unit.chunk * self.job.pipeline + stage
        before = piece + 1 if unit.backward else piece - 1
        if before < 0:
            return None
        if before == pieces:
            return Unit(False, unit.chunk, unit.microbatch), stage
        chunk, where = divmod(before, self.job.pipeline)
        return Unit(unit.backward, chunk, unit.microbatch), where

    def _run(
        self,
        number: int,
        stage: _Stage,
        input_there: float,
        parameters: dict[int, float],
        done: dict[tuple[Unit, int], float],
        slow: float,
    ) -> None:
        unit = stage.units[stage.at]
        stage.at += 1
        stage.waited_pipeline += max(0.0, input_there - stage.clock)
        stage.clock = max(stage.clock, input_there)
        start = stage.clock
        parts = self.parts[number][unit.chunk]
        first_part = sum(len(chunk) for chunk in self.parts[number][: unit.chunk])
        last = unit.microbatch == self.job.num_microbatches - 1
        for index in reversed(range(len(parts))) if unit.backward else range(len(parts)):
            run = parts[index].backward if unit.backward else parts[index].forward
            arrival = parameters.get(first_part + index, 0.0) if not unit.backward else 0.0
            if arrival > stage.clock:
                stage.waited_data += arrival - stage.clock
                stage.clock = arrival
            waits = run.tensor_us + run.context_us
            stage.clock += (run.time_us - waits) * slow + waits
            stage.compute += (run.time_us - waits) * slow
            stage.tensor += run.tensor_us
            stage.context += run.context_us
            if unit.backward and last:
                stage.ready[first_part + index] = stage.clock
        name = f"{'backward' if unit.backward else 'forward'} {unit.microbatch}"
        if self.keep:
            lane = f"{name}.{unit.chunk}" if self.job.virtual > 1 else name
            stage.slices.append(Slice(number, "compute", lane, start, stage.clock))
        arrives = stage.clock
        if self.job.pipeline > 1 and not self._at_the_end(unit, number):
            arrives += self.hop_us
            if self.keep:
                stage.slices.append(Slice(number, "pipeline", name, stage.clock, arrives))
            if self.job.virtual == 1:  # the plain schedule waits until its message has left
                stage.waited_pipeline += self.hop_us
                stage.clock = arrives
        done[unit, number] = arrives

    def _at_the_end(self, unit: Unit, stage: int) -> bool:
        piece = unit.chunk * self.job.pipeline + stage
        return piece == (0 if unit.backward else self.job.pipeline * self.job.virtual - 1)

    def gradients(self, number: int, replicas: Sequence[_Stage]) -> tuple[float, float, list[Slice]]:
        """When the last gradient of a stage is reduced, how long the collectives took, and when each ran.

        Without overlap they start when everything is computed; with it a bucket leaves when it is complete in every
        replica.
        """
        computed = max(stage.clock for stage in replicas)
        if self.data_link.size == 1:
            return computed, 0.0, []
        clock = total = 0.0
        slices = []
        for bucket in self.buckets(number):
            ready = max(stage.ready[part] for stage in replicas for part in bucket)
            start = max(clock, ready if self.job.data_overlap == "megatron" else computed)
            took = self.moved_us(number, bucket, gradients=True)
            clock, total = start + took, total + took
            slices.append(Slice(number, "data", "gradients", start, clock))
        return max(clock, computed), total, slices


def simulate_step(
    job: Job, model: CostModel, *, fold: bool = True, slow: Sequence[float] = (), timeline: bool = False
) -> StepTime:
    """The time of a step and where it goes.

    Args:
        job: what is trained, and how it is split.
        model: what things cost.
        fold: one replica stands for all.
        slow: how many times as long computation takes in each replica, where they differ; needs `fold=False`.
        timeline: keep the slices.

    Raises:
        ValueError: `slow` does not fit the replicas.
    """
    replicas = 1 if fold else job.data
    if slow and (fold or len(slow) != job.data):
        raise ValueError(f"slow: {len(slow)} factors: give one for each of the {job.data} replicas, and fold=False")
    simulation = _Simulation(job, model, timeline)
    factors = slow or (1.0,) * replicas
    runs = [simulation.pipeline(factor) for factor in factors]
    link = simulation.data_link
    ends, shown, slowed = [], [], []
    for number in range(job.pipeline):
        end, took, slices = simulation.gradients(number, [run[number] for run in runs])
        computed = max(run[number].clock for run in runs)
        gathered = sum(s.stop_us - s.start_us for s in simulation.arrivals(number)[1])
        # Collectives beside computation slow it down: what they take is not seen in the order above.
        lost = 1.0 - model.compute_rate("collective", 2 * link.collective_rate) if link.size > 1 else 0.0
        hidden = max(0.0, took - (end - computed)) + max(0.0, gathered - runs[0][number].waited_data)
        slowed.append(lost * hidden)
        ends.append(end + lost * hidden)
        shown += runs[0][number].slices + slices
    trained = max(ends)
    update = max(optimizer_us(job, model, stage) for stage in range(job.pipeline))
    gather = 0.0
    if job.distributed_optimizer and job.data_overlap == "none":
        gather = max(
            sum(simulation.moved_us(s, bucket, gradients=False) for bucket in simulation.buckets(s))
            for s in range(job.pipeline)
        )
    step = trained + update + gather
    own = runs[0]
    count = len(own)
    data = 0.0
    pipeline = 0.0
    for number, stage in enumerate(own):
        tail = ends[number] - stage.clock
        data += stage.waited_data + tail + gather
        pipeline += stage.waited_pipeline + trained - ends[number]
    return StepTime(
        step_us=step,
        compute_us=sum(stage.compute for stage in own) / count,
        tensor_us=sum(stage.tensor for stage in own) / count,
        context_us=sum(stage.context for stage in own) / count,
        pipeline_us=pipeline / count,
        data_us=data / count,
        optimizer_us=update,
        slices=tuple(shown) if timeline else (),
    )
