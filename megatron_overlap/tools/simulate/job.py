"""The simulated training step: a model, its parallel layout and its overlap methods."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_overlap.config import LaunchConfig, ModelConfig
from megatron_overlap.config.cluster import Precision
from megatron_overlap.config.megatron_args import (
    EXPERT_PARALLEL,
    TWO_MICROBATCHES,
    UNEVEN_STAGES,
    flags_in,
    number_after,
)
from megatron_overlap.schedules.plan import Pattern
from megatron_overlap.tools.compare.flops import (
    EXPERTS_FLAG,
    VOCABULARY_MULTIPLE,
    ExpertShape,
    expert_shape,
    known_model,
    padded_vocab_size,
    token_flops,
    vocabulary_multiple,
)
from megatron_overlap.tools.simulate.linear import LinearOverlap

Split = Literal["none", "batch", "sequence"]
ExpertOverlap = Literal["none", "p2p", "auto"]
Recompute = Literal["none", "selective", "full", "needed", "half"]
"""Activation recomputation. Megatron has none, selective (attention) and full. `needed`, of a compiler, is full without
FC2 and the addition after it. `half` is torchtitan's selective "op": the keys, the second half of the gate and all
elementwise operations."""

_LAYERS_FLAG = "--num-layers-per-virtual-pipeline-stage"
_EXPERT_TENSOR = "--expert-tensor-parallel-size"


@dataclass(frozen=True)
class Experts:
    """Experts in place of the MLP of each layer. No expert is divided; all experts get equally many tokens."""

    shape: ExpertShape
    parallel: int = 1  # consecutive ranks that share them
    overlap: ExpertOverlap = "none"  # the stock path; p2p is the plugin, auto p2p if faster
    copies: bool = True  # the plugin sends by the copy engines of the link, if it has some

    @property
    def local(self) -> int:
        """Experts of one rank."""
        return self.shape.count // self.parallel


@dataclass(frozen=True)
class Job:
    """One training step of a model.

    `tensor`, `context`, `pipeline` and `data` are sizes of the parallel groups. Rank order as in Megatron: tensor,
    context, data, pipeline. `split` are parts of a micro-batch whose messages overlap each other's computation; auto:
    those that the layout supports, if they are faster than separate layers.
    """

    model: ModelConfig
    seq_length: int
    micro_batch_size: int  # sequences per micro-batch
    global_batch_size: int  # sequences per step over all replicas
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    virtual: int = 1  # model chunks per pipeline stage; 1 is 1F1B without interleaving
    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    recompute: Recompute = "none"
    recompute_output: Literal["skip", "compute"] = "skip"  # see `config.overlap.TensorOverlap`
    precision: Precision = "bf16"
    tensor_overlap: LinearOverlap = LinearOverlap()
    split: Split | Literal["auto"] = "none"
    data_overlap: Literal["none", "stock"] = "stock"  # Megatron's overlap flags for gradients and parameters
    gradient_bytes: int = 4  # of one gradient element in memory and in the reduction
    vocabulary_multiple: int = VOCABULARY_MULTIPLE  # divides the rows of the embedding on each tensor parallel rank
    bucket_parameters: int | None = None  # smallest number of a gradient bucket; None: Megatron's default
    experts: Experts | None = None
    materializes_scores: bool = False  # attention is two products and a softmax with all scores in memory
    fused_accumulation: bool = True  # whether the wgrad GEMM accumulates into the main gradient

    def __post_init__(self) -> None:
        for impossible, text in _checks(self):
            if impossible:
                raise ValueError(text)

    @property
    def world_size(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of each replica."""
        return self.global_batch_size // (self.micro_batch_size * self.data)

    @property
    def layers_per_chunk(self) -> int:
        return self.model.num_layers // (self.pipeline * self.virtual)

    @property
    def rows(self) -> int:
        """Tokens of one micro-batch on one context rank: rows of a gathered activation."""
        return self.micro_batch_size * self.seq_length // self.context

    @property
    def used_split(self) -> Split:
        """`split`, or what `auto` measures; none if the plugin does not split the layers of this layout."""
        splits: dict[Split, bool] = {
            "batch": self.micro_batch_size % 2 == 0,
            "sequence": self.seq_length >= 2 * self.tensor and self.context == 1,
        }
        recompute = self.recompute in ("none", "selective", "full")
        supported = self.tensor > 1 and self.sequence_parallel and recompute and self.experts is None
        used = (split for split, divisible in splits.items() if divisible and self.split in (split, "auto"))
        return next(used, "none") if supported else "none"

    @property
    def hidden_elements(self) -> float:
        """Elements of an activation of one micro-batch on one rank outside the linear layers."""
        return self.rows * self.model.hidden_size / (self.tensor if self.sequence_parallel else 1)

    @property
    def vocabulary(self) -> int:
        """Rows of the padded embedding over all tensor ranks."""
        return padded_vocab_size(self.model.vocab_size, self.tensor, self.vocabulary_multiple)

    @property
    def table_parameters(self) -> int:
        """Parameters of the embedding, or of the output layer, over all tensor ranks."""
        return self.vocabulary * self.model.hidden_size

    @property
    def tokens(self) -> int:
        return self.global_batch_size * self.seq_length

    def flops(self) -> float:
        """Model FLOPs of a step, in the convention of `tools.compare.flops`."""
        experts = None if self.experts is None else self.experts.shape
        token = token_flops(self.model, self.seq_length, self.vocabulary, experts)
        return sum(token.values()) * self.tokens

    def layer_parameters(self) -> int:
        """Parameters of one layer over all tensor ranks, without those of experts that ranks share."""
        model = self.model
        attention = 2 * model.head_size * (model.num_attention_heads + model.num_query_groups)
        router = 0 if self.experts is None else model.hidden_size * self.experts.shape.count
        mlp = self._mlp_parameters(model.ffn_hidden_size if self.experts is None else self.experts.shape.shared)
        return model.hidden_size * attention + mlp + 2 * model.hidden_size + router

    def expert_parameters(self) -> int:
        """Parameters of the experts of one rank in one layer."""
        experts = self.experts
        return 0 if experts is None else experts.local * self._mlp_parameters(experts.shape.ffn_hidden_size)

    def _mlp_parameters(self, ffn_hidden_size: int) -> int:
        return (3 if self.model.swiglu else 2) * self.model.hidden_size * ffn_hidden_size

    @property
    def expert_data(self) -> int:
        """Ranks that have the same experts."""
        if self.experts is None:
            return self.context * self.data
        return self.tensor * self.context * self.data // self.experts.parallel

    def stage_expert_parameters(self) -> float:
        """Parameters of the experts of one rank of a pipeline stage."""
        return self.expert_parameters() * self.model.num_layers / self.pipeline

    def updated_parameters(self, stage: int) -> float:
        """Parameters that one rank of a pipeline stage updates."""
        experts = self.stage_expert_parameters()
        dense = self.stage_parameters(stage) - experts
        if not self.distributed_optimizer:
            return dense + experts
        return dense / (self.data * self.context) + experts / self.expert_data

    def stage_parameters(self, stage: int) -> float:
        """Parameters of one rank of a pipeline stage."""
        layers = self.layer_parameters() * self.model.num_layers / self.pipeline
        first, last = stage == 0, stage == self.pipeline - 1
        tables = first + last if self.model.untie_embeddings or self.pipeline > 1 else 1
        ends = self.table_parameters * tables * (first or last)
        return (layers + ends) / self.tensor + self.stage_expert_parameters()

    def stage_tensors(self, stage: int) -> int:
        """Number of parameter tensors of a pipeline stage."""
        model = self.model
        norms = 2 if model.normalization == "LayerNorm" else 1
        linears = 4 * (1 + model.add_bias) + (model.add_qkv_bias and not model.add_bias)
        ends = (stage == 0) * (2 - model.rotary) + (stage == self.pipeline - 1) * (norms + model.untie_embeddings)
        return (2 * norms + linears) * model.num_layers // self.pipeline + ends

    def label(self) -> str:
        """Short name of the layout, such as `tp8 cp1 pp4 dp2`."""
        text = f"tp{self.tensor} cp{self.context} pp{self.pipeline} dp{self.data}"
        return f"{text} vp{self.virtual}" if self.virtual > 1 else text


