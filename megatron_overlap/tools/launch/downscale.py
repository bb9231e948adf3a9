"""Downscale a launch config so that a machine without a GPU runs it in about a minute.

Of the machine it reads whether the data files and TransformerEngine exist. The rules, in order:

1. Ranks: every parallel size above 1 becomes 2. If the product exceeds the limit, sizes become 1 in the order data,
   pipeline, context, tensor; with expert parallelism pipeline before data. Context also becomes 1 if only fused
   attention kernels support it.
2. Model: one layer per pipeline stage and at least two layers. Query heads and key/value heads keep their ratio, have
   32 columns and are as few as the tensor ranks allow. The MLP keeps its ratio to the hidden size.
3. Training: 3 steps, sequences of 128 tokens, one sequence per micro-batch, at most 2 micro-batches per stage,
   no checkpoints and no evaluation. If the data files do not exist, the data is mock data and the vocabulary 1000.
4. Arguments that need a GPU are replaced or removed. All other Megatron arguments are unchanged.

The list of changes names every difference from the config.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_overlap.config import ConfigError, LaunchConfig
from megatron_overlap.config.loading import missing_inputs
from megatron_overlap.config.megatron_args import EXPERT_PARALLEL, REHEARSAL_SWITCHES, UNEVEN_STAGES, flags_in
from megatron_overlap.config.resources import TE_MISSING, transformer_engine_available

ITERATIONS = 3
SEQ_LENGTH = 128
HEAD_SIZE = 32
VOCAB_SIZE = 1000

# Prefixes of Megatron arguments that need a GPU or a library that needs one.
NEEDS_GPU = (
    *("--fp8", "--fp4", "--te-", "--use-te-", "--use-flash-attn", "--attention-backend", "--delay-wgrad-compute"),
    *("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "--use-fused-weighted-squared-relu"),
    *("--moe-grouped-gemm", "--moe-permute-fusion", "--moe-router-fusion", "--moe-enable-deepep"),
    *("--cuda-graph", "--enable-cuda-graph", "--external-cuda-graph", "--use-torch-fsdp2", "--use-megatron-fsdp"),
    *("--tp-comm", "--use-nccl-ub", "--nccl-communicator-config-path", "--high-priority-stream-groups"),
)
_WIDTHS = ("--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size")
_STAGES = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
# Their values name single layers of the whole model; a plain number does not.
_LAYER_PATTERNS = ("--moe-layer-freq", "--linear-attention-freq", "--no-rope-freq", "--window-attn-skip-freq")


class Change(NamedTuple):
    """One dotted key, or `megatron_args`, with its values in the config and in the rehearsal, and the reason."""

    key: str
    before: str
    after: str
    reason: str


def downscale(cfg: LaunchConfig, max_ranks: int) -> tuple[LaunchConfig, list[Change]]:
    """A config for at most `max_ranks` ranks, named `NAME_rehearsal`, and its differences from `cfg`.

    Raises ConfigError if balanced attention has no data files with documents, or the layers need TransformerEngine and
    it is not installed.
    """
    if cfg.train.transformer_impl == "transformer_engine" and not transformer_engine_available():
        raise ConfigError(cfg.name, "train.transformer_impl", "transformer_engine", TE_MISSING)
    has_data = cfg.data.kind != "mock" and not any(p.key == "data.path" for p in missing_inputs(cfg))
    if cfg.overlap.varlen.method != "none" and not has_data:
        remedy = "overlap.varlen needs a document data set; make one with python scripts/prepare_data.py"
        raise ConfigError(cfg.name, "data.path", cfg.data.path, remedy)
    sizes = _downscaled_ranks(cfg, max_ranks)
    args, dropped = _downscaled_args(cfg, sizes)
    small, methods = cfg.model_dump() | {"name": f"{cfg.name}_rehearsal", "megatron_args": args}, list[Change]()
    for name in ("tensor", "expert"):
        if small["overlap"][name]["method"] == "auto":
            small["overlap"][name]["method"] = "p2p"
            reason = "auto selects the stock path on a model this small, and the rehearsal would test nothing"
            methods.append(Change(f"overlap.{name}.method", "auto", "p2p", reason))
    flags = {flag for _, flag in flags_in(args)}
    small["model"] |= _downscaled_model(cfg, sizes) | {"preset": None}
    if flags & {*_STAGES}:
        small["model"]["num_layers"] *= 2  # two layers for each rank of an interleaved pipeline
    if not has_data and "--tokenizer-type" not in flags:
        small["model"]["vocab_size"] = min(cfg.model.vocab_size, VOCAB_SIZE)
    small["parallel"] |= {kind: sizes[kind] for kind in ("tensor", "context", "pipeline")}
    small["parallel"]["sequence_parallel"] = cfg.parallel.sequence_parallel and sizes["tensor"] > 1
    train = cfg.train
    small["train"] |= {
        "seq_length": min(train.seq_length, SEQ_LENGTH),
        "micro_batch_size": 2 if cfg.overlap.tensor.split == "batch" else 1,
        "iterations": ITERATIONS,
        "lr_decay_iterations": None,
        "lr_warmup_iterations": min(train.lr_warmup_iterations, 1),
        "precision": "bf16" if train.precision == "fp16" else train.precision,
        "gradient_accumulation_fusion": None,
        "tp_comm_overlap": False,
        "eval_iterations": 0,
        "log_interval": 1,
        "save": None,
        "save_interval": None,
        "load": None,
    }
    num_microbatches = min(cfg.num_microbatches, 2 * sizes["pipeline"])
    small["train"]["global_batch_size"] = small["train"]["micro_batch_size"] * num_microbatches * sizes["data"]
    small["data"] = small["data"] | {"workers": 0} if has_data else {"kind": "mock", "workers": 0}
    small["launch"] |= {
        "device": "cpu",
        "nodes": 1,
        "ranks_per_node": math.prod(sizes.values()),
        "hosts": None,
        "rehearsal": cfg.launch.rehearsal or cfg.launch.device == "cuda",
        "threads_per_rank": 1,
    }
    result = LaunchConfig.model_validate(small)
    changes = [*_differences(cfg, result, sizes), *methods, *dropped]
    if cfg.launch.device == "cuda":
        changes.append(Change("fused kernels", "Megatron's defaults", " ".join(REHEARSAL_SWITCHES), "need a GPU"))
    return result, changes


def _downscaled_ranks(cfg: LaunchConfig, max_ranks: int) -> dict[str, int]:
    sizes = {kind: min(getattr(cfg.parallel, kind), 2) for kind in ("tensor", "context", "pipeline")}
    sizes["data"] = min(cfg.data_parallel_size, 2)
    if cfg.overlap.ulysses.method == "none" and cfg.overlap.varlen.method == "none":
        sizes["context"] = 1  # the unfused attention of a CPU has no context parallelism
    order = ["data", "pipeline", "context", "tensor"]
    if cfg.expert_parallel_size > 1:
        order[:2] = ["pipeline", "data"]  # replicas share the experts
    for kind in order:
        if math.prod(sizes.values()) > max_ranks:
            sizes[kind] = 1
    return sizes


def _downscaled_model(cfg: LaunchConfig, sizes: Mapping[str, int]) -> dict[str, Any]:
    model, tensor = cfg.model, sizes["tensor"]
    per_group = model.num_attention_heads // model.num_query_groups
    # Ulysses attention needs at least one key/value head per context rank.
    groups = sizes["context"] * (tensor if per_group > 1 else 2 * tensor)
    heads = groups * min(per_group, 4)
    hidden = heads * HEAD_SIZE
    step = 8 * tensor
    return {
        "num_layers": max(2, sizes["pipeline"]),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": HEAD_SIZE if model.kv_channels is not None else None,
        "ffn_hidden_size": max(step, hidden * model.ffn_hidden_size // model.hidden_size // step * step),
        "max_position_embeddings": min(model.max_position_embeddings, SEQ_LENGTH),
    }


def _downscaled_args(cfg: LaunchConfig, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], list[Change]]:
    """`megatron_args` flag by flag, each with its values."""
    args = list(cfg.megatron_args)
    changes: list[Change] = []
    starts = [*(index for index, _ in flags_in(args)), len(args)]
    arguments = args[: starts[0]]
    for start, end in itertools.pairwise(starts):
        group = args[start:end]
        flag, equals, value = group[0].partition("=")
        values = [value] if equals else group[1:]
        after, reason = _downscaled_arg(cfg, flag, values, sizes)
        if after != values:
            before, group = " ".join(group), [] if after is None else [flag, *after]
            changes.append(Change("megatron_args", before, " ".join(group) or "removed", reason))
        arguments += group
    return tuple(arguments), changes


def _downscaled_arg(
    cfg: LaunchConfig, flag: str, values: Sequence[str], sizes: Mapping[str, int]
) -> tuple[Sequence[str] | None, str]:
    """The values of a flag in the rehearsal, None to remove the flag, and the reason."""
    if flag.startswith(NEEDS_GPU):
        return None, "needs a GPU"
    if flag in _WIDTHS:
        width = int(values[0]) * _downscaled_model(cfg, sizes)["hidden_size"] // cfg.model.hidden_size
        return [str(max(16, width // 16 * 16))], "keeps its ratio to model.hidden_size"
    if flag == EXPERT_PARALLEL:
        ranks = math.prod(sizes.values()) // sizes["pipeline"]
        return [str(min(int(values[0]), 2, ranks))], _REASONS["parallel"]
    if flag == "--expert-tensor-parallel-size":
        return [str(min(int(values[0]), sizes["tensor"]))], "at most parallel.tensor"
    if flag in _STAGES:
        number, reason = ("1", "one layer per chunk") if flag == _STAGES[0] else ("2", "two chunks per stage")
        return ([number], reason) if sizes["pipeline"] > 1 else (None, "needs pipeline parallelism")
    if flag in UNEVEN_STAGES or (flag in _LAYER_PATTERNS and not "".join(values).isdigit()):
        return None, "counts layers of the whole model"
    return values, ""


_REASONS: Mapping[str, str] = {
    "parallel": "every size above 1 becomes 2",
    "model": "smallest shape that the layout allows",
    "train.seq_length": "short sequences",
    "train.iterations": "enough steps to include optimizer updates",
    "train.global_batch_size": "at most 2 micro-batches per stage",
    "train.precision": "the CPU does not support fp16",
    "train.gradient_accumulation_fusion": "apex's kernel needs a GPU",
    "train.tp_comm_overlap": "userbuffers need a GPU",
    "data": "the data files do not exist on this machine",
    "launch": "runs on the CPUs of this machine",
}
# Keys that follow from others, and keys that do not change the training.
_UNLISTED = (
    *("model.preset", "model.max_position_embeddings", "data.workers"),
    *("launch.threads_per_rank", "launch.rehearsal", "launch.slurm"),
)


def _differences(cfg: LaunchConfig, downscaled: LaunchConfig, sizes: Mapping[str, int]) -> Iterator[Change]:
    yield Change("ranks", str(cfg.world_size), str(downscaled.world_size), "runs on the CPUs of this machine")
    if sizes["data"] != cfg.data_parallel_size:
        reason = _REASONS["parallel"] if sizes["data"] > 1 else "too many ranks for this machine"
        yield Change("data parallel", str(cfg.data_parallel_size), str(sizes["data"]), reason)
    for section in ("parallel", "model", "train", "data", "launch"):
        before, after = getattr(cfg, section).model_dump(), getattr(downscaled, section).model_dump()
        for name, full in before.items():
            key, small = f"{section}.{name}", after[name]
            if full == small or key in _UNLISTED or name in ("nodes", "ranks_per_node"):
                continue
            reason = _REASONS.get(key, _REASONS.get(section, "not part of a rehearsal"))
            if key == "parallel.context" and small == 1:
                reason = "the unfused attention of a CPU has no context parallelism"
            elif section == "parallel" and small == 1:
                reason = "too many ranks for this machine"
            yield Change(key, _as_yaml(full), _as_yaml(small), reason)


def _as_yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
