"""What a rank needs in memory: an estimate from the shapes, as in Korthikanti et al. (arXiv 2205.05198), section 4.

Activations are counted with fused attention, which keeps no scores, and without dropout masks.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_overlap.autotune.cost_model import ITEM_BYTES
from megatron_overlap.tools.simulate.job import Job
from megatron_overlap.tools.simulate.pipeline import in_flight

_GIB = 2.0**30
_OPTIMIZER_BYTES = 12  # fp32 parameter and two moments
_RESERVED_GIB = 4.0
"""Context, library buffers and fragmentation: assumed."""


@dataclass(frozen=True, slots=True)
class Memory:
    """GiB of one rank, at the stage that needs most."""

    parameters_gib: float
    optimizer_gib: float
    activations_gib: float
    workspace_gib: float

    @property
    def total_gib(self) -> float:
        return self.parameters_gib + self.optimizer_gib + self.activations_gib + self.workspace_gib + _RESERVED_GIB


def memory_of(job: Job) -> Memory:
    """The estimate for the stage with the largest total."""
    return max((_stage(job, stage) for stage in {0, job.pipeline - 1}), key=lambda memory: memory.total_gib)


def _stage(job: Job, stage: int) -> Memory:
    item = ITEM_BYTES[job.precision]
    parameters = job.stage_parameters(stage)
    held = in_flight(job.pipeline, stage, job.virtual, job.num_microbatches)
    activations = held * job.layers_per_chunk * layer_activation_bytes(job)
    if job.recompute in ("full", "needed"):
        # The layer that is being computed again needs all of its own.
        activations = held * job.layers_per_chunk * _hidden_bytes(job) + layer_activation_bytes(job)
    if stage == job.pipeline - 1:
        # Logits in their own type and twice in fp32.
        activations += job.rows * job.vocabulary / job.tensor * (item + 8)
    split = job.data * job.context if job.distributed_optimizer else 1
    # The gathered input, the partial product and what lands of a reduce-scatter.
    buffer_pool = 3 * job.rows * job.model.hidden_size * item if job.tensor > 1 and job.sequence_parallel else 0.0
    gradient = 4 if job.precision != "fp32" else item  # Megatron's main gradients
    return Memory(
        parameters * (item + gradient) / _GIB,
        parameters * (_OPTIMIZER_BYTES if item < 4 else 8) / split / _GIB,
        activations / _GIB,
        buffer_pool / _GIB,
    )


def layer_activation_bytes(job: Job) -> float:
    """What one layer keeps of one micro-batch on one rank until its backward."""
    model, item = job.model, ITEM_BYTES[job.precision]
    # Inputs of both norms, of QKV and of FC1; outside the linear layers they are split only by sequence parallelism.
    outside = 4 * _hidden_bytes(job)
    queries = model.head_size * model.num_attention_heads
    keys = model.head_size * model.num_query_groups
    # Queries, keys, values and the attention's output; FC1's output and FC2's input.
    attention = 2 * queries + 2 * keys
    mlp = (3 if model.swiglu else 2) * model.ffn_hidden_size
    return outside + job.rows * (attention + mlp) * item / job.tensor


def _hidden_bytes(job: Job) -> float:
    split = job.tensor if job.sequence_parallel else 1
    return job.rows * job.model.hidden_size * ITEM_BYTES[job.precision] / split