def _checks(job: Job) -> Iterator[tuple[bool | int, str]]:
    """Whether a layout is impossible, and the reason: `field: value: remedy`."""
    model = job.model
    if job.experts is not None:
        count, parallel, ranks = job.experts.shape.count, job.experts.parallel, job.tensor * job.context * job.data
        remedy = f"must be a multiple of {EXPERT_PARALLEL} {parallel}"
        yield count % parallel, f"megatron_args: {EXPERTS_FLAG} {count}: {remedy}"
        remedy = f"must divide the {ranks} ranks of a pipeline stage"
        yield ranks % parallel, f"megatron_args: {EXPERT_PARALLEL} {parallel}: {remedy}"
    for name in ("num_attention_heads", "num_query_groups", "hidden_size", "ffn_hidden_size"):
        size = getattr(model, name)
        yield size % job.tensor, f"model.{name}: {size}: must be a multiple of parallel.tensor {job.tensor}"
    chunks = job.pipeline * job.virtual
    remedy = f"must be a multiple of pipeline stages x chunks = {chunks}"
    yield model.num_layers % chunks, f"model.num_layers: {model.num_layers}: {remedy}"
    split = (2 * job.context if job.context > 1 else 1) * (job.tensor if job.sequence_parallel else 1)
    yield job.seq_length % split, f"train.seq_length: {job.seq_length}: must be a multiple of {split}"
    batch, sequences = job.global_batch_size, job.micro_batch_size * job.data
    yield batch % sequences, f"train.global_batch_size: {batch}: must be a multiple of {sequences}"
    needed = f"interleaving needs pipeline stages, and {job.num_microbatches} micro-batches divisible by them"
    interleaved = job.virtual > 1 and (job.pipeline == 1 or job.num_microbatches % job.pipeline)
    yield interleaved, f"parallel.pipeline: {job.pipeline}: {needed}"


