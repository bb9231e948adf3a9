"""Every key of a launch config, its type, default and unit. Pure: no torch, no megatron, no files.

Sections are frozen and refuse unknown keys; types are strict, so that `"8"` or `true` never becomes a number.
What one key cannot know (heads against tensor ranks, ...) is checked in `checks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from megatron_overlap.config.errors import Problem, did_you_mean, raise_first
from megatron_overlap.config.model_presets import ARCHITECTURES, PRESETS
from megatron_overlap.config.overlap import OverlapFields
from megatron_overlap.config.types import (
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


def _argument(value: object) -> object:
    """YAML reads `--lr 0.1` split into a list as a text and a number; a command line has texts only."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return value


class ModelConfig(Section):
    """The model: a preset, the fields themselves, or a preset with some fields changed."""

    preset: str | None = None
    """Name of a shape in presets.py; keys written beside it win."""
    arch: Literal["gpt", "llama"]
    num_layers: Positive
    hidden_size: Positive
    ffn_hidden_size: Positive
    """Left out: 4 x hidden_size, or with SwiGLU 8/3 x hidden_size rounded down to a multiple of 64."""
    num_attention_heads: Positive
    num_query_groups: Positive
    """Key/value heads; left out: num_attention_heads."""
    kv_channels: Positive | None = None
    """Size of one head; null: hidden_size / num_attention_heads."""
    vocab_size: Annotated[int, Field(ge=2)]
    """Number of token ids, end-of-document included, before Megatron pads it."""
    max_position_embeddings: Positive
    normalization: Literal["LayerNorm", "RMSNorm"]
    norm_epsilon: PositiveFloat = 1e-5
    swiglu: bool
    rotary: bool
    """Rotary position embedding; false: learned absolute positions."""
    rotary_base: Positive = 10000
    untie_embeddings: bool
    add_bias: bool
    """Biases of the linear layers."""
    add_qkv_bias: bool = False
    """A bias of the QKV projection alone, where add_bias is false."""
    hidden_dropout: Fraction = 0.0
    attention_dropout: Fraction = 0.0
    init_method_std: PositiveFloat = 0.02

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, given: Any) -> Any:
        """Put the preset and the architecture's defaults under the given keys."""
        if not isinstance(given, Mapping):
            return given
        preset = given.get("preset")
        if isinstance(preset, str) and preset not in PRESETS:
            raise_first(iter([Problem("preset", preset, did_you_mean(preset, PRESETS, "preset"))]))
        shape = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
        written = {key: value for key, value in given.items() if value is not None}
        merged: dict[str, Any] = {**shape, **written}
        arch = merged.get("arch")
        if isinstance(arch, str):
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
    """How the model is split. The data parallel size is what the ranks leave."""

    tensor: Positive = 1
    context: Positive = 1
    pipeline: Positive = 1
    sequence_parallel: bool = False

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model."""
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
    """Length of the decay; null: iterations. Set it when a run is to be continued with more iterations."""
    lr_warmup_iterations: NonNegative = 0
    weight_decay: NonNegativeFloat = 0.01
    clip_grad: NonNegativeFloat = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    seed: Positive = 1234
    distributed_optimizer: bool = False
    gradient_accumulation_fusion: bool | None = None
    """Accumulate weight gradients inside the GEMM; null: as Megatron does on cuda, never on cpu."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Whose layers; the overlap reaches the local ones."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation; full: every layer."""
    eval_interval: Positive = 1000
    eval_iterations: NonNegative = 0
    log_interval: Positive = 1
    save: Text | None = None
    """Folder for checkpoints."""
    save_interval: Positive | None = None
    """Iterations between checkpoints; null with a folder: at the end."""
    load: Text | None = None
    """Folder to continue from."""
    checkpoint_format: Literal["torch", "torch_dist"] = "torch_dist"


class DataConfig(Section):
    """What the model reads. Paths are relative to the folder the command is started in."""

    kind: Literal["mock", "indexed", "text"] = "mock"
    """mock: made up; indexed: a Megatron .bin/.idx pair; text: a folder made by scripts/prepare_data.py."""
    path: Text | None = None
    """indexed: the prefix of the pair (or one of its files); text: the folder."""
    split: Text | None = None
    """Weights of training, validation and test; null: 969,30,1, or without evaluation all is for training."""
    workers: NonNegative | None = None
    """Data loader processes of each rank; null: 2 on cuda, none on cpu."""


class HostsConfig(Section):
    """Several hosts on this machine, as network namespaces with links of a limited rate."""

    hosts: Positive
    ranks_per_host: Positive = 1
    gbps: Annotated[float, Field(ge=0.001, le=100)]
    """Rate of each host's link in each direction, in Gbit/s."""
    latency_ms: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Delay added to each direction, in milliseconds; needs netem in the kernel where it is not 0."""
    burst_kib: Positive | None = None
    """What the rate limiter lets through at once after a pause, in KiB; null: what suits the rate."""
    fallback: Literal["error", "loopback"] = "error"
    """What to do where this machine cannot make namespaces."""


class SlurmConfig(Section):
    """What `launch --emit-slurm` writes into the batch file, beside what follows from the other keys."""

    tasks: Literal["torchrun", "ranks"] = "torchrun"
    """torchrun: one task on each node, which starts its ranks; ranks: one task for each rank."""
    account: Text | None = None
    partition: Text | None = None
    time: Text | None = None
    """Time limit, as Slurm writes it: 04:00:00."""
    directives: tuple[Text, ...] = Field(default=(), strict=False)
    """Further options of sbatch, as `--exclusive`; one line each."""
    setup: tuple[Text, ...] = Field(default=(), strict=False)
    """Shell lines that every task runs before Python, as `source .venv/bin/activate`."""
    python: Text = "python"
    """The Python of the tasks, as it is called on the nodes or in the container."""
    container_image: Text | None = None
    """Image for srun's --container-image (enroot with pyxis); null: no container."""
    container_mounts: tuple[Text, ...] = Field(default=(), strict=False)
    """SOURCE:TARGET; the folder the batch file is submitted in is mounted by itself."""


