"""Time of a training step: micro-batches of all pipeline stages, parameter all-gathers, gradient reductions, optimizer.

One rank stands for all tensor and context ranks of a stage, and one replica for all replicas, so that each pipeline
stage has one clock. The order of the units of a stage is 1F1B, with and without interleaving (Narayanan et al., arXiv
2104.04473, section 2.2); the number of warm-up passes is that of Megatron-Core.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, chain
from typing import NamedTuple

from megatron_overlap.autotune.cost_model import CLIP_BYTES, CollectiveKind, CostModel
from megatron_overlap.tools.simulate.job import Job
from megatron_overlap.tools.simulate.layer import Layers
from megatron_overlap.tools.simulate.passes import Pass
from megatron_overlap.tools.simulate.split import layer_passes

_MIN_BUCKET_PARAMETERS, _BUCKET_PARAMETERS_PER_RANK = 40e6, 1e6
_STEP_SUMS = 5  # small all-reduces of a step: tokens twice, overflow, norm, loss
# torch calls of a step outside the micro-batches, counted as in layer.py: per parameter tensor, and fixed.
_TENSOR_CALLS, _STEP_CALLS = 19, 60


class Unit(NamedTuple):
    """One pass of one micro-batch through one model chunk of a stage."""

    backward: bool
    chunk: int
    microbatch: int


def order(stages: int, stage: int, chunks: int, microbatches: int) -> list[Unit]:
    """The units of one stage in order.

    With several model chunks, stage s has the chunks s, s + stages, ..., and `microbatches` is a multiple of `stages`.
    """

    def unit(backward: bool, index: int) -> Unit:
        group, position = divmod(index, stages * chunks)
        chunk = position // stages
        return Unit(backward, chunks - 1 - chunk if backward else chunk, group * stages + position % stages)

    total = microbatches * chunks
    forwards, backwards = ([unit(backward, index) for index in range(total)] for backward in (False, True))
    warm_up = stages - stage - 1
    if chunks > 1:
        warm_up = 2 * warm_up + (chunks - 1) * stages
    warm_up = min(warm_up, total)
    steady = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    return [*forwards[:warm_up], *steady, *backwards[total - warm_up :]]


def in_flight(stages: int, stage: int, chunks: int, microbatches: int) -> int:
    """Largest number of chunk activations that a stage saves at the same time."""
    return max(accumulate(-1 if unit.backward else 1 for unit in order(stages, stage, chunks, microbatches)))


@dataclass(slots=True)
class StepTime:
    """Time of a step and its parts in us, averaged over the stages. The parts add up to the step."""

    step_us: float = 0.0
    compute_us: float = 0.0  # layers, embedding, logits and loss without exposed communication
    tensor_us: float = 0.0  # exposed tensor parallel communication
    context_us: float = 0.0  # exposed context parallel communication
    expert_us: float = 0.0  # exposed expert parallel communication
    pipeline_us: float = 0.0  # waits for other stages: pipeline bubble and transfers of activations
    data_us: float = 0.0  # exposed communication of parameters and gradients, and the slowdown of computation by it
    optimizer_us: float = 0.0  # optimizer and the fixed time of a step in the profile


@dataclass(slots=True)
class _Stage:
    number: int
    units: deque[Unit]  # those that have not run
    parameters: dict[int, float]  # when those of each part arrive
    clock: float = 0.0
    time: StepTime = field(default_factory=StepTime)
    ready: dict[int, float] = field(default_factory=dict)  # when the gradient of each part is complete


@dataclass(frozen=True, slots=True)
class _Part:
    """A layer, the embedding or the logits: parameters, those of its experts, a forward and a backward."""

    parameters: float
    forward: Pass
    backward: Pass
    experts: float = 0.0


class _Simulation:
    def __init__(self, job: Job, model: CostModel) -> None:
        self.job, self.model = job, model
        # By stage and model chunk, and by stage.
        self.chunks = [[self._chunk(stage, c) for c in range(job.virtual)] for stage in range(job.pipeline)]
        self.parts = [[part for chunk in chunks for part in chunk] for chunks in self.chunks]
        self.data_link = model.link(job.data * job.context, job.tensor)
        self.expert_link = model.link(job.expert_data, 1 if job.experts is None else job.experts.parallel)
        self.replicated = max(self.data_link.size, self.expert_link.size) > 1
        pipe_link = model.link(job.pipeline, job.tensor * job.context * job.data)
        self.hop_us = model.message_us(job.hidden_elements * model.item_bytes, pipe_link) if job.pipeline > 1 else 0.0

    def _chunk(self, stage: int, chunk: int) -> list[_Part]:
        job, layers = self.job, Layers(self.job, self.model)
        each, table = job.layer_parameters() / job.tensor, job.table_parameters / job.tensor
        parts = [_Part(each, *layer_passes(job, self.model), job.expert_parameters())] * job.layers_per_chunk
        if stage == 0 and chunk == 0:
            parts = [_Part(table, *layers.first), *parts]
        if stage == job.pipeline - 1 and chunk == job.virtual - 1:
            has_table = job.model.untie_embeddings or job.pipeline > 1
            parts = [*parts, _Part(table if has_table else 0.0, *layers.last)]
        return parts

    def buckets(self, stage: int) -> list[list[int]]:
        """Gradient buckets of a stage: parts numbered over its chunks, last part first, of Megatron's bucket size."""
        least: float | None = self.job.bucket_parameters
        if least is None:
            least = max(_MIN_BUCKET_PARAMETERS, _BUCKET_PARAMETERS_PER_RANK * self.data_link.size)
        buckets: list[list[int]] = [[]]
        for part in reversed(range(len(self.parts[stage]))):
            buckets[-1].append(part)
            if sum(self.parts[stage][index].parameters for index in buckets[-1]) >= least:
                buckets.append([])
        return [bucket for bucket in buckets if bucket]

    def collective_us(self, stage: int, bucket: Sequence[int], *, gradients: bool) -> float:
        """Time of the collectives of a bucket: of its experts, and of its other parameters."""
        parts, item_bytes = self.parts[stage], self.model.item_bytes
        kind: CollectiveKind = "all_gather"
        if gradients:
            kind = "reduce_scatter" if self.job.distributed_optimizer else "all_reduce"
            item_bytes = self.job.gradient_bytes
        sizes = zip(*((parts[k].parameters, parts[k].experts) for k in bucket), strict=True)
        dense, experts = (sum(each) * item_bytes for each in sizes)
        collective_us = self.model.collective_us
        return collective_us(kind, dense, self.data_link) + collective_us(kind, experts, self.expert_link)

    def parameter_times(self, stage: int) -> dict[int, float]:
        """Arrival times of the parameters of each part after the start of their all-gathers, first part first."""
        if not (self.job.distributed_optimizer and self.replicated):
            return {}
        clock, arrived = 0.0, {}
        for bucket in reversed(self.buckets(stage)):
            clock += self.collective_us(stage, bucket, gradients=False)
            arrived.update(dict.fromkeys(bucket, clock))
        return arrived

    def pipeline(self) -> list[_Stage]:
        """Simulate all stages of one replica."""
        job = self.job
        stages = []
        for number in range(job.pipeline):
            units = deque(order(job.pipeline, number, job.virtual, job.num_microbatches))
            # The all-gathers start with the step, or else follow the optimizer.
            stages.append(_Stage(number, units, self.parameter_times(number) if job.data_overlap == "stock" else {}))
        done: dict[tuple[Unit, int] | None, float] = {None: 0.0}
        while any(stage.units for stage in stages):
            num_done = len(done)
            for stage in stages:
                while stage.units and (needed := self._needed(stage.units[0], stage.number)) in done:
                    unit = stage.units.popleft()
                    done[unit, stage.number] = self._run(stage, unit, done[needed])
            assert len(done) > num_done
        return stages

    def _needed(self, unit: Unit, stage: int) -> tuple[Unit, int] | None:
        """The unit that must run first: the same micro-batch in the previous model chunk, or in the next one."""
        before = unit.chunk * self.job.pipeline + stage + (1 if unit.backward else -1)
        if before < 0:
            return None
        if before == self.job.pipeline * self.job.virtual:
            return unit._replace(backward=False), stage
        chunk, other = divmod(before, self.job.pipeline)
        return unit._replace(chunk=chunk), other

    def _run(self, stage: _Stage, unit: Unit, input_arrival: float) -> float:
        """Run a unit on a stage. Returns the time at which its result is in the next stage."""
        spent = stage.time
        spent.pipeline_us += max(0.0, input_arrival - stage.clock)
        stage.clock = max(stage.clock, input_arrival)
        parts = self.chunks[stage.number][unit.chunk]
        first_part = sum(len(chunk) for chunk in self.chunks[stage.number][: unit.chunk])
        last = unit.microbatch == self.job.num_microbatches - 1
        for index in reversed(range(len(parts))) if unit.backward else range(len(parts)):
            run = parts[index].backward if unit.backward else parts[index].forward
            arrival = 0.0 if unit.backward else stage.parameters.get(first_part + index, 0.0)
            spent.data_us += max(0.0, arrival - stage.clock)
            stage.clock = max(stage.clock, arrival) + run.time_us
            spent.compute_us += run.time_us - (run.tensor_us + run.context_us + run.expert_us)
            spent.tensor_us += run.tensor_us
            spent.context_us += run.context_us
            spent.expert_us += run.expert_us
            if unit.backward and last:
                stage.ready[first_part + index] = stage.clock
        arrives = stage.clock
        last_chunk = (0, 0) if unit.backward else (self.job.pipeline - 1, self.job.virtual - 1)
        if self.job.pipeline > 1 and (stage.number, unit.chunk) != last_chunk:
            arrives += self.hop_us
            if self.job.virtual == 1:  # 1F1B without interleaving waits for its message
                spent.pipeline_us += self.hop_us
                stage.clock = arrives
        return arrives

    def gradients(self, stage: _Stage) -> tuple[float, float]:
        """End of the gradient reduction of a stage, and the total time of its collectives."""
        # Without overlap the collectives start after the computation. With overlap a bucket starts when it is complete.
        clock = total = 0.0
        if self.replicated:
            for bucket in self.buckets(stage.number):
                ready = max(stage.ready[part] for part in bucket)
                duration = self.collective_us(stage.number, bucket, gradients=True)
                clock = max(clock, ready if self.job.data_overlap == "stock" else stage.clock) + duration
                total += duration
        return max(clock, stage.clock), total


