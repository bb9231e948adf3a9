"""Time of the passes of generation: a prefill of one prompt, and a decode of one token for each request of a batch.

Neither has a backward pass. A decode reads the keys and values of its requests from a cache.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from megatron_overlap.autotune.cost_model import CostModel
from megatron_overlap.tools.simulate.job import Job
from megatron_overlap.tools.simulate.layer import Layers
from megatron_overlap.tools.simulate.linear import LinearOverlap, Method

PROMPTS = (128, 512, 2048, 8192)
BATCHES = (1, 8, 64)


def generation_us(
    job: Job, model: CostModel, methods: Mapping[str, Method | Literal["auto"]]
) -> dict[str, dict[str, float]]:
    """Microseconds of one layer by the names of `methods`: `prefill N` of N tokens, and `decode N` of N requests.

    Every request of a decode has `job.seq_length` tokens in the cache. The inference engines of Megatron pad the rows
    of a pass to a multiple of the tensor parallel size under sequence parallelism.
    """
    passes = {f"prefill {tokens}": (tokens, 0) for tokens in PROMPTS}
    passes |= {f"decode {batch}": (batch, job.seq_length) for batch in BATCHES}
    return {
        text: {
            name: Layers(_alone(job, rows, method), model, forward_only=True, cached=cached).forward.time_us
            for name, (rows, cached) in passes.items()
        }
        for text, method in methods.items()
    }


def _alone(job: Job, rows: int, method: Method | Literal["auto"]) -> Job:
    """The tensor parallel ranks of one replica, with one sequence of `rows` tokens."""
    multiple = job.tensor if job.sequence_parallel else 1
    experts = job.experts
    replicas = 1 if experts is None else max(1, experts.parallel // job.tensor)
    return replace(
        job,
        seq_length=-(-rows // multiple) * multiple,
        micro_batch_size=1,
        global_batch_size=replicas,
        data=replicas,
        context=1,
        tensor_overlap=LinearOverlap(method, copies=job.tensor_overlap.copies),
        split="none",
    )
