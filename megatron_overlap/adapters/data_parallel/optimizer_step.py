"""The distributed optimizer's step by buckets: the all-gather of a bucket runs during the step of the next ones."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_overlap.adapters.data_parallel.bucket_sync import DataParallelAdapter
from megatron_overlap.adapters.wrapping import Method
from megatron_overlap.session import Session

# The state and the update of each parameter are its own, so steps over disjoint subsets equal the whole step. The step
# count of torch's optimizers belongs to a parameter too; that of TransformerEngine's and apex's belongs to a group.
_STEPPED_BY_BUCKET = (
    (torch.optim.Adam.__module__, "Adam"),
    (torch.optim.AdamW.__module__, "AdamW"),
    ("transformer_engine.pytorch.optimizers.fused_adam", "FusedAdam"),
    ("apex.optimizers.fused_adam", "FusedAdam"),
)

# Lists of the optimizer that its copy to the model reads; and `params` of each group of the inner optimizer.
_LISTS = ("model_float16_groups", "shard_fp32_from_float16_groups", "model_fp32_groups", "shard_fp32_groups")
_INNER = "params"


def step_with_ready_grads(original: Method, session: Session) -> Method:
    """Replacement of `MixedPrecisionOptimizer.step_with_ready_grads`, for `DistributedOptimizer`.

    Equals the original bit by bit. The buckets of the first layers are stepped first, and the all-gather of each starts
    at once. Megatron starts the first all-gather in the next forward, and each further one after the one before it.
    Megatron calls this function after gradient clipping, and not where fp16 loss scaling skips a step.
    """
    adapter, counters = session.adapter(DataParallelAdapter), session.counters

    def step(self: Any) -> bool:
        if (
            not isinstance(self, DistributedOptimizer)
            or self.is_stub_optimizer
            or self.data_parallel_group.size() == 1  # nothing to gather
            or not self.ddp_config.overlap_param_gather  # the next forward gathers nothing
            or self.ddp_config.use_megatron_fsdp
            or any(adapter.selects_stock(buffer.grad_data) for buffer in self.buffers)
        ):
            return original(self)
        if reason := _unsupported_step_reason(self):
            counters.exclude("step of the distributed optimizer", reason)
            return original(self)
        groups = _in_forward_order(self)
        if not groups:
            return original(self)
        done, inner_groups = True, self.optimizer.param_groups
        whole = {name: getattr(self, name) for name in _LISTS}
        whole[_INNER] = [group["params"] for group in inner_groups]
        before = [group.get("step") for group in inner_groups]
        after, barrier = list(before), self.config.barrier_with_L1_time
        try:
            for bucket_group, part in zip(groups, _parts(self, whole, groups), strict=True):
                _install(self, part)
                # Steps over disjoint parameters count as one: each sees the counts from before all of them.
                _set_step_counts(inner_groups, before)
                done &= original(self)
                for number, group in enumerate(inner_groups):
                    # Some releases do not count a step of a group without parameters.
                    if group.get("step") != before[number]:
                        after[number] = group["step"]
                counters.overlapped("data", "optimizer", "step of a bucket, then its gather", "forward")
                _begin_gather(bucket_group)
                # Barriers of Megatron's timers are for all ranks, and pipeline stages have other numbers of buckets.
                self.config.barrier_with_L1_time = False
        finally:
            self.config.barrier_with_L1_time = barrier
            _set_step_counts(inner_groups, after)
            _install(self, whole)
        if session.step == 0:
            # The loop is not Megatron's: it may copy the parameters, or free their memory, before the next forward.
            for bucket_group in groups:
                bucket_group.param_gather_handle.wait()
        return done

    return step


def _unsupported_step_reason(optimizer: Any) -> str | None:
    """The reason against a step by buckets; None if it is supported."""
    config, settings, inner = optimizer.ddp_config, optimizer.config, type(optimizer.optimizer)
    quantizing = "fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"
    reasons = {
        "the pipeline schedule starts the all-gathers (align_param_gather)": config.align_param_gather,
        "Megatron's step starts the all-gathers": settings.overlap_param_gather_with_optimizer_step,
        "Megatron clips weights after the step (qk_clip)": getattr(optimizer.model_chunks[0].config, "qk_clip", False),
        "copies from the host may be in flight after the step (optimizer_cpu_offload)": settings.optimizer_cpu_offload,
        "quantized parameters are written by other collectives or later (fp8, fp4, mxfp8)": any(
            getattr(config, name, False) for name in quantizing
        ),
        f"a step of {inner.__module__}.{inner.__name__} over some parameters may differ from the whole step": (
            (inner.__module__, inner.__name__) not in _STEPPED_BY_BUCKET
        ),
        "a CUDA graph holds the whole step: FusedAdam(capturable=True)": (
            inner.__name__ == "FusedAdam" and getattr(optimizer.optimizer, "capturable", False)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _set_step_counts(inner_groups: list[dict[str, Any]], counts: list[Any]) -> None:
    for group, count in zip(inner_groups, counts, strict=True):
        if count is not None:
            group["step"] = count
        else:
            group.pop("step", None)


def _in_forward_order(optimizer: Any) -> list[Any]:
    """The bucket groups of this optimizer's buffers, first layers first; empty if another optimizer has some of them.

    The model registers parameters in the order in which forward uses them. Megatron's chain of all-gathers assumes it.
    """
    own = {id(bucket) for buffer in optimizer.buffers for bucket in buffer.buckets}
    ordered = []
    for chunk in optimizer.model_chunks:
        position = {parameter: index for index, parameter in enumerate(chunk.module.parameters())}
        of_chunk = (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
        groups = [one for one in of_chunk if all(id(bucket) in own for bucket in one.buckets)]
        ordered += sorted(groups, key=lambda one: min(position[parameter] for parameter in one.params))
    found = {id(bucket) for bucket_group in ordered for bucket in bucket_group.buckets}
    return ordered if found == own else []


def _begin_gather(bucket_group: Any) -> None:
    if bucket_group.param_gather_handle is not None:
        # Two steps without a forward between them.
        bucket_group.param_gather_handle.wait()
        bucket_group.param_gather_handle = None
    bucket_group.start_param_sync()


type _Lists = dict[str, list[list[Any]]]
"""The lists `_LISTS` and `_INNER` of all parameters, or of one bucket group."""


def _install(optimizer: Any, lists: _Lists) -> None:
    """Makes the optimizer step, and Megatron copy to the model, the parameters of `lists`."""
    for group, parameters in zip(optimizer.optimizer.param_groups, lists[_INNER], strict=True):
        group["params"] = parameters
    for name in _LISTS:
        setattr(optimizer, name, lists[name])


def _parts(optimizer: Any, whole: _Lists, groups: list[Any]) -> list[_Lists]:
    """The lists of `whole`, split by bucket group."""
    parts: list[_Lists] = [{name: [[] for _ in lists] for name, lists in whole.items()} for _ in groups]
    part_of = {parameter: part for one, part in zip(groups, parts, strict=True) for parameter in one.params}
    part_of_shard = {}
    for model_name, shard_name in (_LISTS[:2], _LISTS[2:]):
        for number, (models, shards) in enumerate(zip(whole[model_name], whole[shard_name], strict=True)):
            for model, shard in zip(models, shards, strict=True):
                part = part_of[model]
                part[model_name][number].append(model)
                part[shard_name][number].append(shard)
                part_of_shard[shard] = part
    # The precision-aware optimizer has no fp32 shards: it steps the shards of the model's type.
    for models, shards in zip(optimizer.model_float16_groups, optimizer.shard_float16_groups, strict=True):
        part_of_shard |= {shard: part_of[model] for model, shard in zip(models, shards, strict=True)}
    for number, parameters in enumerate(whole[_INNER]):
        for shard in parameters:
            part_of_shard[shard][_INNER][number].append(shard)
    return parts