def job_of(config: LaunchConfig) -> Job:
    """The job of a launch config. `overlap.tensor.method`: p2p is the plugin, none the stock path, auto the faster one.

    Raises ValueError if the simulator does not model the model or the layout of the config.
    """
    known_model(config.megatron_args)
    tensor, parallel, train = config.overlap.tensor, config.parallel, config.train
    overlap = LinearOverlap("stock")
    if tensor.method in ("auto", "p2p") and parallel.sequence_parallel:
        chunks = None if tensor.chunks_per_rank == "auto" else tensor.chunks_per_rank
        copies = config.overlap.transport != "nccl"
        pattern: Pattern = "direct" if tensor.schedule == "auto" else tensor.schedule
        overlap = LinearOverlap(tensor.method, pattern, chunks, copies=copies)
    elif tensor.method == "fused" and parallel.sequence_parallel:
        overlap = LinearOverlap("fused")
    return Job(
        model=config.model,
        seq_length=train.seq_length,
        micro_batch_size=train.micro_batch_size,
        global_batch_size=train.global_batch_size,
        tensor=parallel.tensor,
        context=parallel.context,
        pipeline=parallel.pipeline,
        data=config.data_parallel_size,
        virtual=_virtual(config),
        sequence_parallel=parallel.sequence_parallel,
        distributed_optimizer=train.distributed_optimizer,
        recompute=train.recompute,
        recompute_output=tensor.recompute_output,
        precision=train.precision,
        tensor_overlap=overlap,
        split="none" if tensor.split == "auto" and tensor.method != "auto" else tensor.split,
        data_overlap="none" if config.overlap.data.method == "none" else "stock",
        gradient_bytes=_gradient_bytes(config),
        vocabulary_multiple=vocabulary_multiple(config),
        bucket_parameters=number_after("--ddp-bucket-size", config.megatron_args),
        experts=_experts(config),
        materializes_scores=config.launch.device == "cpu",
        fused_accumulation=config.launch.device != "cpu" and train.gradient_accumulation_fusion is not False,
    )


def _gradient_bytes(config: LaunchConfig) -> int:
    """Megatron keeps and reduces gradients in fp32 by default in bf16 trainings only."""
    args, precision = config.megatron_args, config.train.precision
    if precision == "bf16":
        return 2 if "--grad-reduce-in-bf16" in args else 4
    return 2 if precision == "fp16" and "--accumulate-allreduce-grads-in-fp32" not in args else 4


def _experts(config: LaunchConfig) -> Experts | None:
    shape, args = expert_shape(config), config.megatron_args
    if shape is None:
        return None
    tensor = number_after(_EXPERT_TENSOR, args) or config.parallel.tensor
    if tensor > 1:
        raise ValueError(f"megatron_args: {_EXPERT_TENSOR} {tensor}: the simulator models 1 only")
    if TWO_MICROBATCHES in args:
        raise ValueError(f"megatron_args: {TWO_MICROBATCHES}: the simulator does not model it")
    overlap = config.overlap
    return Experts(shape, config.expert_parallel_size, overlap.expert.method, overlap.transport != "nccl")


def _virtual(config: LaunchConfig) -> int:
    """Model chunks per stage from `megatron_args`; launch configs have no key for them."""
    for index, flag in flags_in(config.megatron_args):
        if flag in UNEVEN_STAGES:
            raise ValueError(f"megatron_args.{index}: {flag}: the simulator models equal stages only")
    stages = number_after("--num-virtual-stages-per-pipeline-rank", config.megatron_args)
    layers_each = number_after(_LAYERS_FLAG, config.megatron_args)
    if stages is not None or layers_each is None:
        return stages or 1
    layers = config.model.num_layers // config.parallel.pipeline
    if layers % layers_each:
        index = next(index for index, flag in flags_in(config.megatron_args) if flag == _LAYERS_FLAG)
        raise ValueError(f"megatron_args.{index}: {layers_each}: must divide the {layers} layers of a stage")
    return layers // layers_each
