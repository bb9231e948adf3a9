"""Combinations of keys of a launch config that cannot run: rules that name the first key to change and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from megatron_overlap.config.errors import Problem, show_value
from megatron_overlap.config.launch import LaunchFields
from megatron_overlap.config.megatron_args import TE_OVERLAP, TE_OVERLAP_ADVICE, flags_in, key_of, value_at

Rule = tuple[object, str, str]
"""Whether the combination is wrong, the dotted key to change, and the remedy."""

# Megatron flags without a key that exclude balanced attention, and the reason.
REFUSED_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "--mtp-num-layers": "multi-token prediction needs the next rows, which other ranks hold",
        "--num-experts": "the auxiliary loss of mixture of experts assumes equal numbers of rows per rank",
        "--hybrid-layer-pattern": "Mamba layers need a rank's rows in the order of the text",
        "--hybrid-override-pattern": "Mamba layers need a rank's rows in the order of the text",
        "--cuda-graph-impl": "CUDA graphs need the same shapes in every step",
        "--enable-cuda-graph": "CUDA graphs need the same shapes in every step",
        "--external-cuda-graph": "CUDA graphs need the same shapes in every step",
        "--window-size": "the plan balances full causal attention",
        "--multi-latent-attention": "its keys and values have different shapes",
        "--reset-position-ids": "positions already restart with every document",
        "--reset-attention-mask": "attention already separates the documents",
        "--dataloader-type": "the plugin loads the documents",
        "--hybrid-context-parallel": "it is an alternative to overlap.varlen",
        "--sft": "it packs sequences itself",
        "--spec": "the plugin sets the core attention of the layer spec",
    }
)


def launch_problems(cfg: LaunchFields) -> Iterator[Problem]:
    """Combinations of keys that cannot run, most basic first."""
    for rules in (
        _model_rules,
        _rank_rules,
        _layout_rules,
        _train_rules,
        _data_rules,
        _batch_overlap_rules,
        _device_rules,
        _slurm_rules,
        _varlen_rules,
        _argument_rules,
    ):
        for is_wrong, key, remedy in rules(cfg):
            if is_wrong:
                yield Problem(key, value_at(cfg, key), remedy)


def _model_rules(cfg: LaunchFields) -> Iterator[Rule]:
    model, heads = cfg.model, cfg.model.num_attention_heads
    yield (
        model.kv_channels is None and model.hidden_size % heads,
        "model.hidden_size",
        f"must be a multiple of model.num_attention_heads {heads}, or set model.kv_channels",
    )
    yield (heads % model.num_query_groups, "model.num_query_groups", f"must divide model.num_attention_heads {heads}")
    yield (
        model.rotary and model.head_size % 2,
        "model.rotary",
        f"needs an even head size, not {model.head_size}; set model.kv_channels",
    )
    yield (
        cfg.train.seq_length > model.max_position_embeddings,
        "train.seq_length",
        f"must not exceed model.max_position_embeddings {model.max_position_embeddings}",
    )


def _rank_rules(cfg: LaunchFields) -> Iterator[Rule]:
    parallel, launch = cfg.parallel, cfg.launch
    hosts, per_node, size = launch.hosts, launch.ranks_per_node, parallel.model_size
    yield (
        hosts is not None and per_node is not None,
        "launch.ranks_per_node",
        "launch.hosts.ranks_per_host sets it; remove this key",
    )
    yield hosts is not None and launch.nodes != 1, "launch.nodes", "launch.hosts are on one node; use 1"
    ranks_key = "launch.nodes" if per_node is None else "launch.ranks_per_node"
    yield (
        cfg.world_size % size,
        ranks_key if hosts is None else "launch.hosts.hosts",
        f"{cfg.world_size} ranks cannot be split by parallel.tensor x context x pipeline = "
        f"{parallel.tensor} x {parallel.context} x {parallel.pipeline}; use a multiple of {size} ranks",
    )


def _layout_rules(cfg: LaunchFields) -> Iterator[Rule]:
    parallel, model, seq_length = cfg.parallel, cfg.model, cfg.train.seq_length
    tensor, context = parallel.tensor, parallel.context
    yield (
        parallel.sequence_parallel and tensor == 1,
        "parallel.sequence_parallel",
        "needs parallel.tensor of 2 or more; use false with tensor 1",
    )
    for name in ("num_attention_heads", "num_query_groups", "hidden_size", "ffn_hidden_size"):
        yield getattr(model, name) % tensor, f"model.{name}", f"must be a multiple of parallel.tensor {tensor}"
    yield (
        model.num_layers % parallel.pipeline,
        "model.num_layers",
        f"must be a multiple of parallel.pipeline {parallel.pipeline}",
    )
    yield (
        context > 1 and seq_length % (2 * context),
        "train.seq_length",
        f"must be a multiple of 2 x parallel.context = {2 * context}",
    )
    yield (
        parallel.sequence_parallel and seq_length % (tensor * context),
        "train.seq_length",
        f"must be a multiple of parallel.tensor x parallel.context = {tensor * context} "
        "with parallel.sequence_parallel",
    )
    if context > 1 and cfg.overlap.varlen.method == "none":
        yield from _context_rules(cfg)
    elif context == 1:
        method = cfg.overlap.ulysses.method
        yield method == "p2p", "overlap.ulysses.method", "needs parallel.context of 2 or more; use auto or none"


def _context_rules(cfg: LaunchFields) -> Iterator[Rule]:
    parallel = cfg.parallel
    if cfg.overlap.ulysses.method == "none":
        what = "Megatron's local attention has no context parallelism"
        if cfg.train.transformer_impl != "local":
            what = "TransformerEngine's own context parallelism needs launch.device cuda"
        yield (
            cfg.train.transformer_impl == "local" or cfg.launch.device == "cpu",
            "parallel.context",
            f"{what}; use 1, overlap.ulysses.method=p2p or overlap.varlen.method=balanced",
        )
        return
    ranks = parallel.tensor * parallel.context
    yield (
        cfg.model.num_attention_heads % ranks,
        "model.num_attention_heads",
        f"must be a multiple of parallel.tensor x parallel.context = {ranks} with overlap.ulysses",
    )
    yield cfg.model.attention_dropout > 0, "model.attention_dropout", "use 0 with overlap.ulysses"


def _train_rules(cfg: LaunchFields) -> Iterator[Rule]:
    train, replicas = cfg.train, cfg.data_parallel_size
    batch, decay = train.micro_batch_size * replicas, train.lr_decay_iterations or train.iterations
    yield (
        train.global_batch_size % batch,
        "train.global_batch_size",
        f"must be a multiple of train.micro_batch_size x data parallel size = "
        f"{train.micro_batch_size} x {replicas} = {batch}",
    )
    yield train.min_lr > train.lr, "train.min_lr", f"must not exceed train.lr {train.lr}"
    yield (
        train.lr_warmup_iterations >= decay,
        "train.lr_warmup_iterations",
        f"must be less than the {decay} iterations of the decay",
    )
    yield (
        train.save_interval is not None and train.save is None,
        "train.save_interval",
        "needs train.save, a folder for checkpoints",
    )


def _data_rules(cfg: LaunchFields) -> Iterator[Rule]:
    data = cfg.data
    is_mock, what = data.kind == "mock", "prefix of a .bin/.idx pair"
    if data.kind == "text":
        what = "folder of scripts/prepare_data.py"
    yield is_mock and data.path is not None, "data.path", "data.kind mock reads no file; use kind indexed or text"
    yield not is_mock and data.path is None, "data.path", f"data.kind {data.kind} needs the {what}"
    parts = [part.strip() for part in (data.split or "1").split(",")]
    numbers = all(part.replace(".", "", 1).isdigit() for part in parts)
    yield (
        len(parts) > 3 or not numbers or sum(map(float, parts)) <= 0,
        "data.split",
        "give up to three weights, such as 969,30,1",
    )


def _batch_overlap_rules(cfg: LaunchFields) -> Iterator[Rule]:
    tensor, key = cfg.overlap.tensor, "overlap.tensor.split"
    if tensor.split != "batch" or tensor.method == "none":
        return
    yield tensor.method == "fused", key, "overlap.tensor.method fused does not split the batch; use p2p or auto"
    yield cfg.parallel.sequence_parallel, key, "needs parallel.sequence_parallel false; use none"
    yield cfg.train.micro_batch_size % 2, "train.micro_batch_size", f"must be even with {key} batch"


def _device_rules(cfg: LaunchFields) -> Iterator[Rule]:
    train, launch, on_cpu = cfg.train, cfg.launch, cfg.launch.device == "cpu"
    yield (
        not on_cpu and launch.hosts is not None,
        "launch.device",
        "launch.hosts needs cpu: NCCL does not use the rate-limited links",
    )
    yield on_cpu and launch.nodes > 1, "launch.nodes", "launch.device cpu runs on one node; use 1, or launch.hosts"
    yield (on_cpu and train.precision == "fp16", "train.precision", "needs launch.device cuda; use bf16 or fp32 on cpu")
    yield (
        on_cpu and train.gradient_accumulation_fusion,
        "train.gradient_accumulation_fusion",
        "needs launch.device cuda; use false or null on cpu",
    )


def _slurm_rules(cfg: LaunchFields) -> Iterator[Rule]:
    slurm, where = cfg.launch.slurm, "launch.slurm"
    for key in ("account", "partition", "time"):
        has_space = any(letter.isspace() for letter in getattr(slurm, key) or "")
        yield has_space, f"{where}.{key}", "write it without spaces"
    for index, line in enumerate(slurm.directives):
        is_wrong = not line.startswith("-") or "\n" in line
        yield is_wrong, f"{where}.directives.{index}", "write one option of sbatch, such as --exclusive"
    for index, mount in enumerate(slurm.container_mounts):
        key = f"{where}.container_mounts.{index}"
        yield ":" not in mount or "," in mount, key, "write SOURCE:TARGET, one for each mount"
        yield slurm.container_image is None, key, "needs launch.slurm.container_image; or remove it"


def _varlen_rules(cfg: LaunchFields) -> Iterator[Rule]:
    """Settings that `overlap.varlen` does not support; none if it is off."""
    varlen, parallel, train, overlap = cfg.overlap.varlen, cfg.parallel, cfg.train, cfg.overlap
    if varlen.method == "none":
        return
    used = "with overlap.varlen"
    yield parallel.pipeline > 1, "parallel.pipeline", f"use 1 {used}: pipeline stages do not pass the plan on"
    yield (
        varlen.method == "masked" and parallel.context > 1,
        "parallel.context",
        f"use 1 {used}.method masked: stock attention has no context parallelism",
    )
    yield overlap.ulysses.method != "none", "overlap.ulysses.method", f"use none {used}"
    yield overlap.tensor.attention != "row", "overlap.tensor.attention", f"use row {used}"
    yield cfg.model.attention_dropout > 0, "model.attention_dropout", f"use 0 {used}"
    yield (
        train.micro_batch_size > 1,
        "train.micro_batch_size",
        f"use 1 {used}: a micro-batch is one row of whole documents, train.seq_length tokens at most",
    )
    yield train.transformer_impl != "local", "train.transformer_impl", f"use local {used}"
    yield cfg.data.kind == "mock", "data.kind", "overlap.varlen reads documents; use text or indexed"
    yield cfg.launch.entry is not None, "launch.entry", f"use null {used}: the provided scripts read documents"
    share = -(-train.seq_length // parallel.context)
    yield (
        varlen.capacity != "auto" and varlen.capacity < share,
        "overlap.varlen.capacity",
        f"must be at least train.seq_length / parallel.context = {share}, or auto",
    )
    yield (
        varlen.nodes != "auto" and parallel.context % varlen.nodes,
        "overlap.varlen.nodes",
        f"must divide parallel.context {parallel.context}, or auto",
    )
    for index, flag in flags_in(cfg.megatron_args):
        yield (flag in REFUSED_FLAGS, f"megatron_args.{index}", f"not {used}: {REFUSED_FLAGS.get(flag)}; remove it")


def _argument_rules(cfg: LaunchFields) -> Iterator[Rule]:
    """Flags in `megatron_args` that a key sets too."""
    for index, flag in flags_in(cfg.megatron_args):
        where = f"megatron_args.{index}"
        yield flag == "--yaml-cfg", where, "it replaces Megatron's whole argument parser; remove it"
        if flag == TE_OVERLAP:  # a baseline of the overlap, allowed with method none
            yield cfg.overlap.tensor.method != "none", where, TE_OVERLAP_ADVICE
            continue
        key = key_of(flag, cfg.launch.device)
        if key is not None:
            value = value_at(cfg, key)
            present = "" if hasattr(value, "model_dump") else f", now {show_value(value)}"
            yield True, where, f"{key}{present}, sets this flag; change that key"
