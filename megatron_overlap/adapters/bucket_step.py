"""The distributed optimizer's step, bucket by bucket: parameters leave while the optimizer works on the next ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_overlap.adapters.data_parallel import DataParallelAdapter
from megatron_overlap.session import Session

Method = Callable[..., Any]

# Each parameter's state is its own there, the number of its steps too: steps over disjoint parts are the whole step.
_STEPS_EACH_ALONE = (torch.optim.Adam, torch.optim.AdamW)

# Lists in the optimizer that run in parallel: the model's parameters and the shards that are stepped for them.
_MODEL_AND_SHARD = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
)


def step_with_ready_grads(original: Method, session: Session) -> Method:
    """Replacement of `MixedPrecisionOptimizer.step_with_ready_grads`, for `DistributedOptimizer`.

    Equals the original, bit by bit: steps the own shards and writes them to the model's parameters. The buckets that
    the next forward needs first are stepped first, and each one's all-gather begins at once. Megatron begins the first
    one in the next forward, and each of the others when the one before it has landed.

    It runs after the gradients were clipped, which needs all of them, and not at all where fp16's loss scaling
    skips a step.
    """
    adapter = DataParallelAdapter.of(session)

    @functools.wraps(original)
    def step(self: Any) -> bool:
        if not isinstance(self, DistributedOptimizer) or not _gathers_in_forward(self):
            return original(self)
        groups = _in_forward_order(self)
        if type(self.optimizer) not in _STEPS_EACH_ALONE:
            done = original(self)
            adapter.count_step("whole step, then all gathers")
            for bucket_group in groups:
                _begin_gather(bucket_group)
            return done
        done = True
        for bucket_group in groups:
            with _only(self, bucket_group.buckets):
                done &= original(self)
            adapter.count_step("step of a bucket, then its gather")
            _begin_gather(bucket_group)
        return done

    return step


def _gathers_in_forward(optimizer: Any) -> bool:
    """Whether Megatron would gather in the next forward what is stepped now, and nothing else is in the way."""
    config = optimizer.ddp_config
    return (
        not optimizer.is_stub_optimizer
        and config.overlap_param_gather
        and not config.use_megatron_fsdp
        # The pipeline schedule, or Megatron's own step, begins the gathers.
        and not config.align_param_gather
        and not optimizer.config.overlap_param_gather_with_optimizer_step
        # Quantized parameters are written with collectives of their own, or later.
        and not config.fp8_param_gather
        and not getattr(config, "fp4_param_gather", False)
        and not getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False)
    )


def _in_forward_order(optimizer: Any) -> list[Any]:
    """The bucket groups of this optimizer's buffers, those of the first layers first.

    The model registers parameters in the order in which forward uses them, as Megatron's own chain of gathers assumes.
    """
    own = {id(bucket) for buffer in optimizer.buffers for bucket in buffer.buckets}
    ordered = []
    for chunk in optimizer.model_chunks:
        position = {parameter: index for index, parameter in enumerate(chunk.module.parameters())}
        groups = [
            bucket_group
            for bucket_group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
            if all(id(bucket) in own for bucket in bucket_group.buckets)
        ]
        ordered += sorted(groups, key=lambda one: min(position[parameter] for parameter in one.params))
    found = {id(bucket) for bucket_group in ordered for bucket in bucket_group.buckets}
    assert found == own, "a bucket of the optimizer belongs to no bucket group of its model"
    return ordered


def _begin_gather(bucket_group: Any) -> None:
    if bucket_group.param_gather_handle is not None:
        # Stepped twice with no forward in between.
        bucket_group.param_gather_handle.wait()
        bucket_group.param_gather_handle = None
    bucket_group.start_param_sync()


@contextmanager
def _only(optimizer: Any, buckets: list[Any]) -> Iterator[None]:
    """Meanwhile the optimizer, and Megatron's copies to the model, know the parameters of these buckets alone."""
    wanted = {parameter for bucket in buckets for parameter in bucket.params}
    inner = optimizer.optimizer.param_groups
    saved_inner = [group["params"] for group in inner]
    saved = {name: getattr(optimizer, name) for pair in _MODEL_AND_SHARD for name in pair}
    shards: set[torch.Tensor] = set()
    for model_name, shard_name in _MODEL_AND_SHARD:
        kept = [
            [(model, shard) for model, shard in zip(models, own, strict=True) if model in wanted]
            for models, own in zip(saved[model_name], saved[shard_name], strict=True)
        ]
        setattr(optimizer, model_name, [[model for model, _ in group] for group in kept])
        setattr(optimizer, shard_name, [[shard for _, shard in group] for group in kept])
        shards.update(shard for group in kept for _, shard in group)
    for group, parameters in zip(inner, saved_inner, strict=True):
        group["params"] = [parameter for parameter in parameters if parameter in shards]
    try:
        yield
    finally:
        for group, parameters in zip(inner, saved_inner, strict=True):
            group["params"] = parameters
        for name, groups in saved.items():
            setattr(optimizer, name, groups)
