"""Combinations of keys of a launch config that cannot run. Each check yields the first key to change and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from megatron_overlap.config.errors import Problem, show_value
from megatron_overlap.config.launch import LaunchFields
from megatron_overlap.config.megatron_args import TE_OVERLAP, TE_OVERLAP_ADVICE, flags_in, key_of, value_at

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
    yield from _model_problems(cfg)
    yield from _rank_problems(cfg)
    yield from _split_problems(cfg)
    yield from _train_problems(cfg)
    yield from _data_problems(cfg)
    yield from _batch_overlap_problems(cfg)
    yield from _device_problems(cfg)
    yield from _slurm_problems(cfg)
    yield from _varlen_problems(cfg)
    yield from _argument_problems(cfg)


def _model_problems(cfg: LaunchFields) -> Iterator[Problem]:
    model = cfg.model
    heads = model.num_attention_heads
    if model.kv_channels is None and model.hidden_size % heads:
        yield Problem(
            "model.hidden_size",
            model.hidden_size,
            f"must be a multiple of model.num_attention_heads {heads}, or set model.kv_channels",
        )
    if heads % model.num_query_groups:
        yield Problem(
            "model.num_query_groups",
            model.num_query_groups,
            f"must divide model.num_attention_heads {heads}",
        )
    if model.rotary and model.head_size % 2:
        yield Problem("model.rotary", True, f"needs an even head size, not {model.head_size}; set model.kv_channels")
    if cfg.train.seq_length > model.max_position_embeddings:
        yield Problem(
            "train.seq_length",
            cfg.train.seq_length,
            f"must not exceed model.max_position_embeddings {model.max_position_embeddings}",
        )


def _rank_problems(cfg: LaunchFields) -> Iterator[Problem]:
    parallel, launch = cfg.parallel, cfg.launch
    if launch.hosts is not None:
        if launch.ranks_per_node is not None:
            yield Problem(
                "launch.ranks_per_node",
                launch.ranks_per_node,
                "launch.hosts.ranks_per_host sets it; remove this key",
            )
        if launch.nodes != 1:
            yield Problem("launch.nodes", launch.nodes, "launch.hosts are on one node; use 1")
    size = parallel.model_size
    if cfg.world_size % size:
        if launch.hosts is not None:
            key, value = "launch.hosts.hosts", launch.hosts.hosts
        elif launch.ranks_per_node is not None:
            key, value = "launch.ranks_per_node", launch.ranks_per_node
        else:
            key, value = "launch.nodes", launch.nodes
        yield Problem(
            key,
            value,
            f"{cfg.world_size} ranks cannot be split by parallel.tensor x context x pipeline = "
            f"{parallel.tensor} x {parallel.context} x {parallel.pipeline}; use a multiple of {size} ranks",
        )


def _split_problems(cfg: LaunchFields) -> Iterator[Problem]:
    parallel, model, train = cfg.parallel, cfg.model, cfg.train
    tensor = parallel.tensor
    if parallel.sequence_parallel and tensor == 1:
        yield Problem("parallel.sequence_parallel", True, "needs parallel.tensor of 2 or more; use false with tensor 1")
    for key in ("num_attention_heads", "num_query_groups", "hidden_size", "ffn_hidden_size"):
        value = getattr(model, key)
        if value % tensor:
            yield Problem(f"model.{key}", value, f"must be a multiple of parallel.tensor {tensor}")
    if model.num_layers % parallel.pipeline:
        yield Problem(
            "model.num_layers",
            model.num_layers,
            f"must be a multiple of parallel.pipeline {parallel.pipeline}",
        )
    if parallel.context > 1 and train.seq_length % (2 * parallel.context):
        yield Problem(
            "train.seq_length",
            train.seq_length,
            f"must be a multiple of 2 x parallel.context = {2 * parallel.context}",
        )
    if parallel.sequence_parallel and train.seq_length % (tensor * parallel.context):
        yield Problem(
            "train.seq_length",
            train.seq_length,
            f"must be a multiple of parallel.tensor x parallel.context = {tensor * parallel.context} "
            "with parallel.sequence_parallel",
        )
    if parallel.context > 1 and cfg.overlap.varlen.method == "none":
        yield from _context_problems(cfg)
    elif parallel.context == 1 and cfg.overlap.ulysses.method == "p2p":
        yield Problem("overlap.ulysses.method", "p2p", "needs parallel.context of 2 or more; use auto or none")


def _context_problems(cfg: LaunchFields) -> Iterator[Problem]:
    parallel, model = cfg.parallel, cfg.model
    method = cfg.overlap.ulysses.method
    if cfg.train.transformer_impl != "local":
        if method == "p2p":
            yield Problem(
                "overlap.ulysses.method",
                method,
                "TransformerEngine's attention has its own context parallelism; use "
                "train.transformer_impl=local, or method none",
            )
        if cfg.launch.entry is None:
            yield Problem(
                "parallel.context",
                parallel.context,
                "the provided scripts have context parallelism in local layers only; use "
                "train.transformer_impl=local, or set launch.entry to a pretrain_gpt.py",
            )
        return
    if method == "none":
        yield Problem(
            "parallel.context",
            parallel.context,
            "Megatron's local attention has no context parallelism; use 1, overlap.ulysses.method=p2p or "
            "overlap.varlen.method=balanced",
        )
    heads, ranks = model.num_attention_heads, parallel.tensor * parallel.context
    if heads % ranks:
        yield Problem(
            "model.num_attention_heads",
            heads,
            f"must be a multiple of parallel.tensor x parallel.context = {ranks} with overlap.ulysses",
        )
    if model.attention_dropout > 0:
        yield Problem("model.attention_dropout", model.attention_dropout, "use 0 with overlap.ulysses")


def _train_problems(cfg: LaunchFields) -> Iterator[Problem]:
    train = cfg.train
    ranks = cfg.data_parallel_size
    if train.global_batch_size % (train.micro_batch_size * ranks):
        yield Problem(
            "train.global_batch_size",
            train.global_batch_size,
            f"must be a multiple of train.micro_batch_size x data parallel size = "
            f"{train.micro_batch_size} x {ranks} = {train.micro_batch_size * ranks}",
        )
    if train.min_lr > train.lr:
        yield Problem("train.min_lr", train.min_lr, f"must not exceed train.lr {train.lr}")
    decay = train.lr_decay_iterations or train.iterations
    if train.lr_warmup_iterations >= decay:
        yield Problem(
            "train.lr_warmup_iterations",
            train.lr_warmup_iterations,
            f"must be less than the {decay} iterations of the decay",
        )
    if train.save_interval is not None and train.save is None:
        yield Problem("train.save_interval", train.save_interval, "needs train.save, a folder for checkpoints")


def _data_problems(cfg: LaunchFields) -> Iterator[Problem]:
    data = cfg.data
    if data.kind == "mock" and data.path is not None:
        yield Problem("data.path", data.path, "data.kind mock reads no file; use kind indexed or text")
    if data.kind != "mock" and data.path is None:
        what = "prefix of a .bin/.idx pair" if data.kind == "indexed" else "folder of scripts/prepare_data.py"
        yield Problem("data.path", None, f"data.kind {data.kind} needs the {what}")
    if data.split is not None:
        parts = data.split.split(",")
        numbers = [part.strip().replace(".", "", 1).isdigit() for part in parts]
        if len(parts) > 3 or not all(numbers) or sum(float(part) for part in parts) <= 0:
            yield Problem("data.split", data.split, "give up to three weights, such as 969,30,1")


def _batch_overlap_problems(cfg: LaunchFields) -> Iterator[Problem]:
    tensor, key = cfg.overlap.tensor, "overlap.tensor.split"
    if tensor.split == "none" or tensor.method == "none":
        return
    if tensor.method != "p2p":
        yield Problem(key, "batch", f"overlap.tensor.method {tensor.method} does not split the batch; use p2p, or none")
    if cfg.parallel.sequence_parallel:
        yield Problem(key, "batch", "needs parallel.sequence_parallel false; use none")
    if cfg.train.micro_batch_size % 2:
        yield Problem("train.micro_batch_size", cfg.train.micro_batch_size, f"must be even with {key} batch")


def _device_problems(cfg: LaunchFields) -> Iterator[Problem]:
    train, launch = cfg.train, cfg.launch
    if launch.device != "cpu":
        if launch.hosts is not None:
            yield Problem(
                "launch.device", launch.device, "launch.hosts needs cpu: NCCL does not use the rate-limited links"
            )
        return
    if launch.nodes > 1:
        yield Problem("launch.nodes", launch.nodes, "launch.device cpu runs on one node; use 1, or launch.hosts")
    if train.precision == "fp16":
        yield Problem("train.precision", "fp16", "needs launch.device cuda; use bf16 or fp32 on cpu")
    if train.gradient_accumulation_fusion:
        yield Problem("train.gradient_accumulation_fusion", True, "needs launch.device cuda; use false or null on cpu")


def _slurm_problems(cfg: LaunchFields) -> Iterator[Problem]:
    slurm = cfg.launch.slurm
    for key in ("account", "partition", "time"):
        value = getattr(slurm, key)
        if value is not None and any(letter.isspace() for letter in value):
            yield Problem(f"launch.slurm.{key}", value, "write it without spaces")
    for index, line in enumerate(slurm.directives):
        if not line.startswith("-") or "\n" in line:
            yield Problem(f"launch.slurm.directives.{index}", line, "write one option of sbatch, such as --exclusive")
    for index, mount in enumerate(slurm.container_mounts):
        if ":" not in mount or "," in mount:
            yield Problem(f"launch.slurm.container_mounts.{index}", mount, "write SOURCE:TARGET, one for each mount")
    if slurm.container_mounts and slurm.container_image is None:
        mounts = ", ".join(slurm.container_mounts)
        yield Problem("launch.slurm.container_mounts", mounts, "needs launch.slurm.container_image; or remove it")


def _varlen_problems(cfg: LaunchFields) -> Iterator[Problem]:
    """Settings that `overlap.varlen` does not support; none if it is off."""
    varlen, parallel, train, overlap = cfg.overlap.varlen, cfg.parallel, cfg.train, cfg.overlap
    if varlen.method == "none":
        return
    if parallel.pipeline > 1:
        yield Problem(
            "parallel.pipeline", parallel.pipeline, "use 1 with overlap.varlen: pipeline stages do not pass the plan on"
        )
    if varlen.method == "masked" and parallel.context > 1:
        yield Problem(
            "parallel.context",
            parallel.context,
            "use 1 with overlap.varlen.method masked: stock attention has no context parallelism",
        )
    if overlap.ulysses.method != "none":
        yield Problem("overlap.ulysses.method", overlap.ulysses.method, "use none with overlap.varlen")
    if overlap.tensor.attention != "row":
        yield Problem("overlap.tensor.attention", overlap.tensor.attention, "use row with overlap.varlen")
    if cfg.model.attention_dropout > 0:
        yield Problem("model.attention_dropout", cfg.model.attention_dropout, "use 0 with overlap.varlen")
    if train.micro_batch_size > 1:
        yield Problem(
            "train.micro_batch_size",
            train.micro_batch_size,
            "use 1 with overlap.varlen: a micro-batch is one row of whole documents, train.seq_length tokens at most",
        )
    if train.transformer_impl != "local":
        yield Problem("train.transformer_impl", train.transformer_impl, "use local with overlap.varlen")
    if cfg.data.kind == "mock":
        yield Problem("data.kind", "mock", "overlap.varlen reads documents; use text or indexed")
    if cfg.launch.entry is not None:
        yield Problem(
            "launch.entry", cfg.launch.entry, "use null with overlap.varlen: the provided scripts read documents"
        )
    share = -(-train.seq_length // parallel.context)
    if varlen.capacity != "auto" and varlen.capacity < share:
        yield Problem(
            "overlap.varlen.capacity",
            varlen.capacity,
            f"must be at least train.seq_length / parallel.context = {share}, or auto",
        )
    if varlen.nodes != "auto" and parallel.context % varlen.nodes:
        yield Problem("overlap.varlen.nodes", varlen.nodes, f"must divide parallel.context {parallel.context}, or auto")
    for index, flag in flags_in(cfg.megatron_args):
        if flag in REFUSED_FLAGS:
            yield Problem(
                f"megatron_args.{index}",
                cfg.megatron_args[index],
                f"not with overlap.varlen: {REFUSED_FLAGS[flag]}; remove it",
            )


def _argument_problems(cfg: LaunchFields) -> Iterator[Problem]:
    """Flags in `megatron_args` that a key sets too."""
    for index, flag in flags_in(cfg.megatron_args):
        where = f"megatron_args.{index}"
        if flag == "--yaml-cfg":
            yield Problem(where, flag, "it replaces Megatron's whole argument parser; remove it")
        if flag == TE_OVERLAP and cfg.overlap.tensor.method != "none":
            yield Problem(where, flag, TE_OVERLAP_ADVICE)
        if flag == TE_OVERLAP:
            continue  # a baseline of the overlap, allowed with method none
        key = key_of(flag, cfg.launch.device)
        if key is None:
            continue
        value = value_at(cfg, key)
        present = "" if hasattr(value, "model_dump") else f", now {show_value(value)}"
        yield Problem(where, cfg.megatron_args[index], f"{key}{present}, sets this flag; change that key")
