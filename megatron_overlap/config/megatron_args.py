"""Convert a launch config to Megatron's arguments. Uses only flags of all of 0.16.1, 0.17.1, 0.18.2 and 0.19.2.

The tables map keys to flags. A flag in `megatron_args` that a key sets is an error.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_overlap.config.launch import LaunchFields

# With this flag TransformerEngine overlaps the same communication, which excludes the plugin.
TE_OVERLAP = "--tp-comm-overlap"
EXPERT_PARALLEL = "--expert-model-parallel-size"
TWO_MICROBATCHES = "--overlap-moe-expert-parallel-comm"
"""Megatron's overlap of experts: the forward of one micro-batch with the backward of another."""
UNEVEN_STAGES = (
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers", "--pipeline-model-parallel-layout"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
)
"""Megatron's flags for stages with different numbers of layers."""
TE_OVERLAP_ADVICE = "TransformerEngine overlaps with this flag; remove the flag, or use overlap.tensor.method=none"


def _same(section: str, flags: str) -> dict[str, str]:
    """Flags whose keys have the same names: `--hidden-size` is `hidden_size`."""
    return {f"--{flag}": f"{section}.{flag.replace('-', '_')}" for flag in flags.split()}


# Flags with a value, and the key of the value. A null value omits the flag.
VALUES: Mapping[str, str] = {
    **_same("model", "num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels vocab-size"),
    **_same("model", "max-position-embeddings normalization norm-epsilon"),
    **_same("model", "hidden-dropout attention-dropout init-method-std"),
    "--tensor-model-parallel-size": "parallel.tensor",
    "--context-parallel-size": "parallel.context",
    "--pipeline-model-parallel-size": "parallel.pipeline",
    **_same("train", "seq-length micro-batch-size global-batch-size"),
    "--train-iters": "train.iterations",
    **_same("train", "lr min-lr lr-decay-style"),
    "--lr-warmup-iters": "train.lr_warmup_iterations",
    **_same("train", "weight-decay clip-grad seed transformer-impl eval-interval"),
    "--eval-iters": "train.eval_iterations",
    **_same("train", "log-interval save load"),
    "--ckpt-format": "train.checkpoint_format",
}

# Flags without a value: the key, and its value that sets the flag.
SWITCHES: Mapping[str, tuple[str, object]] = {
    "--swiglu": ("model.swiglu", True),
    "--untie-embeddings-and-output-weights": ("model.untie_embeddings", True),
    "--disable-bias-linear": ("model.add_bias", False),
    "--add-qkv-bias": ("model.add_qkv_bias", True),
    "--sequence-parallel": ("parallel.sequence_parallel", True),
    "--bf16": ("train.precision", "bf16"),
    "--fp16": ("train.precision", "fp16"),
    "--use-distributed-optimizer": ("train.distributed_optimizer", True),
    TE_OVERLAP: ("train.tp_comm_overlap", True),
    "--cross-entropy-loss-fusion": ("train.cross_entropy_loss_fusion", True),
    "--manual-gc": ("train.manual_gc", True),
    "--mock-data": ("data.kind", "mock"),
}

# Flags that depend on several keys or have another form than their key.
DERIVED: Mapping[str, str] = {
    **dict.fromkeys(("--group-query-attention", "--num-query-groups"), "model.num_query_groups"),
    **dict.fromkeys(("--position-embedding-type", "--use-rotary-position-embeddings"), "model.rotary"),
    "--rotary-base": "model.rotary_base",
    "--train-samples": "train.iterations",
    "--lr-decay-iters": "train.lr_decay_iterations",
    "--save-interval": "train.save_interval",
    **dict.fromkeys(("--recompute-granularity", "--recompute-activations"), "train.recompute"),
    **dict.fromkeys(("--recompute-method", "--recompute-num-layers"), "train.recompute"),
    "--no-gradient-accumulation-fusion": "train.gradient_accumulation_fusion",
    "--data-path": "data.path",
    "--split": "data.split",
    "--num-workers": "data.workers",
    **dict.fromkeys(("--overlap-grad-reduce", "--overlap-param-gather"), "overlap.data.method"),
    "--attention-backend": "train.attention_backend",
    **dict.fromkeys(("--distributed-backend", "--overlap-device"), "launch.device"),
    "--overlap-config": "overlap",
    "--overlap-run-dir": "launch.output_dir",
}

# Flags of a run without a GPU: they disable kernels that need one.
CPU_SWITCHES = (
    *("--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion"),
    *("--no-bias-dropout-fusion", "--no-persist-layer-norm", "--no-rope-fusion"),
)
# Those of a rehearsal: what runs without a GPU stays as in the launch.
REHEARSAL_SWITCHES = ("--no-masked-softmax-fusion", "--no-rope-fusion")
CPU_VALUES: Mapping[str, str] = {"--distributed-backend": "gloo", "--attention-backend": "unfused"}