def simulate_step(job: Job, model: CostModel) -> StepTime:
    """Simulate one training step."""
    simulation = _Simulation(job, model)
    stages = simulation.pipeline()
    link = simulation.data_link
    # Concurrent collectives slow computation down; the clocks of the stages do not include it.
    lost = 1.0 - model.compute_rate("collective", 2 * link.collective_rate) if link.size > 1 else 0.0
    ends = []
    for stage in stages:
        end, took = simulation.gradients(stage)
        gathered = max(stage.parameters.values(), default=0.0)
        hidden = max(0.0, took - (end - stage.clock)) + max(0.0, gathered - stage.time.data_us)
        ends.append(end + lost * hidden)
    trained = max(ends)
    update, gather = max(optimizer_us(job, model, stage) for stage in range(job.pipeline)), 0.0
    if job.data_overlap == "none":
        gather = max(max(simulation.parameter_times(s).values(), default=0.0) for s in range(job.pipeline))
    for stage, end in zip(stages, ends, strict=True):
        stage.time.pipeline_us += trained - end
        stage.time.data_us += end - stage.clock + gather
    means = {f.name: sum(getattr(stage.time, f.name) for stage in stages) / len(stages) for f in fields(StepTime)}
    return StepTime(**means | {"step_us": trained + update + gather, "optimizer_us": update})


