"""The keys of the `overlap` section: overlap methods and their settings. Every package above imports them."""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import model_validator

from megatron_overlap.config.errors import Problem, raise_first
from megatron_overlap.config.section import NonNegative, Positive, PositiveFloat, PositiveFraction, Section, Text


class TensorOverlap(Section):
    """Overlap of the all-gathers, reduce-scatters and all-reduces of tensor parallelism."""

    method: Literal["auto", "p2p", "fused", "none"] = "auto"
    """p2p: messages between partial GEMMs; fused: kernels that access the memory of peers, with p2p as the fallback;
    none: the stock path; auto: the fastest, measured in the run."""
    kernels: Literal["portable", "hopper"] = "portable"
    """Kernels of fused. portable: sm_80 and newer; hopper: warp-specialized kernels with TMA on sm_90, after a
    self-test."""
    autotune_cache: Text | None = "~/.cache/megatron_overlap/autotune"
    """Folder of selections from earlier runs; null: none."""
    schedule: Literal["auto", "ring", "direct", "serial"] = "auto"
    """direct: each chunk goes straight to its destination; ring: to the neighbour; auto: ring on the CPU, else direct;
    serial: direct without overlap, as a reference."""
    chunks_per_rank: Literal["auto"] | Positive = "auto"
    """Messages per rank and operation. auto: at most 4, of at least 128 rows and 256 KiB, about 8 per operation."""
    recompute_output: Literal["skip", "compute"] = "skip"
    """skip: with p2p, full activation recomputation leaves out the last linear layer of each recomputed part, whose
    output is not read; compute: as stock Megatron."""
    attention: Literal["row", "query_split"] = "row"
    """query_split: attention and its output projection by slices of queries; row: the projection alone."""
    split: Literal["auto", "none", "batch", "sequence"] = "auto"
    """batch: batch overlap; needs p2p or auto, attention row, and an even micro-batch size; sequence: the same with two
    parts of each sequence, under sequence parallelism; auto: batch, else sequence, if measured as faster."""
    split_at: Literal["auto"] | PositiveFraction = "auto"
    """Share of a sequence in its first part; auto: both parts take about equally long."""


class DataOverlap(Section):
    """Overlap of data parallel gradient reduction and parameter gathering."""

    method: Literal["auto", "p2p", "stock", "none"] = "auto"
    """p2p: messages; stock: Megatron's collectives with its overlap flags; auto: stock on CUDA, else p2p, or stock as a
    counted fallback; none: without the flags."""
    accumulate: Literal["auto", "fp32"] = "auto"
    """fp32: add bf16 and fp16 gradients in fp32 and round once; auto: in their dtype, as collectives do."""


class UlyssesOverlap(Section):
    """Ulysses attention: context parallelism by heads, and the overlap of its all-to-alls."""

    method: Literal["auto", "p2p", "none"] = "none"
    """p2p, auto: Ulysses if there are context ranks; none: no Ulysses."""
    schedule: Literal["auto", "direct", "serial"] = "auto"
    """serial: the same messages without overlap, as a reference."""
    head_groups: Literal["auto"] | Positive = "auto"
    """Head groups per rank; auto: 2 to 8, with messages of 512 KiB or more."""
    fuse_projections: bool = True
    """Also run the projections by head groups, if supported."""


class ExpertOverlap(Section):
    """Overlap of the all-to-alls of expert parallelism with the experts."""

    method: Literal["auto", "p2p", "none"] = "none"
    """p2p: messages between the experts' GEMMs; none: the stock path; auto: the faster one of each layer, measured in
    the run."""
    schedule: Literal["direct", "serial"] = "direct"
    """serial: the same messages without overlap, as a reference."""


class VarlenOverlap(Section):
    """Variable-length attention: documents without padding, balanced over the context ranks."""

    method: Literal["balanced", "ring", "all_gather", "masked", "none"] = "none"
    """balanced: each document on the fewest ranks that balance the load. Baselines: ring and all_gather cut every
    document over all ranks; masked is stock attention on one rank."""
    capacity: Literal["auto"] | Positive = "auto"
    """Most attention tokens of a rank; auto: train.seq_length / context ranks plus 1/16."""
    nodes: Literal["auto"] | Positive = "auto"
    """Nodes of a context group; auto: from the host names."""
    nics_per_node: Positive = 1
    """NICs per node."""
    intra_gbps: PositiveFloat = 360.0
    """Bandwidth of one rank inside its node, in GB/s."""
    inter_gbps: PositiveFloat = 48.0
    """Bandwidth of one NIC, in GB/s."""
    routing: bool = True
    """A transfer between nodes may use all of their NICs."""


class CheckOverlap(Section):
    """Reference check: run the plugin and the plain program on the same tensors and compare the results."""

    every: NonNegative = 0
    """Steps between checks; 0: none."""
    rtol: Literal["derived"] | PositiveFloat = "derived"
    """derived: the bound of docs/numerics.md; a number: largest difference over the largest element."""
    on_mismatch: Literal["error", "fallback"] = "error"
    """error: raise on every rank of the group; fallback: the stock path for that operation from then on."""


class OverlapFields(Section):
    """The keys of the `overlap` section. `loading.OverlapConfig` adds `from_yaml`."""

    tensor: TensorOverlap = TensorOverlap()
    data: DataOverlap = DataOverlap()
    ulysses: UlyssesOverlap = UlyssesOverlap()
    expert: ExpertOverlap = ExpertOverlap()
    varlen: VarlenOverlap = VarlenOverlap()
    strict: bool = False
    """Every fallback to the stock path is an error."""
    timeout_s: PositiveFloat | None = None
    """Deadline of a wait for a peer, in seconds; null: that of the process group."""
    deterministic: bool | Literal["tp_invariant"] = False
    """true: bitwise reproducible runs: the plan alone fixes the order of all sums; tp_invariant: also the same logits
    on 1, 2 and 4 tensor parallel ranks."""
    check: CheckOverlap = CheckOverlap()
    transport: Literal["auto", "copies", "nccl"] = "auto"
    """Messages of tensor.method p2p, Ulysses, varlen, experts and gradients between GPUs: copies: copy engines write to
    the memory of peers; nccl: NCCL's kernels; auto: copies inside a host whose ranks reach each other, else NCCL."""
    register_buffers: bool = False
    """NCCL: allocate message buffers with NCCL's allocator and register them."""
    trace: bool = False
    """Record computation, waits and messages of each rank for `megatron-overlap trace`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.deterministic == "tp_invariant":
            raise_first(Problem("deterministic", self.deterministic, remedy) for remedy in _tree_rules(self.tensor))
        return self


def _tree_rules(tensor: TensorOverlap) -> Iterator[str]:
    if tensor.method not in ("auto", "p2p"):
        yield f"tensor.method {tensor.method} adds in another order; use p2p; tensor.schedule serial overlaps nothing"
    if tensor.schedule == "ring":
        yield "tensor.schedule ring adds in the order of its ranks; use direct"
    if tensor.split not in ("auto", "none"):
        yield f"tensor.split {tensor.split} adds in another order; use none"
    if tensor.attention != "row":
        yield f"tensor.attention {tensor.attention} adds in another order; use row"