class LaunchSection(Section):
    """Where the ranks run."""

    device: Literal["cuda", "cpu"] = "cuda"
    nodes: Positive = 1
    ranks_per_node: Positive | None = None
    """null: as many as one copy of the model needs, or what `hosts` says."""
    threads_per_rank: Positive = 1
    """CPU threads of each rank."""
    entry: Text | None = None
    """Training script; null: the provided one for model.arch."""
    hosts: HostsConfig | None = None
    slurm: SlurmConfig = SlurmConfig()
    output_dir: Folder = "runs"
    """Folder that gets one folder a run."""
    timeout_s: PositiveFloat | None = None
    """Longest time of the whole run, in seconds."""


class LaunchFields(Section):
    """The sections of a launch config. `loading.LaunchConfig` adds the checks and how they are read from a file."""

    name: Name
    """Letters, digits, dots, dashes and underscores: it names a folder."""
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig
    data: DataConfig = DataConfig()
    overlap: OverlapFields = OverlapFields()
    launch: LaunchSection = LaunchSection()
    megatron_args: Annotated[tuple[Annotated[str, BeforeValidator(_argument)], ...], Field(strict=False)] = ()
    """Further Megatron arguments, for what no key above says."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        if self.launch.hosts is not None:
            return self.launch.hosts.hosts * self.launch.hosts.ranks_per_host
        return self.launch.nodes * self.ranks_per_node

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node, or on each of `launch.hosts`."""
        if self.launch.hosts is not None:
            return self.launch.hosts.ranks_per_host
        if self.launch.ranks_per_node is not None:
            return self.launch.ranks_per_node
        return max(1, self.parallel.model_size // self.launch.nodes)

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model."""
        return self.world_size // self.parallel.model_size

    @property
    def num_weight_copies(self) -> int:
        """Ranks that hold the same weights and sum their gradients: data parallel and context parallel ones."""
        return self.data_parallel_size * self.parallel.context

    @property
    def num_microbatches(self) -> int:
        """Micro-batches each copy runs in one iteration."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.data_parallel_size)
