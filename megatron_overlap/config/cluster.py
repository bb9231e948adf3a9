"""Cluster profiles: the rates and latencies that `simulate` and the cost model use. Every number has a source."""

import itertools
import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megatron_overlap.config.errors import Problem, did_you_mean, raise_first, usage_error
from megatron_overlap.config.merge import compose
from megatron_overlap.config.resources import resource_folder
from megatron_overlap.config.section import Name, NonNegativeFloat, Positive, PositiveFloat, Section, Text, validate

Precision = Literal["fp32", "bf16", "fp16"]

_InLayers = Literal["rms_norm", "layer_norm", "add", "sum", "rotary", "repeat", "scores", "swiglu", "gelu"]
Elementwise = Literal[_InLayers, "loss", "accumulate", "clip", "update"]
"""Operations between GEMMs: fields of `ElementwiseRates`."""


class Sourced[T](Section):
    """A number and its source."""

    value: T
    source: Text


Figure = Sourced[PositiveFloat]
Share = Sourced[Annotated[float, Field(ge=0, le=1)]]
Cost = Sourced[NonNegativeFloat]


class PeakRates(Section):
    """Dense peak rates by dtype, in TFLOP/s; null: not supported or unknown."""

    bf16: Figure
    fp16: Figure | None = None
    fp32: Figure | None = None


class Tile(Section):
    """An output tile that one processor computes at a time."""

    rows: Positive
    columns: Positive
    rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Rate of a full wave of these tiles, relative to the best tiles."""


class RowRate(Section):
    """A measured point: the rate of a GEMM with few rows."""

    rows: Positive
    rate: Annotated[float, Field(gt=0, le=1)]
    """Rate per row relative to a large GEMM."""


class GemmProfile(Section):
    """GEMM efficiency by shape: full waves of tiles, or a measured table."""

    efficiency: Share
    """Fraction of the peak that full waves of the best tile reach."""
    processors: Positive
    """Streaming multiprocessors of a GPU, or CPU cores of one rank."""
    tiles: Annotated[tuple[Tile, ...], Field(strict=False)] = ()
    """Available tiles; none: no quantization."""
    rows: Annotated[tuple[RowRate, ...], Field(strict=False)] = ()
    """Measured rates by number of rows, interpolated in the logarithm; none: tiles only."""
    source: Text
    """Source of processors, tiles and table."""


class PassRates(Section):
    """Rate of a kind of elementwise operation, in GB/s of the bytes that `simulate` counts for it."""

    forward: PositiveFloat
    backward: PositiveFloat | None = None
    """null: as forward."""
    source: Text


class ElementwiseRates(Section):
    """Rates below `memory_gbps`, such as those of unfused operations on a CPU; null: `memory_gbps`."""

    rms_norm: PassRates | None = None
    layer_norm: PassRates | None = None
    add: PassRates | None = None
    sum: PassRates | None = None
    """Sum of the received terms of a reduce-scatter."""
    rotary: PassRates | None = None
    repeat: PassRates | None = None
    """Repetition of grouped keys and values for every query head."""
    scores: PassRates | None = None
    """Mask and softmax of attention with materialized scores."""
    swiglu: PassRates | None = None
    gelu: PassRates | None = None
    loss: PassRates | None = None
    accumulate: PassRates | None = None
    """Accumulation into Megatron's main gradients."""
    clip: PassRates | None = None
    """Zeroing, norm and scaling of the main gradients."""
    update: PassRates | None = None
    """Optimizer update."""


class DeviceProfile(Section):
    """One device: a GPU, or the CPU cores of one rank."""

    peak_tflops: PeakRates
    gemm: GemmProfile
    attention_forward: Share
    """Fraction of the peak of fused attention, causal half counted. If `elementwise` has a rate for scores: of
    the two products with materialized scores, all scores counted."""
    attention_backward: Share
    memory_gib: Figure
    memory_gbps: Figure
    """Memory bandwidth of kernels, in GB/s."""
    elementwise: ElementwiseRates = ElementwiseRates()
    launch_us: Cost
    """Cost of one kernel launch on the stream, in microseconds."""
    call_us: Cost | None = None
    """Host cost of one torch call, in microseconds, on a device without an asynchronous queue; null: hidden."""
    enqueue_us: Cost | None = None
    """Host cost of one point-to-point message on a device with an asynchronous queue; null: hidden."""
    optimizer_bytes: Figure
    """Bytes that the optimizer moves per parameter of its shard."""
    step_ms: Cost
    """Fixed cost of a step outside the model: data, logging, Python."""


class LinkProfile(Section):
    """Link between ranks. Rates are GB/s (10^9 bytes) in each direction."""

    latency_us: Cost
    """Fixed cost of one hop or message."""
    copy_gbps: Figure
    """Rate of the point-to-point messages of one rank."""
    collective_gbps: Figure
    """Bus bandwidth of ring collectives, per rank."""
    reduce_scatter_gbps: Figure | None = None
    """Bus bandwidth of reduce-scatters; null: as all-gathers."""
    all_reduce_gbps: Figure | None = None
    """Bandwidth of all-reduces relative to the bytes of an all-gather; null: a reduce-scatter and an all-gather."""


