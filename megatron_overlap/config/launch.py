"""The keys of a launch config with type, default and unit.

`validation.py` checks combinations of keys. A `model` section merges the defaults of the architecture, the named shape
and the keys of the section; `configs/models/presets.yaml` has the first two.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, model_validator

from megatron_overlap.config.errors import Problem, did_you_mean, raise_first
from megatron_overlap.config.overlap import OverlapFields
from megatron_overlap.config.resources import resource_folder
from megatron_overlap.config.section import (
    Folder,
    Fraction,
    Name,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Text,
)

_CONTENT: Mapping[str, Mapping[str, Mapping[str, object]]] = yaml.safe_load(
    (resource_folder("configs") / "models" / "presets.yaml").read_text(encoding="utf-8")
)
ARCHITECTURES = _CONTENT["architectures"]
PRESETS = _CONTENT["presets"]


def _argument(value: object) -> object:
    """Convert a number to text: YAML reads `--lr, 0.1` in a list as a text and a number."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


class ModelConfig(Section):
    """The model: a preset, all fields, or a preset with changed fields."""

    preset: str | None = None
    """A shape of the list below; other keys override it."""
    arch: Literal["gpt", "llama"]
    num_layers: Positive
    hidden_size: Positive
    ffn_hidden_size: Positive
    """Default: 4 x hidden_size; with SwiGLU 8/3 x, rounded down to a multiple of 64."""
    num_attention_heads: Positive
    num_query_groups: Positive
    """Key/value heads. Default: num_attention_heads."""
    kv_channels: Positive | None = None
    """Head size; null: hidden_size / num_attention_heads."""
    vocab_size: Annotated[int, Field(ge=2)]
    """Token ids with end-of-document, before Megatron's padding."""
    max_position_embeddings: Positive
    normalization: Literal["LayerNorm", "RMSNorm"]
    norm_epsilon: PositiveFloat = 1e-5
    swiglu: bool
    rotary: bool
    """false: learned absolute positions."""
    rotary_base: Positive = 10000
    untie_embeddings: bool
    add_bias: bool
    """Biases of linear layers."""
    add_qkv_bias: bool = False
    """Bias of the QKV projection if add_bias is false."""
    hidden_dropout: Fraction = 0.0
    attention_dropout: Fraction = 0.0
    init_method_std: PositiveFloat = 0.02

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        preset = given.get("preset")
        if isinstance(preset, str) and preset not in PRESETS:
            raise_first([Problem("preset", preset, did_you_mean(preset, PRESETS, "preset"))])
        shape = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
        merged: dict[str, Any] = {**shape, **{key: value for key, value in given.items() if value is not None}}
        if isinstance(arch := merged.get("arch"), str):
            merged = {**ARCHITECTURES.get(arch, {}), **merged}
        hidden = merged.get("hidden_size")
        if "ffn_hidden_size" not in merged and isinstance(hidden, int):
            merged["ffn_hidden_size"] = hidden * 8 // 3 // 64 * 64 if merged.get("swiglu") else 4 * hidden
        if "num_query_groups" not in merged and "num_attention_heads" in merged:
            merged["num_query_groups"] = merged["num_attention_heads"]
        return merged

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads


class ParallelConfig(Section):
    """Parallel sizes. The data parallel size is the number of ranks divided by their product."""

    tensor: Positive = 1
    context: Positive = 1
    pipeline: Positive = 1
    sequence_parallel: bool = False

    @property
    def model_size(self) -> int:
        """Ranks of one replica of the model."""
        return self.tensor * self.context * self.pipeline


class TrainConfig(Section):
    """The training loop."""

    seq_length: Positive
    micro_batch_size: Positive = 1
    global_batch_size: Positive
    iterations: Positive
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    lr: PositiveFloat = 3e-4
    min_lr: NonNegativeFloat = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    lr_decay_iterations: Positive | None = None
    """null: iterations. Set it if a later run continues longer; that run also needs the Megatron flag
    `--override-opt_param-scheduler`."""
    lr_warmup_iterations: NonNegative = 0
    weight_decay: NonNegativeFloat = 0.01
    clip_grad: NonNegativeFloat = 1.0
    """Largest gradient norm; 0: no clipping."""
    seed: Positive = 1234
    distributed_optimizer: bool = False
    gradient_accumulation_fusion: bool | None = None
    """null: Megatron's default on cuda, false on cpu."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    attention_backend: Literal["auto", "flash", "fused", "unfused"] = "auto"
    """Kernel of TransformerEngine's attention on cuda; auto: TransformerEngine selects it. On cpu always unfused."""
    tp_comm_overlap: bool = False
    """TransformerEngine overlaps tensor parallel communication (userbuffers) instead of the plugin."""
    cross_entropy_loss_fusion: bool = False
    manual_gc: bool = False
    """Turn off Python's automatic garbage collection, in which single ranks pause; Megatron collects at evaluations."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation."""
    eval_interval: Positive = 1000
    eval_iterations: NonNegative = 0
    log_interval: Positive = 1
    save: Text | None = None
    """Folder for checkpoints."""
    save_interval: Positive | None = None
    """Iterations between checkpoints; null: one checkpoint at the end."""
    load: Text | None = None
    """Folder of the checkpoint to load."""
    checkpoint_format: Literal["torch", "torch_dist"] = "torch_dist"


