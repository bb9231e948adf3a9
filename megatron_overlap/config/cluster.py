"""A machine as numbers: what `simulate` and the cost model know of a cluster. Pure: no torch, no megatron.

Every number stands beside its source, and a file without one is refused: a model is only as good as what it was told.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megatron_overlap.config.errors import ConfigError, Problem, did_you_mean, raise_first
from megatron_overlap.config.explain import validate
from megatron_overlap.config.merge import compose
from megatron_overlap.config.resources import resource_folder
from megatron_overlap.config.types import Name, Positive, Section, Text

Precision = Literal["fp32", "bf16", "fp16"]

Elementwise = Literal[
    "rms_norm",
    "layer_norm",
    "add",
    "bias",
    "rotary",
    "repeat",
    "scores",
    "swiglu",
    "gelu",
    "loss",
    "accumulate",
    "clip",
    "update",
]
"""Operations between GEMMs: fields of `ElementwiseRates`."""


class Figure(Section):
    """A number above zero and where it is from."""

    value: Annotated[float, Field(gt=0)]
    source: Text


class Share(Section):
    """A part of a whole, 0 to 1, and where it is from."""

    value: Annotated[float, Field(ge=0, le=1)]
    source: Text


class Cost(Section):
    """A number that may be zero, and where it is from."""

    value: Annotated[float, Field(ge=0)]
    source: Text


class PeakRates(Section):
    """Dense peak rates by type, in TFLOP/s; null: the device does not have it, or nobody looked."""

    bf16: Figure
    fp16: Figure | None = None
    fp32: Figure | None = None


class Tile(Section):
    """A tile of the output that one processor computes at a time."""

    rows: Positive
    columns: Positive
    rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Speed of a full wave of these tiles, as a part of a full wave of the best ones."""


class RowRate(Section):
    """A measured point: how fast a GEMM of few rows runs."""

    rows: Positive
    rate: Annotated[float, Field(gt=0, le=1)]
    """Its rate per row as a part of a large GEMM's."""


class GemmProfile(Section):
    """How near to the peak GEMMs of a shape come: full waves of tiles, or a measured table."""

    efficiency: Share
    """What full waves of the best tile reach of the peak."""
    processors: Positive
    """Streaming multiprocessors (GPU), or cores of one rank (CPU)."""
    tiles: Annotated[tuple[Tile, ...], Field(strict=False)] = ()
    """Tiles to choose from; none: no quantisation."""
    rows: Annotated[tuple[RowRate, ...], Field(strict=False)] = ()
    """Measured rates by number of rows, interpolated over the logarithm; none: tiles alone decide."""
    weight_gradient: Figure | None = None
    """Rate of `dy.T @ x`, where both operands are read across their rows; null: as of the others. 1 is full rows."""
    source: Text
    """Where processors, tiles and table are from."""


class PassRates(Section):
    """GB/s that a kind of operation between GEMMs reaches, of the bytes that `simulate` counts for it."""

    forward: Annotated[float, Field(gt=0)]
    backward: Annotated[float, Field(gt=0)] | None = None
    """None: as forward."""
    source: Text


class ElementwiseRates(Section):
    """Kinds of operations that are slower than their bytes ask for, as unfused ones on a CPU; null: `memory_gbps`."""

    rms_norm: PassRates | None = None
    layer_norm: PassRates | None = None
    add: PassRates | None = None
    bias: PassRates | None = None
    """A bias that is added to all rows, and its gradient, a sum over them; null: part of the GEMM."""
    rotary: PassRates | None = None
    repeat: PassRates | None = None
    """Grouped keys and values, written out for every query head."""
    scores: PassRates | None = None
    """Mask and softmax of attention that keeps its scores."""
    swiglu: PassRates | None = None
    gelu: PassRates | None = None
    loss: PassRates | None = None
    accumulate: PassRates | None = None
    """Gradients added to Megatron's main ones."""
    clip: PassRates | None = None
    """Main gradients zeroed, summed up and scaled."""
    update: PassRates | None = None
    """The optimizer."""


class ProductRates(Section):
    """TFLOP/s of the products of attention that keeps its scores, all of them counted, for heads of so many columns."""

    head: Positive
    forward: Annotated[float, Field(gt=0)]
    backward: Annotated[float, Field(gt=0)]
    source: Text


class DeviceProfile(Section):
    """One device: one GPU, or the CPU share of one rank."""

    peak_tflops: PeakRates
    gemm: GemmProfile
    attention_forward: Share
    """What a fused attention reaches of the peak, causal half counted; what the two products of one that keeps its
    scores reach, where `elementwise` has a rate for scores: all of them counted."""
    attention_backward: Share
    products: Annotated[tuple[ProductRates, ...], Field(strict=False)] = ()
    """What stands for the two above where scores are kept: the time of a score is a straight line between two sizes of
    heads, and beyond the last; narrower heads run at the rate of the first."""
    memory_gib: Figure
    memory_gbps: Figure
    """Memory bandwidth that kernels reach, in GB/s."""
    elementwise: ElementwiseRates = ElementwiseRates()
    launch_us: Cost
    """What one more kernel costs on the device's own stream, in microseconds."""
    call_us: Cost | None = None
    """What a call of the tensor library costs in the program around it, in microseconds, where a device has no queue to
    hide it behind; null: hidden."""
    optimizer_bytes: Figure
    """Bytes that the optimizer moves per parameter of its shard."""
    step_ms: Cost
    """What a step costs beside what is modelled: data, logging, Python."""


