"""What a step has after its last gradient: norm and clipping, the update of a rank's shard, sums over all ranks."""

from __future__ import annotations

from megatron_overlap.autotune.cost_model import CLIP_BYTES, CostModel, Link
from megatron_overlap.tools.simulate.job import Job

_STEP_SUMS = 5  # small all-reduces of a step: tokens twice, overflow, norm, loss
# Calls of torch in a step beside the micro-batches, counted as those of a layer: by parameter tensor, and the rest.
_TENSOR_CALLS = 19
_STEP_CALLS = 60


def optimizer_us(job: Job, model: CostModel, stage: int) -> float:
    """What one rank of a pipeline stage takes.

    Args:
        job: what is trained.
        model: what things cost; what its profile adds to a step is in it.
        stage: whose parameters.
    """
    parameters = job.stage_parameters(stage)
    shard = parameters / (job.data * job.context if job.distributed_optimizer else 1)
    passed = model.memory_us(CLIP_BYTES[0] * parameters + CLIP_BYTES[1] * shard, "clip")
    update = model.memory_us(shard * model.profile.device.optimizer_bytes.value, "update")
    world: Link = model.link(job.world_size)
    rounds = 2 * max(0, (job.world_size - 1).bit_length())  # a tree, up and down
    calls = model.calls_us(_TENSOR_CALLS * job.stage_tensors(stage) + _STEP_CALLS, loop=True)
    # Ranks meet when each has done its part.
    late = model.late_us(passed + update) if job.world_size > 1 else 0.0
    sums = late + _STEP_SUMS * rounds * world.latency_us + _norm_gradients_us(job, model)
    return passed + update + calls + sums + model.profile.device.step_ms.value * 1e3


def _norm_gradients_us(job: Job, model: CostModel) -> float:
    """Sequence parallelism: gradients of the norms, fp32, are summed over the tensor ranks once a step."""
    if job.tensor == 1 or not job.sequence_parallel:
        return 0.0
    norms = job.model.hidden_size * (2 if job.model.normalization == "LayerNorm" else 1)
    count = norms * (2 * job.model.num_layers / job.pipeline + 1)
    return model.collective_us("all_reduce", 4.0 * count, model.link(job.tensor))
