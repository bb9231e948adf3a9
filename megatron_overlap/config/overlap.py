"""The keys of the `overlap` section: overlap methods and their settings. Every package above imports them."""

from __future__ import annotations

from typing import Literal

from megatron_overlap.config.section import NonNegative, Positive, PositiveFloat, Section, Text


class TensorOverlap(Section):
    """Overlap of the all-gathers, reduce-scatters and all-reduces of tensor parallelism."""

    method: Literal["auto", "p2p", "fused", "none"] = "auto"
    """p2p: point-to-point messages between partial GEMMs; fused: kernels that read and write the memory of peers on
    NVIDIA GPUs of one host, with p2p as the fallback; none: the stock path; auto: the fastest method, measured in the
    run."""
    kernels: Literal["portable", "hopper"] = "portable"
    """GEMM kernels of fused. portable: for all GPUs since sm_80; hopper: warp-specialized kernels with TMA for sm_90,
    after a self-test on the device; auto then measures both. hopper: Not yet run on a GPU."""
    autotune_cache: Text | None = "~/.cache/megatron_overlap/autotune"
    """Folder with the autotuning results of earlier runs; null reads and writes none."""
    schedule: Literal["auto", "ring", "direct", "serial"] = "auto"
    """Message pattern: ring or direct; serial: as direct, but without concurrent computation, as a reference."""
    chunks_per_rank: Literal["auto"] | Positive = "auto"
    """Chunks per rank; more chunks expose less communication and cost more per-message overhead."""
    recompute_gather: Literal["auto", "always", "never"] = "auto"
    """Whether the backward gathers the input again instead of saving it."""
    attention: Literal["row", "query_split"] = "row"
    """row: attention, then the overlapped projection; query_split: both by slices of queries, with flash attention."""
    split: Literal["auto", "none", "batch"] = "auto"
    """batch: batch overlap (Domino): a transformer layer computes one half of the micro-batch during the all-reduce of
    the other half. Needs p2p or auto, no sequence parallelism and an even micro-batch size. auto: with method auto,
    where it is supported and measured to be faster."""
    joint_mlp: Literal["auto", "none"] = "auto"
    """auto: with p2p and without sequence parallelism, run both linear layers of an MLP block by block of rows, so that
    both GEMMs hide the all-reduce; none: overlap each linear layer alone."""


class DataOverlap(Section):
    """Overlap of data parallel gradient reduction and parameter gathering."""

    method: Literal["auto", "p2p", "stock", "none"] = "auto"
    """p2p: point-to-point messages; stock: Megatron's collectives; auto: p2p, or stock where p2p is not supported. All
    three turn Megatron's overlap flags on; none: no overlap."""
    accumulate: Literal["auto", "fp32"] = "auto"
    """fp32: accumulate bf16 and fp16 gradients in fp32 and round once; auto: in their dtype, as collectives do."""


class UlyssesOverlap(Section):
    """Ulysses attention: context parallelism of the local layers, and the overlap of its all-to-alls."""

    method: Literal["auto", "p2p", "none"] = "none"
    """p2p: point-to-point messages between head groups; auto: the fastest method; none: no Ulysses."""
    schedule: Literal["auto", "direct", "serial"] = "auto"
    """serial: as direct, but without concurrent computation, as a reference."""
    head_groups: Literal["auto"] | Positive = "auto"
    """Head groups per rank; more groups expose less communication."""
    fuse_projections: bool = True
    """Run the QKV and output projections by head groups too, if supported; they hide the first and last all-to-all."""


class VarlenOverlap(Section):
    """Variable-length attention: documents without padding, balanced over the context ranks."""

    method: Literal["balanced", "ring", "all_gather", "masked", "none"] = "none"
    """balanced: each document on the fewest ranks that keep the load balanced. Baselines: ring and all_gather shard
    every document over all ranks; masked runs all documents of a row on one rank with the stock attention."""
    capacity: Literal["auto"] | Positive = "auto"
    """Most attention tokens of one rank; auto: train.seq_length / context ranks plus 1/16."""
    nodes: Literal["auto"] | Positive = "auto"
    """Nodes of a context group; auto: from the host names."""
    nics_per_node: Positive = 1
    """NICs per node."""
    intra_gbps: PositiveFloat = 360.0
    """Intra-node bandwidth of one rank, in GB/s."""
    inter_gbps: PositiveFloat = 48.0
    """Bandwidth of one NIC, in GB/s."""
    routing: bool = True
    """Whether an inter-node transfer may use all NICs of its nodes."""


class CheckOverlap(Section):
    """Reference check: run the plugin and the plain program on the same tensors and compare the results."""

    every: NonNegative = 0
    """Interval between checked steps; 0: no checks."""
    rtol: Literal["derived"] | PositiveFloat = "derived"
    """derived: the bound of docs/numerics.md, from the error of the plain program; a number: largest difference
    relative to the largest element."""
    on_mismatch: Literal["error", "fallback"] = "error"
    """error: raise on every rank of the group; fallback: use the reference result, and from then on the stock path for
    that operation."""


class OverlapFields(Section):
    """The keys of the `overlap` section. `loading.OverlapConfig` adds `from_yaml`."""

    tensor: TensorOverlap = TensorOverlap()
    data: DataOverlap = DataOverlap()
    ulysses: UlyssesOverlap = UlyssesOverlap()
    varlen: VarlenOverlap = VarlenOverlap()
    strict: bool = False
    """Raise an error for every fallback to the stock path."""
    timeout_s: PositiveFloat | None = None
    """Timeout of a wait for a peer, in seconds; null: that of the process group."""
    deterministic: bool = False
    """Bitwise equal results in all runs and after restarts: the plan fixes the order of all sums, independently of the
    order of arrival."""
    check: CheckOverlap = CheckOverlap()
    register_buffers: bool = False
    """NCCL: allocate message buffers with NCCL's allocator and register them with the communicator."""
    trace: bool = False
    """Record computation, waits and messages of each rank in the run directory; see `megatron-overlap trace`."""