def to_megatron_args(cfg: LaunchFields) -> list[str]:
    """All arguments of Megatron's training script, without the script and the arguments of the plugin.

    `cfg.megatron_args` is last. Defaults are explicit, so that releases with different defaults run the same training.
    """
    args: list[str] = []
    for flag, key in VALUES.items():
        if (value := value_at(cfg, key)) is not None:
            args += [flag, str(value)]
    args += [flag for flag, (key, setting) in SWITCHES.items() if value_at(cfg, key) == setting]
    args += _derived(cfg)
    if cfg.overlap.varlen.method != "none":
        # The plugin loads the documents. Ranks have different numbers of tokens, so the loss is averaged over tokens.
        needed = ("--dataloader-type=external", "--calculate-per-token-loss")
        args += [argument for argument in needed if argument not in cfg.megatron_args]
    return [*args, *cfg.megatron_args]


def value_at(cfg: LaunchFields, key: str) -> object:
    """The value of a dotted key. A number in the key counts the items of a list."""
    node: Any = cfg
    for part in key.split("."):
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    return node


def flags_in(args: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Position and name of each flag; `--flag=value` counts as `--flag`."""
    for index, arg in enumerate(args):
        if arg.startswith("--"):
            yield index, arg.partition("=")[0]


def number_after(flag: str, args: Sequence[str]) -> int | None:
    """The number after a flag in `megatron_args`; None: no such flag.

    Raises ValueError if it is no whole number above 0.
    """
    for index, name in flags_in(args):
        if name == flag:
            _, equals, value = args[index].partition("=")
            text = value if equals else "".join(args[index + 1 : index + 2])
            if not text.isdigit() or int(text) < 1:
                raise ValueError(f"megatron_args.{index}: {args[index]} {text}: give a whole number of 1 or more")
            return int(text)
    return None


def key_of(flag: str, device: str) -> str | None:
    """The key that sets a Megatron flag on this device; None: no key sets it."""
    if flag in SWITCHES:
        return SWITCHES[flag][0]
    if device == "cpu" and flag in CPU_VALUES:
        return "launch.device"
    return VALUES.get(flag, DERIVED.get(flag))


def _derived(cfg: LaunchFields) -> Iterator[str]:
    """The flags of `DERIVED`, and those without a key that every run needs."""
    model, train, data, on_cpu = cfg.model, cfg.train, cfg.data, cfg.launch.device == "cpu"
    if model.num_query_groups != model.num_attention_heads:
        yield from ("--group-query-attention", "--num-query-groups", str(model.num_query_groups))
    yield from ("--position-embedding-type", "rope" if model.rotary else "learned_absolute")
    if model.rotary:
        yield from ("--rotary-base", str(model.rotary_base))
    yield from ("--lr-decay-iters", str(train.lr_decay_iterations or train.iterations))
    if train.save is not None:
        yield from ("--save-interval", str(train.save_interval or train.iterations))
    if train.recompute == "selective":
        yield from ("--recompute-granularity", "selective")
    if train.recompute == "full":
        yield from ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    if train.gradient_accumulation_fusion is False or on_cpu:
        yield "--no-gradient-accumulation-fusion"
    if cfg.num_weight_copies > 1 and cfg.overlap.data.method != "none":
        yield "--overlap-grad-reduce"
        if train.distributed_optimizer:
            yield "--overlap-param-gather"
    yield "--log-throughput"
    if data.path is not None:
        yield from ("--data-path", data_prefix(data.kind, data.path))
    yield from ("--split", data.split or ("969,30,1" if train.eval_iterations else "100,0,0"))
    workers = data.workers if data.workers is not None else (0 if on_cpu else 2)
    yield from ("--num-workers", str(workers))
    if not any(flag == "--tokenizer-type" for _, flag in flags_in(cfg.megatron_args)):
        # Training needs token ids only; this tokenizer reads no file.
        yield from ("--tokenizer-type", "NullTokenizer")
    if on_cpu:
        for flag, value in CPU_VALUES.items():
            yield from (flag, value)
        yield from REHEARSAL_SWITCHES if cfg.launch.rehearsal else CPU_SWITCHES
    else:
        yield from ("--attention-backend", train.attention_backend)


def data_prefix(kind: str, path: str) -> str:
    """Megatron's data path: name of the .bin/.idx pair without suffix."""
    if kind == "text":
        return f"{path.rstrip('/')}/tokens"  # the pair of scripts/prepare_data.py
    return path.removesuffix(".bin").removesuffix(".idx")