class CopyEngines(Section):
    """Copy engines that write to the memory of peers."""

    copy_us: Cost
    """Fixed cost of one copy, or of a batch of copies."""
    further_us: Cost
    """Fixed cost of each further copy of a batch."""
    flag_us: Cost
    """Cost of a flag on a queue, set or waited for."""


class InsideLink(LinkProfile):
    """Link between ranks of one node."""

    copy_engines: CopyEngines | None = None
    """They send the messages of linear layers between ranks of a node; null: NCCL's kernels, or threads."""


class HostRates(Section):
    """Upper bounds of the rates in GB/s by host work (copies, sums, network stack), for any line rate."""

    copy_gbps: Figure
    collective_gbps: Figure
    reduce_scatter_gbps: Figure
    all_reduce_gbps: Figure


class NodeLink(LinkProfile):
    """Link between nodes; rates are per NIC."""

    nics_per_node: Positive
    line_gbit: Figure | None = None
    """Line rate of the rates above, in Gbit/s, if `launch.hosts.gbps` can change it."""
    host: HostRates | None = None
    """Upper bounds of the rates above for any line rate; null: proportional to the line rate."""


class Lateness(Section):
    """Rank skew after a computation time since the last synchronization, in microseconds.

    A rank is late, and communication threads sleep.
    """

    computed_us: Figure
    late_us: Cost


class Contention(Section):
    """Slowdown of computation by concurrent communication."""

    collective: Share
    """Fraction of the compute rate that NCCL's kernels take: collectives and point-to-point messages."""
    copy_: Annotated[Share, Field(alias="copy")]
    """Fraction that copies by copy engines take."""
    host_us_per_mb: Cost
    """Compute time to move 10^6 bytes in one direction, if the processor moves them."""
    busy_us: Cost | None = None
    """Additional time of a message whose ranks compute, in microseconds: threads wait for a core; null: 0."""
    late: Annotated[tuple[Lateness, ...], Field(strict=False)] = ()
    """Linear between points from zero, and extrapolated beyond the last one. Empty: no skew."""


class ClusterProfile(Section):
    """A cluster of equal nodes."""

    name: Name
    description: Text
    devices_per_node: Positive
    device: DeviceProfile
    inside: InsideLink
    between: NodeLink
    contention: Contention

    @model_validator(mode="after")
    def _check(self) -> Self:
        rows = [point.rows for point in self.device.gemm.rows]
        times = [point.computed_us.value for point in self.contention.late]
        for key, what, points in (("device.gemm.rows", "rows", rows), ("contention.late", "computation time", times)):
            if any(a >= b for a, b in itertools.pairwise(points)):
                remedy = f"give the points in ascending order of {what}, each value once"
                raise_first([Problem(key, points, remedy)])
        return self

    def peak_tflops(self, precision: Precision) -> float:
        """Dense peak of one device. Raises ValueError if the profile has no peak for this precision."""
        figure: Figure | None = getattr(self.device.peak_tflops, precision)
        if figure is None:
            raise ValueError(f"train.precision: {precision}: the profile {self.name} has no peak for it; use bf16")
        return figure.value


def load_cluster_profile(name_or_path: str) -> ClusterProfile:
    """Read a profile from configs/clusters (by its file stem) or a YAML file.

    Raises ConfigError if it is missing or wrong.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = profile_folder() / f"{name_or_path}.yaml"
        if not path.is_file():
            names = sorted(file.stem for file in profile_folder().glob("*.yaml"))
            remedy = did_you_mean(name_or_path, names, "profile").removesuffix("?") + ", or give a YAML file"
            raise usage_error("simulate --cluster", name_or_path, remedy)
    return validate(ClusterProfile, compose(path))


def with_hosts(profile: ClusterProfile, gbps: float, ranks_per_host: int) -> ClusterProfile:
    """Return the profile with the line rate and the ranks of `launch.hosts`; unchanged if it has no line rate.

    Rates are proportional to the line rate up to the bounds of the hosts.
    """
    between = profile.between
    if between.line_gbit is None:
        return profile
    scale = gbps / between.line_gbit.value
    source = f"launch.hosts.gbps {gbps:g}: proportional to the line rate, up to the limits of the hosts"
    update = {"line_gbit": Figure(value=gbps, source=source)}
    for name in HostRates.model_fields:
        figure: Figure | None = getattr(between, name)
        if figure is not None:
            most = math.inf if between.host is None else getattr(between.host, name).value
            update[name] = Figure(value=min(figure.value * scale, most), source=source)
    return profile.model_copy(update={"between": between.model_copy(update=update), "devices_per_node": ranks_per_host})


def profile_folder() -> Path:
    """Folder of the shipped profiles."""
    return resource_folder("configs") / "clusters"