def optimizer_us(job: Job, model: CostModel, stage: int) -> float:
    """Time of the optimizer step of one rank of a stage in us, with the fixed time of a step in the profile."""
    parameters = job.stage_parameters(stage)
    shard = job.updated_parameters(stage)
    clip = model.memory_us(CLIP_BYTES[0] * parameters + CLIP_BYTES[1] * shard, "clip")
    update = model.memory_us(shard * model.profile.device.optimizer_bytes.value, "update")
    rounds = 2 * max(0, (job.world_size - 1).bit_length())  # reduction and broadcast over a binary tree
    calls = model.calls_us(_TENSOR_CALLS * job.stage_tensors(stage) + _STEP_CALLS, loop=True)
    # The all-reduces wait for the last rank.
    late = model.late_us(clip + update) if job.world_size > 1 else 0.0
    sums = late + _STEP_SUMS * rounds * model.link(job.world_size).latency_us + _norm_gradients_us(job, model)
    return clip + update + calls + sums + model.profile.device.step_ms.value * 1e3


def _norm_gradients_us(job: Job, model: CostModel) -> float:
    """All-reduce of the fp32 norm gradients over the tensor ranks, once per step with sequence parallelism."""
    if job.tensor == 1 or not job.sequence_parallel:
        return 0.0
    norms = job.model.hidden_size * (2 if job.model.normalization == "LayerNorm" else 1)
    count = norms * (2 * job.model.num_layers / job.pipeline + 1)
    return model.collective_us("all_reduce", 4.0 * count, model.link(job.tensor))
