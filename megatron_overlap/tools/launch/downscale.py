"""A launch config folded to what a machine without a GPU can run in a minute: a config in, a config out.

Nothing of the machine is looked at but whether the data files are here.

The rule, in order:

1. Ranks: every parallel size above 1 becomes 2. While that is more ranks than allowed, one kind goes to 1: data first,
   then pipeline, then context; tensor last. Context is 1 too where only TransformerEngine's attention has it.
2. Model: one layer a pipeline stage and at least two; heads and key/value heads in their proportion, 32 wide, as few
   as the tensor ranks allow; the MLP as many times wider than the model as it was.
3. Training: 3 steps of one sequence (128 tokens) a micro-batch, as many micro-batches as before but at most 2 a stage;
   no checkpoint, no evaluation. Data is made up where the files are not here; only then the vocabulary is 1000.
4. What needs a GPU is replaced or left out. All other Megatron arguments stay, word by word.

Every difference to the config is in the list of changes: nothing is folded that is not shown.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron_overlap.config import ConfigError, LaunchConfig
from megatron_overlap.config.loading import missing_inputs
from megatron_overlap.config.megatron_args import CPU_SWITCHES, flags_in

ITERATIONS = 3
SEQ_LENGTH = 128
HEAD_SIZE = 32
VOCAB_SIZE = 1000

# Megatron arguments that need a GPU, or a library that does; by how they begin.
NEEDS_GPU = (
    "--fp8",
    "--fp4",
    "--tp-comm",
    "--te-",
    "--use-flash-attn",
    "--attention-backend",
    "--cross-entropy-loss-fusion",
    "--cross-entropy-fusion-impl",
    "--moe-grouped-gemm",
    "--moe-permute-fusion",
    "--moe-router-fusion",
    "--moe-enable-deepep",
    "--cuda-graph",
    "--enable-cuda-graph",
    "--external-cuda-graph",
    "--use-nccl-ub",
    "--nccl-communicator-config-path",
    "--high-priority-stream-groups",
    "--use-te-",
    "--use-fused-weighted-squared-relu",
    "--use-torch-fsdp2",
    "--use-megatron-fsdp",
    "--delay-wgrad-compute",
)
_WIDTHS = ("--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size")
_STAGES = "--num-layers-per-virtual-pipeline-stage"


@dataclass(frozen=True)
class Change:
    """One key or argument that a rehearsal has otherwise."""

    key: str
    was: str
    now: str
    why: str


def fold(cfg: LaunchConfig, max_ranks: int) -> tuple[LaunchConfig, list[Change]]:
    """Fold a config.

    Args:
        cfg: any launch config.
        max_ranks: ranks that this machine can hold.

    Returns:
        the folded config, named `NAME_rehearsal`, and what differs, one entry each.
    """
    data_is_here = cfg.data.kind != "mock" and not any(p.key == "data.path" for p in missing_inputs(cfg))
    if cfg.overlap.varlen.method != "none" and not data_is_here:
        remedy = "overlap.varlen reads documents, which cannot be made up; python scripts/prepare_data.py makes some"
        raise ConfigError(cfg.name, "data.path", cfg.data.path, remedy)
    sizes = _fold_ranks(cfg, max_ranks)
    args, dropped = _fold_args(cfg, sizes)
    dump = cfg.model_dump()
    micro = min(cfg.num_microbatches, 2 * sizes["pipeline"])
    train = _fold_train(cfg)
    model = _fold_model(cfg, sizes, keep_vocabulary=data_is_here or _has_tokenizer(cfg), stages=_stages(args))
    folded: dict[str, Any] = {
        **dump,
        "name": f"{cfg.name}_rehearsal",
        "model": {**dump["model"], "preset": None, **model},
        "parallel": {
            **dump["parallel"],
            **{kind: sizes[kind] for kind in ("tensor", "context", "pipeline")},
            "sequence_parallel": cfg.parallel.sequence_parallel and sizes["tensor"] > 1,
        },
        "train": {**dump["train"], **train, "global_batch_size": train["micro_batch_size"] * micro * sizes["data"]},
        "data": {**dump["data"], "workers": 0} if data_is_here else {"kind": "mock", "workers": 0},
        "launch": {
            **dump["launch"],
            "device": "cpu",
            "nodes": 1,
            "ranks_per_node": math.prod(sizes.values()),
            "hosts": None,
            "threads_per_rank": 1,
        },
        "overlap": {**dump["overlap"], "tensor": {**dump["overlap"]["tensor"], "method": _rehearsed(cfg)}},
        "megatron_args": args,
    }
    result = LaunchConfig.model_validate(folded)
    return result, [*_differences(cfg, result, sizes), *_choice(cfg), *dropped, *_kernels(cfg)]


def _rehearsed(cfg: LaunchConfig) -> str:
    """On so small a model Megatron's own path is the fastest, and a choice would rehearse nothing."""
    return "p2p" if cfg.overlap.tensor.method == "auto" else cfg.overlap.tensor.method


