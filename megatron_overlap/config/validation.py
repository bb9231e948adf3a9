"""Combinations of keys of a launch config that cannot run: rules that name the first key to change and the remedy."""

from collections.abc import Iterator, Mapping

from megatron_overlap.config.errors import Problem, show_value
from megatron_overlap.config.launch import LaunchFields
from megatron_overlap.config.megatron_args import UNEVEN_STAGES, flags_in, key_of, value_at

Rule = tuple[str, str]
"""The dotted key to change, and the remedy."""

# Megatron flags without a key that exclude balanced attention, and the reason.
REFUSED_FLAGS: Mapping[str, str] = {
    "--mtp-num-layers": "multi-token prediction needs the next rows, which other ranks hold",
    "--num-experts": "the auxiliary loss of mixture of experts assumes equal numbers of rows per rank",
    "--hybrid-layer-pattern": "Mamba layers need a rank's rows in the order of the text",
    "--hybrid-override-pattern": "Mamba layers need a rank's rows in the order of the text",
    "--cuda-graph-impl": "CUDA graphs need the same shapes in every step",
    "--enable-cuda-graph": "CUDA graphs need the same shapes in every step",
    "--external-cuda-graph": "CUDA graphs need the same shapes in every step",
    "--fp8-format": "its GEMMs need rows in multiples of 32, and a rank holds any number of rows",
    "--fp4-format": "its GEMMs need rows in multiples of 32, and a rank holds any number of rows",
    "--tp-comm-overlap": "userbuffers need the same number of rows in every step",
    "--window-size": "the plan balances full causal attention",
    "--multi-latent-attention": "its keys and values have different shapes",
    "--qk-clip": "it reads the scores, which balanced attention does not keep",
    "--log-max-attention-logit": "it reads the scores, which balanced attention does not keep",
    "--reset-position-ids": "positions already restart with every document",
    "--reset-attention-mask": "attention already separates the documents",
    "--dataloader-type": "the plugin loads the documents",
    "--full-validation": "the loaders of documents have no end",
    "--hybrid-context-parallel": "it is an alternative to overlap.varlen",
    "--sft": "it packs sequences itself",
    "--spec": "the plugin sets the core attention of the layer spec",
}


def launch_problems(cfg: LaunchFields) -> Iterator[Problem]:
    """Combinations of keys that cannot run, most basic first."""
    rules = (_model_rules, _rank_rules, _layout_rules, _train_rules, _data_rules, _batch_overlap_rules, _device_rules)
    for broken_rules in (*rules, _slurm_rules, _varlen_rules, _argument_rules):
        for key, remedy in broken_rules(cfg):
            yield Problem(key, value_at(cfg, key), remedy)


def _model_rules(cfg: LaunchFields) -> Iterator[Rule]:
    model, heads = cfg.model, cfg.model.num_attention_heads
    if model.kv_channels is None and model.hidden_size % heads:
        yield "model.hidden_size", f"must be a multiple of model.num_attention_heads {heads}, or set model.kv_channels"
    if heads % model.num_query_groups:
        yield "model.num_query_groups", f"must divide model.num_attention_heads {heads}"
    if model.rotary and model.head_size % 2:
        yield "model.rotary", f"needs an even head size, not {model.head_size}; set model.kv_channels"
    if cfg.train.seq_length > model.max_position_embeddings:
        yield "train.seq_length", f"must not exceed model.max_position_embeddings {model.max_position_embeddings}"


def _rank_rules(cfg: LaunchFields) -> Iterator[Rule]:
    parallel, launch = cfg.parallel, cfg.launch
    hosts, per_node, size = launch.hosts, launch.ranks_per_node, parallel.model_size
    if hosts is not None and per_node is not None:
        yield "launch.ranks_per_node", "launch.hosts.ranks_per_host sets it; remove this key"
    if hosts is not None and launch.nodes != 1:
        yield "launch.nodes", "launch.hosts are on one node; use 1"
    if cfg.world_size % size:
        key = "launch.hosts.hosts" if hosts else "launch.nodes" if per_node is None else "launch.ranks_per_node"
        layout = f"{parallel.tensor} x {parallel.context} x {parallel.pipeline}"
        remedy = f"cannot be split by parallel.tensor x context x pipeline = {layout}; use a multiple of {size} ranks"
        yield key, f"{cfg.world_size} ranks {remedy}"


