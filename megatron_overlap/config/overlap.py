"""The `overlap` section: what is overlapped and how. Needed by every layer above, so it stands alone."""

from __future__ import annotations

from typing import Literal

from megatron_overlap.config.types import NonNegative, Positive, PositiveFloat, Section, Text


class TensorOverlap(Section):
    """Overlap of the all-gathers, reduce-scatters and all-reduces of tensor parallelism."""

    method: Literal["auto", "p2p", "fused", "none"] = "auto"
    """p2p: point-to-point messages between partial GEMMs; fused: kernels that read and write peers' memory, on one
    host's NVIDIA GPUs, p2p by name elsewhere; none: Megatron's own; auto: the fastest of all, measured in the run."""
    kernels: Literal["portable", "hopper"] = "portable"
    """Whose GEMMs fused runs: those for every GPU from sm_80 on, or, on sm_90 and after a trial on the device, those
    with TMA and a warp of its own for loads, which nobody has run yet; auto then measures both."""
    autotune_cache: Text | None = "~/.cache/megatron_overlap/autotune"
    """Folder with the autotuning results of earlier runs; null reads and writes none."""
    schedule: Literal["auto", "ring", "direct", "serial"] = "auto"
    """Who sends which chunk when; serial: as direct, but nothing is computed meanwhile, to measure against."""
    chunks_per_rank: Literal["auto"] | Positive = "auto"
    """Sub-slices each rank's rows are cut into; more of them leave less communication exposed."""
    recompute_gather: Literal["auto", "always", "never"] = "auto"
    """Whether the backward gathers the input again instead of keeping it."""
    attention: Literal["row", "query_split"] = "row"
    """row: attention, then the overlapped projection; query_split: both slice by slice, with flash attention."""
    split: Literal["none", "batch"] = "none"
    """batch: batch overlap (Domino): a transformer layer computes one half of the micro-batch during the all-reduce of
    the other half. Needs p2p, no sequence parallelism and an even micro-batch size."""
    joint_mlp: Literal["auto", "none"] = "auto"
    """auto: with p2p and without sequence parallelism, run both linear layers of an MLP block by block of rows, so that
    both GEMMs hide the all-reduce; none: overlap each linear layer alone."""


class DataOverlap(Section):
    """Overlap of data parallel gradient reduction and parameter gathering."""

    method: Literal["auto", "p2p", "stock", "none"] = "auto"
    """p2p: point-to-point messages; stock: Megatron's collectives; auto: p2p, or stock where p2p is not supported. All
    three turn Megatron's overlap flags on; none: no overlap."""
    accumulate: Literal["auto", "fp32"] = "auto"
    """fp32: narrow gradients are summed in fp32 and rounded once; auto: in their own type, as collectives do."""


class UlyssesOverlap(Section):
    """Ulysses attention, which gives the local layers context parallelism, and the overlap of its all-to-alls."""

    method: Literal["auto", "p2p", "none"] = "none"
    """p2p: point-to-point messages between head groups; auto: the best available; none: no Ulysses."""
    schedule: Literal["auto", "direct", "serial"] = "auto"
    """serial: as direct, but nothing is computed while messages travel, to measure against."""
    head_groups: Literal["auto"] | Positive = "auto"
    """Groups each rank's heads are cut into; more of them leave less communication exposed."""
    fuse_projections: bool = True
    """Where it can be done, QKV and output projections run by head groups too, and hide the first and the last one."""


class VarlenOverlap(Section):
    """Documents of different lengths as they are, and attention that is balanced over the context ranks."""

    method: Literal["balanced", "ring", "all_gather", "masked", "none"] = "none"
    """balanced: documents on as few ranks as keep the load even. To measure and check against: ring and all_gather,
    every document over all ranks, and masked, all documents of a row on one rank by Megatron's own attention."""
    capacity: Literal["auto"] | Positive = "auto"
    """Most tokens of a rank in attention; auto: 1/16 above its share of train.seq_length."""
    nodes: Literal["auto"] | Positive = "auto"
    """Nodes that the ranks of a context group are on; auto: as their host names say."""
    nics_per_node: Positive = 1
    """Network cards of a node."""
    intra_gbps: PositiveFloat = 360.0
    """What one rank sends to another of its node, in gigabytes a second."""
    inter_gbps: PositiveFloat = 48.0
    """What one network card sends, in gigabytes a second."""
    routing: bool = True
    """Whether a transfer between nodes may use all their cards."""


class CheckOverlap(Section):
    """Running both paths on the real tensors, the plugin's and the plain one, and comparing them."""

    every: NonNegative = 0
    """Steps from one checked step to the next; 0 checks none."""
    rtol: Literal["derived"] | PositiveFloat = "derived"
    """derived: the bound of docs/numerics.md, from the error of the plain path itself; a number: largest difference
    from the plain path, as a share of its largest element."""
    on_mismatch: Literal["error", "fallback"] = "error"
    """error: raise on every rank of the group; fallback: use the reference result, and from then on the stock path for
    that operation."""


class OverlapFields(Section):
    """The keys of the `overlap` section. `loading.OverlapConfig` adds how they are read from a file."""

    tensor: TensorOverlap = TensorOverlap()
    data: DataOverlap = DataOverlap()
    ulysses: UlyssesOverlap = UlyssesOverlap()
    varlen: VarlenOverlap = VarlenOverlap()
    strict: bool = False
    """Turn every fallback to Megatron's own path into an error."""
    timeout_s: PositiveFloat | None = None
    """Deadline of one wait for a peer, in seconds; null is the process group's own."""
    deterministic: bool = False
    """The same bits from run to run and across restarts: what is summed in which order depends on the plan alone, never
    on what arrives first."""
    check: CheckOverlap = CheckOverlap()
    register_buffers: bool = False
    """NCCL: take buffers of messages from NCCL's own allocator and register them with the messages' communicator."""
    trace: bool = False
    """Record when each rank computed, waited and sent, into the run directory; see `megatron-overlap trace`."""
