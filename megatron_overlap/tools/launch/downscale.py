"""Downscale a launch config so that a machine without a GPU runs it in about a minute.

`docs/launch.md` has the rules. Of the machine this module reads whether the data files and TransformerEngine exist.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_overlap.config import ConfigError, LaunchConfig
from megatron_overlap.config.loading import missing_inputs
from megatron_overlap.config.megatron_args import EXPERT_PARALLEL, REHEARSAL_SWITCHES, UNEVEN_STAGES, flags_in, value_at
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
    """One dotted key, or `megatron_args`, with its values in the config and in the rehearsal."""

    key: str
    before: str
    after: str


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
    small = cfg.model_dump() | {"name": f"{cfg.name}_rehearsal", "megatron_args": args}
    for name in ("tensor", "expert"):
        if small["overlap"][name]["method"] == "auto":  # it would select the stock path on a model this small
            small["overlap"][name]["method"] = "p2p"
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
    changes = [*_differences(cfg, result), *dropped]
    if cfg.launch.device == "cuda":
        changes.append(Change("fused kernels", "Megatron's defaults", " ".join(REHEARSAL_SWITCHES)))
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
        after = _downscaled_arg(cfg, flag, values, sizes)
        if after != values:
            before, group = " ".join(group), [] if after is None else [flag, *after]
            changes.append(Change("megatron_args", before, " ".join(group) or "removed"))
        arguments += group
    return tuple(arguments), changes


def _downscaled_arg(
    cfg: LaunchConfig, flag: str, values: Sequence[str], sizes: Mapping[str, int]
) -> Sequence[str] | None:
    """The values of a flag in the rehearsal; None to remove the flag."""
    if flag.startswith(NEEDS_GPU):
        return None
    if flag in _WIDTHS:
        width = int(values[0]) * _downscaled_model(cfg, sizes)["hidden_size"] // cfg.model.hidden_size
        return [str(max(16, width // 16 * 16))]
    if flag == EXPERT_PARALLEL:
        ranks = math.prod(sizes.values()) // sizes["pipeline"]
        return [str(min(int(values[0]), 2, ranks))]
    if flag == "--expert-tensor-parallel-size":
        return [str(min(int(values[0]), sizes["tensor"]))]
    if flag in _STAGES:
        if sizes["pipeline"] == 1:
            return None
        return ["1"] if flag == _STAGES[0] else ["2"]  # layers per chunk, chunks per stage
    if flag in UNEVEN_STAGES or (flag in _LAYER_PATTERNS and not "".join(values).isdigit()):
        return None  # counts layers of the whole model
    return values


# Keys that follow from others, and keys that do not change the training.
_UNLISTED = (
    *("model.preset", "model.max_position_embeddings", "data.workers"),
    *("launch.nodes", "launch.ranks_per_node", "launch.threads_per_rank", "launch.rehearsal"),
)


def _differences(cfg: LaunchConfig, downscaled: LaunchConfig) -> Iterator[Change]:
    yield Change("ranks", str(cfg.world_size), str(downscaled.world_size))
    if downscaled.data_parallel_size != cfg.data_parallel_size:
        yield Change("data parallel", str(cfg.data_parallel_size), str(downscaled.data_parallel_size))
    for section in ("parallel", "model", "train", "data", "overlap.tensor", "overlap.expert", "launch"):
        before, after = vars(value_at(cfg, section)), vars(value_at(downscaled, section))
        for name, full in before.items():
            key = f"{section}.{name}"
            if full != after[name] and key not in _UNLISTED:
                yield Change(key, _as_yaml(full), _as_yaml(after[name]))


def _as_yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