class DataConfig(Section):
    """Training data. Paths are relative to the working directory."""

    kind: Literal["mock", "indexed", "text"] = "mock"
    """mock: generated; indexed: a Megatron .bin/.idx pair; text: a folder of scripts/prepare_data.py."""
    path: Text | None = None
    """Prefix of the pair, one of its files, or the folder."""
    split: Text | None = None
    """Weights of training, validation, test; null: 969,30,1, or without evaluation training only."""
    workers: NonNegative | None = None
    """Data loader processes per rank; null: 2 on cuda, 0 on cpu."""


class HostsConfig(Section):
    """Several hosts on this machine: network namespaces with rate-limited links."""

    hosts: Annotated[int, Field(ge=1, le=250)]
    ranks_per_host: Positive = 1
    gbps: Annotated[float, Field(ge=0.001, le=100)]
    """Rate of each link and direction, in 10^9 bits per second."""
    fallback: Literal["error", "loopback"] = "error"
    """loopback: no rate limits if the machine cannot create namespaces."""


class SlurmConfig(Section):
    """Settings of `launch --emit-slurm` that do not follow from other keys."""

    tasks: Literal["torchrun", "ranks"] = "torchrun"
    """torchrun: one task per node, which starts its ranks; ranks: one task per rank."""
    account: Text | None = None
    partition: Text | None = None
    time: Text | None = None
    """Time limit, such as 04:00:00."""
    directives: tuple[Text, ...] = Field(default=(), strict=False)
    """More options of sbatch, such as `--exclusive`."""
    setup: tuple[Text, ...] = Field(default=(), strict=False)
    """Shell lines before Python, such as `source .venv/bin/activate`."""
    python: Text = "python"
    """Python command on the nodes or in the container."""
    container_image: Text | None = None
    """enroot image for pyxis (`srun --container-image`)."""
    container_mounts: tuple[Text, ...] = Field(default=(), strict=False)
    """SOURCE:TARGET; the submission folder and launch.output_dir are always mounted."""


class LaunchSection(Section):
    """Device, nodes, processes and output of the ranks."""

    device: Literal["cuda", "cpu"] = "cuda"
    nodes: Positive = 1
    ranks_per_node: Positive | None = None
    """null: those of one replica of the model, or hosts.ranks_per_host."""
    threads_per_rank: Positive = 1
    """CPU threads per rank."""
    entry: Text | None = None
    """Training script; null: the provided script for the model."""
    hosts: HostsConfig | None = None
    rehearsal: bool = False
    """The CPU ranks refuse what a machine with GPUs refuses; `launch --rehearse` sets it."""
    slurm: SlurmConfig = SlurmConfig()
    output_dir: Folder = "runs"
    """Folder of run directories."""
    timeout_s: PositiveFloat | None = None
    """Deadline of the whole run, in seconds."""


class LaunchFields(Section):
    """The sections of a launch config. `loading.LaunchConfig` adds the checks."""

    name: Name
    """Letters, digits, dots, dashes, underscores; names the run directory. Default: from the file name."""
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig
    data: DataConfig = DataConfig()
    overlap: OverlapFields = OverlapFields()
    launch: LaunchSection = LaunchSection()
    megatron_args: Annotated[tuple[Annotated[str, BeforeValidator(_argument)], ...], Field(strict=False)] = ()
    """Megatron arguments that have no key."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        hosts = self.launch.hosts
        return (self.launch.nodes if hosts is None else hosts.hosts) * self.ranks_per_node

    @property
    def ranks_per_node(self) -> int:
        """Ranks per node, or per host of `launch.hosts`."""
        if self.launch.hosts is not None:
            return self.launch.hosts.ranks_per_host
        return self.launch.ranks_per_node or max(1, self.parallel.model_size // self.launch.nodes)

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model."""
        return self.world_size // self.parallel.model_size

    @property
    def num_weight_copies(self) -> int:
        """Ranks with equal weights that reduce their gradients: data parallel x context parallel size."""
        return self.data_parallel_size * self.parallel.context

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per replica and iteration."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.data_parallel_size)