def _layout_rules(cfg: LaunchFields) -> Iterator[Rule]:
    parallel, model, seq_length = cfg.parallel, cfg.model, cfg.train.seq_length
    tensor, context = parallel.tensor, parallel.context
    if parallel.sequence_parallel and tensor == 1:
        yield "parallel.sequence_parallel", "needs parallel.tensor of 2 or more; use false with tensor 1"
    for name in ("num_attention_heads", "hidden_size", "ffn_hidden_size"):
        if getattr(model, name) % tensor:
            yield f"model.{name}", f"must be a multiple of parallel.tensor {tensor}"
    if model.num_query_groups % tensor and tensor % model.num_query_groups:
        yield "model.num_query_groups", f"must be a multiple or a divisor of parallel.tensor {tensor}"
    uneven = any(flag in UNEVEN_STAGES for _, flag in flags_in(cfg.megatron_args))
    if model.num_layers % parallel.pipeline and not uneven:
        remedy = f"must be a multiple of parallel.pipeline {parallel.pipeline}, or set {UNEVEN_STAGES[0]}"
        yield "model.num_layers", remedy
    if context > 1 and seq_length % (2 * context):
        yield "train.seq_length", f"must be a multiple of 2 x parallel.context = {2 * context}"
    if parallel.sequence_parallel and seq_length % (tensor * context):
        product = f"parallel.tensor x parallel.context = {tensor * context}"
        yield "train.seq_length", f"must be a multiple of {product} with parallel.sequence_parallel"
    if context > 1 and cfg.overlap.varlen.method == "none":
        yield from _context_rules(cfg)
    elif context == 1 and cfg.overlap.ulysses.method == "p2p":
        yield "overlap.ulysses.method", "needs parallel.context of 2 or more; use auto or none"


def _context_rules(cfg: LaunchFields) -> Iterator[Rule]:
    parallel = cfg.parallel
    if cfg.overlap.ulysses.method == "none":
        remedy = "use 1, overlap.ulysses.method=p2p or overlap.varlen.method=balanced"
        if cfg.train.transformer_impl == "local":
            yield "parallel.context", f"Megatron's local attention has no context parallelism; {remedy}"
        elif cfg.launch.device == "cpu":
            yield "parallel.context", f"TransformerEngine's own context parallelism needs launch.device cuda; {remedy}"
        return
    ranks = parallel.tensor * parallel.context
    if cfg.model.num_attention_heads % ranks:
        remedy = f"must be a multiple of parallel.tensor x parallel.context = {ranks} with overlap.ulysses"
        yield "model.num_attention_heads", remedy
    if cfg.model.attention_dropout > 0:
        yield "model.attention_dropout", "use 0 with overlap.ulysses"


def _train_rules(cfg: LaunchFields) -> Iterator[Rule]:
    train, replicas = cfg.train, cfg.data_parallel_size
    batch, decay = train.micro_batch_size * replicas, train.lr_decay_iterations or train.iterations
    if train.global_batch_size % batch:
        product = f"train.micro_batch_size x data parallel size = {train.micro_batch_size} x {replicas} = {batch}"
        yield "train.global_batch_size", f"must be a multiple of {product}"
    if train.min_lr > train.lr:
        yield "train.min_lr", f"must not exceed train.lr {train.lr}"
    if train.lr_warmup_iterations >= decay:
        yield "train.lr_warmup_iterations", f"must be less than the {decay} iterations of the decay"
    if train.save_interval is not None and train.save is None:
        yield "train.save_interval", "needs train.save, a folder for checkpoints"
    if train.tp_comm_overlap:
        key, te = "train.tp_comm_overlap", train.transformer_impl == "transformer_engine"
        if cfg.overlap.tensor.method != "none":
            remedy = "TransformerEngine then overlaps the same communication; use false, or overlap.tensor.method=none"
            yield key, remedy
        if not (te and cfg.parallel.sequence_parallel and cfg.launch.device == "cuda"):
            needed = "launch.device cuda, train.transformer_impl transformer_engine and parallel.sequence_parallel"
            yield key, f"needs {needed}; use false"


def _data_rules(cfg: LaunchFields) -> Iterator[Rule]:
    data = cfg.data
    if data.kind == "mock" and data.path is not None:
        yield "data.path", "data.kind mock reads no file; use kind indexed or text"
    if data.kind != "mock" and data.path is None:
        what = "folder of scripts/prepare_data.py" if data.kind == "text" else "prefix of a .bin/.idx pair"
        yield "data.path", f"data.kind {data.kind} needs the {what}"
    parts = [part.strip() for part in (data.split or "1").split(",")]
    numbers = all(part.replace(".", "", 1).isdigit() for part in parts)
    if len(parts) > 3 or not numbers or sum(map(float, parts)) <= 0:
        yield "data.split", "give up to three weights, such as 969,30,1"


