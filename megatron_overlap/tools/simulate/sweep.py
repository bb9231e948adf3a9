"""Memory estimate of a layout, and the sweep over all layouts of a job that fit in memory.

The estimate follows Korthikanti et al. (arXiv 2205.05198), section 4, with fused attention, which saves no scores, and
without dropout masks.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from megatron_overlap.autotune.cost_model import ITEM_BYTES, CostModel
from megatron_overlap.tools.simulate.job import Job
from megatron_overlap.tools.simulate.step import StepTime, in_flight, simulate_step

_GIB = 2.0**30
_OPTIMIZER_BYTES = 12  # per parameter: fp32 copy and two moments
_RESERVED_GIB = 4.0  # assumed for the CUDA context, library buffers and fragmentation


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one rank in GiB. The total includes the reserved memory."""

    parameters_and_gradients: float
    optimizer: float
    activations: float
    buffer_pool: float

    @property
    def total(self) -> float:
        return self.parameters_and_gradients + self.optimizer + self.activations + self.buffer_pool + _RESERVED_GIB


def memory_of(job: Job) -> Memory:
    """Memory estimate of the stage with the largest total."""
    return max((_stage(job, stage) for stage in {0, job.pipeline - 1}), key=lambda memory: memory.total)


def _stage(job: Job, stage: int) -> Memory:
    item = ITEM_BYTES[job.precision]
    parameters = job.stage_parameters(stage)
    live = in_flight(job.pipeline, stage, job.virtual, job.num_microbatches)
    activations = live * job.layers_per_chunk * layer_activation_bytes(job)
    if job.recompute in ("full", "needed"):
        # The recomputed layer needs all of its activations.
        activations = live * job.layers_per_chunk * job.hidden_elements * item + layer_activation_bytes(job)
    if stage == job.pipeline - 1:
        # Logits in the training dtype and twice in fp32.
        activations += job.rows * job.vocabulary / job.tensor * (item + 8)
    # Gathered input, partial product and receive buffers of a reduce-scatter.
    buffer_pool = 3 * job.rows * job.model.hidden_size * item if job.tensor > 1 and job.sequence_parallel else 0.0
    return Memory(
        parameters * (item + job.gradient_bytes) / _GIB,
        job.updated_parameters(stage) * (_OPTIMIZER_BYTES if item < 4 else 8) / _GIB,
        activations / _GIB,
        buffer_pool / _GIB,
    )


def layer_activation_bytes(job: Job) -> float:
    """Bytes of the saved activations of one layer for one micro-batch on one rank."""
    model, item = job.model, ITEM_BYTES[job.precision]
    # Inputs of both norms, of QKV and of FC1. Only sequence parallelism shards them.
    outside = 4 * job.hidden_elements * item
    # Queries, keys, values and the attention output; output of FC1 and input of FC2.
    attention = 2 * model.head_size * (model.num_attention_heads + model.num_query_groups)
    ffn, experts = model.ffn_hidden_size, 0.0
    if job.experts is not None:
        # Input and output of each expert row, beside the tensors of its MLP. Tensor ranks share the tokens.
        ffn, experts = job.experts.shape.active_ffn_hidden_size, 2.0 * job.experts.shape.topk * model.hidden_size
    mlp = (3 if model.swiglu else 2) * ffn
    return outside + job.rows * (attention + mlp + experts) * item / job.tensor


class Candidate(NamedTuple):
    job: Job
    time: StepTime
    memory: Memory


def sweep(job: Job, model: CostModel) -> tuple[list[Candidate], int]:
    """Simulate every layout with the model, batch size and number of ranks of the job.

    Tensor and context sizes are powers of two within a node. Pipelines are 1F1B, without interleaving or with one or
    two layers per chunk. The micro-batch size is that of the job. Returns the layouts that fit in memory, fastest
    first, and the number of all.
    """
    capacity = model.profile.device.memory_gib.value
    tried = [(layout, memory_of(layout)) for layout in layouts(job, model.profile.devices_per_node)]
    found = [Candidate(one, simulate_step(one, model), memory) for one, memory in tried if memory.total <= capacity]
    return sorted(found, key=lambda candidate: candidate.time.step_us), len(tried)


def layouts(job: Job, per_node: int) -> Iterator[Job]:
    """Every possible layout with the number of ranks of the job."""
    world, layers = job.world_size, job.model.num_layers
    powers = [2**exponent for exponent in range(per_node.bit_length())]
    stages = [size for size in range(1, layers + 1) if layers % size == 0]
    for tensor, context, pipeline in product(powers, powers, stages):
        data, rest = divmod(world, tensor * context * pipeline)
        if rest or not data or tensor * context > per_node:
            continue
        each = layers // pipeline
        for virtual in sorted({1, each, each // 2 if each % 2 == 0 else 1}) if pipeline > 1 else (1,):
            sizes = {"tensor": tensor, "context": context, "pipeline": pipeline, "data": data, "virtual": virtual}
            with suppress(ValueError):  # heads, rows or the batch are not divisible
                yield replace(job, sequence_parallel=tensor > 1, **sizes)