class LinkProfile(Section):
    """What joins ranks. Rates are GB/s (10^9 bytes) in each direction."""

    latency_us: Cost
    """Fixed cost of one hop or message."""
    copy_gbps: Figure
    """What one rank's point-to-point messages reach."""
    collective_gbps: Figure
    """Bus bandwidth of the library's ring collectives, per rank."""
    reduce_scatter_gbps: Figure | None = None
    """The same of reduce-scatters, where they are slower than all-gathers."""
    all_reduce_gbps: Figure | None = None
    """The same of all-reduces, counted as if they moved as much as an all-gather; null: they are a reduce-scatter and
    an all-gather."""
    shared_gbps: Figure | None = None
    """What all ranks of a node together can move; null: each has its own."""


class HostRates(Section):
    """GB/s that the hosts' own work in messages (copies, sums, the kernel's protocol) reaches on any line."""

    copy_gbps: Figure
    collective_gbps: Figure
    reduce_scatter_gbps: Figure
    all_reduce_gbps: Figure


class NodeLink(LinkProfile):
    """What joins nodes; rates are those of one NIC."""

    nics_per_node: Positive
    line_gbit: Figure | None = None
    """The line rate, in Gbit/s, at which the rates above hold, where `launch.hosts.gbps` can set another one."""
    host: HostRates | None = None
    """What the rates above never exceed, however fast the line; null: they go in proportion to it."""


class Lateness(Section):
    """By how much longer ranks wait for each other that all have computed for so long since they did so last: one of
    them is late, and threads that carry messages have fallen asleep. Microseconds."""

    computed_us: Figure
    late_us: Cost


class Beside(Section):
    """What computation loses beside so many messages: GB/s of both directions together, and part of its rate."""

    moved_gbps: Figure
    lost: Share


class Contention(Section):
    """What communication takes from computation that runs beside it."""

    collective: Share
    """Part of the compute rate that is lost while a collective runs."""
    copy_: Annotated[Share, Field(alias="copy")]
    """The same, while point-to-point messages or copy engines run."""
    host_us_per_mb: Cost
    """Compute time that moving 10^6 bytes in one direction takes where the processor itself moves them."""
    beside: Annotated[tuple[Beside, ...], Field(strict=False)] = ()
    """What stands for the three above where the processor moves the bytes: between points straight, from nothing on;
    beyond the last one as there. Empty: they count."""
    busy_us: Cost | None = None
    """What a message takes more, in microseconds, if its ranks compute: its threads wait for a core. null: nothing."""
    busy_collective_us: Cost | None = None
    """The same of a collective."""
    late: Annotated[tuple[Lateness, ...], Field(strict=False)] = ()
    """Between points straight, from nothing on; beyond the last one on as before it. None: not counted."""


class ClusterProfile(Section):
    """A cluster of equal nodes."""

    name: Name
    description: Text
    devices_per_node: Positive
    device: DeviceProfile
    inside: LinkProfile
    """Between ranks of one node."""
    between: NodeLink
    """Between nodes."""
    contention: Contention

    @model_validator(mode="after")
    def _check(self) -> Self:
        rows = [point.rows for point in self.device.gemm.rows]
        computed = [point.computed_us.value for point in self.contention.late]
        moved = [point.moved_gbps.value for point in self.contention.beside]
        heads = [point.head for point in self.device.products]
        for name, points, what in (
            ("device.gemm.rows", rows, "their rows, each number of rows"),
            ("device.products", heads, "columns of a head, each number"),
            ("contention.late", computed, "what was computed, each"),
            ("contention.beside", moved, "what is moved, each rate"),
        ):
            if any(a >= b for a, b in itertools.pairwise(points)):
                raise_first(iter([Problem(name, points, f"give the points in the order of {what} once")]))
        return self

    def peak_tflops(self, precision: Precision) -> float:
        """Dense peak of one device.

        Raises:
            ValueError: the profile has no figure for this precision.
        """
        figure: Figure | None = getattr(self.device.peak_tflops, precision)
        if figure is None:
            raise ValueError(f"train.precision: {precision}: the profile {self.name} has no peak for it; use bf16")
        return figure.value


def load_cluster_profile(name_or_path: str) -> ClusterProfile:
    """Read a profile: a name from configs/clusters, or a YAML file.

    Raises:
        ConfigError: there is no such profile, or something in it is wrong.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = profile_folder() / f"{name_or_path}.yaml"
        if not path.is_file():
            remedy = did_you_mean(name_or_path, profile_names(), "profile").removesuffix("?") + ", or give a YAML file"
            raise ConfigError("command line", "simulate --cluster", name_or_path, remedy)
    composed = compose(path, (), ())
    return validate(ClusterProfile, composed)


def with_hosts(profile: ClusterProfile, gbps: float, ranks_per_host: int) -> ClusterProfile:
    """The profile with the line rate and the ranks of `launch.hosts`; unchanged where it names no line rate.

    Rates go in proportion to the line's, as far as the hosts' own allow.
    """
    between = profile.between
    if between.line_gbit is None:
        return profile
    scale = gbps / between.line_gbit.value
    source = f"launch.hosts.gbps {gbps:g}, in proportion as far as the hosts allow"
    update = {"line_gbit": Figure(value=gbps, source=source)}
    for name in HostRates.model_fields:
        figure: Figure | None = getattr(between, name)
        if figure is not None:
            most = math.inf if between.host is None else getattr(between.host, name).value
            update[name] = Figure(value=min(figure.value * scale, most), source=source)
    return profile.model_copy(update={"between": between.model_copy(update=update), "devices_per_node": ranks_per_host})


def profile_names() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(path.stem for path in profile_folder().glob("*.yaml"))


def profile_folder() -> Path:
    """The folder with the profiles."""
    return resource_folder("configs") / "clusters"