def _choice(cfg: LaunchConfig) -> list[Change]:
    if cfg.overlap.tensor.method != "auto":
        return []
    return [Change("overlap.tensor.method", "auto", "p2p", "so small a model would choose Megatron's own path")]


def _fold_ranks(cfg: LaunchConfig, max_ranks: int) -> dict[str, int]:
    parallel = cfg.parallel
    full = {
        "tensor": parallel.tensor,
        "context": parallel.context,
        "pipeline": parallel.pipeline,
        "data": cfg.data_parallel_size,
    }
    sizes = {kind: min(size, 2) for kind, size in full.items()}
    if cfg.overlap.ulysses.method == "none" and cfg.overlap.varlen.method == "none":
        sizes["context"] = 1  # Megatron's local attention, which TransformerEngine's is replaced by, has none
    for kind in ("data", "pipeline", "context", "tensor"):
        if math.prod(sizes.values()) > max_ranks:
            sizes[kind] = 1
    return sizes


def _fold_model(cfg: LaunchConfig, sizes: Mapping[str, int], *, keep_vocabulary: bool, stages: int) -> dict[str, Any]:
    model, tensor = cfg.model, sizes["tensor"]
    per_group = model.num_attention_heads // model.num_query_groups
    groups = tensor if per_group > 1 else 2 * tensor
    heads = groups * min(per_group, 4)
    hidden = heads * HEAD_SIZE
    # Context parallelism over heads needs as many key/value heads as it has ranks.
    groups, heads, hidden = (value * sizes["context"] for value in (groups, heads, hidden))
    step = 8 * tensor
    return {
        "num_layers": max(2, sizes["pipeline"]) * stages,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": HEAD_SIZE if model.kv_channels is not None else None,
        "ffn_hidden_size": max(step, hidden * model.ffn_hidden_size // model.hidden_size // step * step),
        "vocab_size": model.vocab_size if keep_vocabulary else min(model.vocab_size, VOCAB_SIZE),
        "max_position_embeddings": min(model.max_position_embeddings, SEQ_LENGTH),
    }


def _fold_train(cfg: LaunchConfig) -> dict[str, Any]:
    train = cfg.train
    return {
        "seq_length": min(train.seq_length, SEQ_LENGTH),
        "micro_batch_size": 2 if cfg.overlap.tensor.split == "batch" else 1,
        "iterations": ITERATIONS,
        "lr_decay_iterations": None,
        "lr_warmup_iterations": min(train.lr_warmup_iterations, 1),
        "precision": "bf16" if train.precision == "fp16" else train.precision,
        "gradient_accumulation_fusion": None,
        "transformer_impl": "local",
        "eval_iterations": 0,
        "log_interval": 1,
        "save": None,
        "save_interval": None,
        "load": None,
    }


def _fold_args(cfg: LaunchConfig, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], list[Change]]:
    """Megatron's further arguments, flag by flag with its values."""
    args = list(cfg.megatron_args)
    changes: list[Change] = []
    starts = [index for index, _ in flags_in(args)]
    kept = args[: starts[0]] if starts else args
    for start, end in itertools.pairwise([*starts, len(args)]):
        words = args[start:end]
        flag, equals, value = words[0].partition("=")
        values = [value] if equals else words[1:]
        now, why = _fold_arg(cfg, flag, values, sizes)
        if now == values:
            kept += words
            continue
        shown = "left out" if now is None else " ".join([flag, *now])
        changes.append(Change("megatron_args", " ".join(words), shown, why))
        kept += [] if now is None else [flag, *now]
    return tuple(kept), changes