def _batch_overlap_rules(cfg: LaunchFields) -> Iterator[Rule]:
    tensor, key = cfg.overlap.tensor, "overlap.tensor.split"
    if tensor.split not in ("batch", "sequence") or tensor.method == "none":
        return
    if tensor.method == "fused":
        yield key, "overlap.tensor.method fused does not split the batch; use p2p or auto"
    if tensor.attention == "query_split" and cfg.parallel.sequence_parallel:
        yield key, "overlap.tensor.attention query_split does not split the batch; use none"
    if tensor.split == "sequence":
        if not cfg.parallel.sequence_parallel or cfg.parallel.context > 1:
            yield key, "sequence needs parallel.sequence_parallel true and parallel.context 1; use none"
        if cfg.train.seq_length % (2 * cfg.parallel.tensor):
            yield "train.seq_length", f"must be a multiple of 2 x parallel.tensor with {key} sequence"
    elif cfg.train.micro_batch_size % 2:
        yield "train.micro_batch_size", f"must be even with {key} batch"


def _device_rules(cfg: LaunchFields) -> Iterator[Rule]:
    train, launch = cfg.train, cfg.launch
    if launch.device != "cpu":
        if launch.hosts is not None:
            yield "launch.device", "launch.hosts needs cpu: NCCL does not use the rate-limited links"
        if launch.rehearsal:
            yield "launch.rehearsal", "needs launch.device cpu; `launch --rehearse` sets both"
        return
    if launch.nodes > 1:
        yield "launch.nodes", "launch.device cpu runs on one node; use 1, or launch.hosts"
    if train.precision == "fp16":
        yield "train.precision", "needs launch.device cuda; use bf16 or fp32 on cpu"
    if train.gradient_accumulation_fusion:
        yield "train.gradient_accumulation_fusion", "needs launch.device cuda; use false or null on cpu"


def _slurm_rules(cfg: LaunchFields) -> Iterator[Rule]:
    slurm, where = cfg.launch.slurm, "launch.slurm"
    for key in ("account", "partition", "time"):
        if any(letter.isspace() for letter in getattr(slurm, key) or ""):
            yield f"{where}.{key}", "write it without spaces"
    for index, line in enumerate(slurm.directives):
        if not line.startswith("-") or "\n" in line:
            yield f"{where}.directives.{index}", "write one option of sbatch, such as --exclusive"
    for index, mount in enumerate(slurm.container_mounts):
        key = f"{where}.container_mounts.{index}"
        if ":" not in mount or "," in mount:
            yield key, "write SOURCE:TARGET, one for each mount"
        if slurm.container_image is None:
            yield key, "needs launch.slurm.container_image; or remove it"


def _varlen_rules(cfg: LaunchFields) -> Iterator[Rule]:
    varlen, parallel, train, overlap = cfg.overlap.varlen, cfg.parallel, cfg.train, cfg.overlap
    if varlen.method == "none":
        return
    used = "with overlap.varlen"
    if parallel.pipeline > 1:
        yield "parallel.pipeline", f"use 1 {used}: pipeline stages do not pass the plan on"
    if varlen.method == "masked" and parallel.context > 1:
        yield "parallel.context", f"use 1 {used}.method masked: stock attention has no context parallelism"
    if overlap.ulysses.method != "none":
        yield "overlap.ulysses.method", f"use none {used}"
    if overlap.tensor.attention != "row":
        yield "overlap.tensor.attention", f"use row {used}"
    if cfg.model.attention_dropout > 0:
        yield "model.attention_dropout", f"use 0 {used}"
    if train.micro_batch_size > 1:
        what = "a micro-batch is one row of whole documents, train.seq_length tokens at most"
        yield "train.micro_batch_size", f"use 1 {used}: {what}"
    if cfg.data.kind == "mock":
        yield "data.kind", "overlap.varlen reads documents; use text or indexed"
    if cfg.launch.entry is not None:
        yield "launch.entry", f"use null {used}: the provided scripts read documents"
    share = -(-train.seq_length // parallel.context)
    if varlen.capacity != "auto" and varlen.capacity < share:
        yield "overlap.varlen.capacity", f"must be at least train.seq_length / parallel.context = {share}, or auto"
    if varlen.nodes != "auto" and parallel.context % varlen.nodes:
        yield "overlap.varlen.nodes", f"must divide parallel.context {parallel.context}, or auto"
    for index, flag in flags_in(cfg.megatron_args):
        if flag in REFUSED_FLAGS:
            yield f"megatron_args.{index}", f"not {used}: {REFUSED_FLAGS[flag]}; remove it"


def _argument_rules(cfg: LaunchFields) -> Iterator[Rule]:
    for index, flag in flags_in(cfg.megatron_args):
        where = f"megatron_args.{index}"
        if flag == "--yaml-cfg":
            yield where, "it replaces Megatron's whole argument parser; remove it"
        key = key_of(flag, cfg.launch.device)
        if key is not None:
            value = value_at(cfg, key)
            present = "" if hasattr(value, "model_dump") else f", now {show_value(value)}"
            yield where, f"{key}{present}, sets this flag; change that key"