def _fold_arg(
    cfg: LaunchConfig, flag: str, values: Sequence[str], sizes: Mapping[str, int]
) -> tuple[Sequence[str] | None, str]:
    """The values a flag gets, None to leave it out, and why."""
    if flag.startswith(NEEDS_GPU):
        return None, "needs a GPU"
    if flag in _WIDTHS:
        width = int(values[0]) * _hidden(cfg, sizes) // cfg.model.hidden_size
        return [str(max(16, width // 16 * 16))], "as the model"
    if flag == "--expert-model-parallel-size":
        ranks = math.prod(sizes.values()) // sizes["pipeline"]
        return [str(min(int(values[0]), 2, ranks))], _WHY["parallel"]
    if flag == "--expert-tensor-parallel-size":
        return [str(min(int(values[0]), sizes["tensor"]))], "as parallel.tensor"
    if flag == _STAGES:
        return (["1"], "one layer a stage") if sizes["pipeline"] > 1 else (None, "needs pipeline ranks")
    return values, ""


def _hidden(cfg: LaunchConfig, sizes: Mapping[str, int]) -> int:
    return int(_fold_model(cfg, sizes, keep_vocabulary=True, stages=1)["hidden_size"])


def _stages(args: tuple[str, ...]) -> int:
    """Layers a pipeline rank must have: two where its stages are interleaved."""
    return 2 if any(flag == _STAGES for _, flag in flags_in(args)) else 1


def _has_tokenizer(cfg: LaunchConfig) -> bool:
    return any(flag == "--tokenizer-type" for _, flag in flags_in(cfg.megatron_args))


_WHY: Mapping[str, str] = MappingProxyType(
    {
        "parallel": "every size above 1 becomes 2",
        "model": "as small as the layout allows",
        "train.seq_length": "short",
        "train.iterations": "enough to see the optimizer's work",
        "train.global_batch_size": "at most 2 micro-batches a stage",
        "train.precision": "the CPU has no fp16",
        "train.transformer_impl": "TransformerEngine needs a GPU",
        "train.gradient_accumulation_fusion": "apex's kernel needs a GPU",
        "data": "the files are not here",
        "launch": "on the CPUs of this machine",
    }
)
# Preset and derived widths follow from others; loader processes and threads are no part of the training.
_SILENT = ("model.preset", "model.max_position_embeddings", "data.workers", "launch.threads_per_rank", "launch.slurm")


def _differences(cfg: LaunchConfig, folded: LaunchConfig, sizes: Mapping[str, int]) -> Iterator[Change]:
    yield Change("ranks", str(cfg.world_size), str(folded.world_size), "on the CPUs of this machine")
    if sizes["data"] != cfg.data_parallel_size:
        why = _WHY["parallel"] if sizes["data"] > 1 else "too many ranks for this machine"
        yield Change("data parallel", str(cfg.data_parallel_size), str(sizes["data"]), why)
    for section in ("parallel", "model", "train", "data", "launch"):
        before, after = getattr(cfg, section).model_dump(), getattr(folded, section).model_dump()
        for name, was in before.items():
            key, now = f"{section}.{name}", after[name]
            if was == now or key in _SILENT or name in ("nodes", "ranks_per_node"):
                continue
            why = _WHY.get(key, _WHY.get(section, "not for a rehearsal"))
            if key == "parallel.context" and now == 1:
                why = "the local attention has no context parallelism"
            elif section == "parallel" and now == 1:
                why = "too many ranks for this machine"
            yield Change(key, _shown(was), _shown(now), why)


def _kernels(cfg: LaunchConfig) -> Iterator[Change]:
    if cfg.launch.device == "cuda":
        yield Change("fused kernels", "Megatron's choice", " ".join(CPU_SWITCHES), "need a GPU")


def _shown(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
