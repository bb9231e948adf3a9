"""`megatron-overlap plan`: print and draw the layout of a batch of documents over the ranks, computed without a run."""

import io
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_overlap.config import ConfigError, load_launch_config
from megatron_overlap.config.errors import did_you_mean, writing
from megatron_overlap.config.resources import config_file
from megatron_overlap.schedules.varlen.balance import balance, describe, loads
from megatron_overlap.schedules.varlen.baselines import METHODS
from megatron_overlap.schedules.varlen.plan import Plan
from megatron_overlap.schedules.varlen.topology import FS_PER_US, Topology
from megatron_overlap.tools.document_lengths import DISTRIBUTIONS, read_lengths, sample

MOST_RANKS, MOST_PASSES = 64, 3
_WHOLE, _INK, _GRID = "#c9ced4", "#24292f", "#d0d7de"
_INTRA = ("#0072b2", "#009e73", "#56b4e9", "#2f6f5e")
_INTER = ("#d55e00", "#e69f00", "#cc79a7", "#a63d00")
_ATTENTION, _MESSAGE = "#5f6b76", "#d55e00"
_SPARE = 16
"""Without --capacity, a rank holds up to 1/16 more than its share of one pass."""


def plan(
    config: Annotated[
        list[str] | None,
        typer.Argument(
            help="Launch config (file or name of a shipped one) and key=value: gives ranks, nodes and tokens."
        ),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option("--lengths", help="File with one length per line, or folder of documents (one token per byte)."),
    ] = None,
    distribution: Annotated[
        str, typer.Option("--distribution", help=f"Without --lengths: {', '.join(DISTRIBUTIONS)}.")
    ] = "prolong",
    tokens: Annotated[int | None, typer.Option("--tokens", min=0, help="Tokens drawn from the distribution.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the draw.")] = 1,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, help="Number of ranks that share the batch.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Number of nodes.")] = None,
    nics: Annotated[int, typer.Option("--nics", min=1, help="Network cards per node.")] = 1,
    capacity: Annotated[
        int | None, typer.Option("--capacity", min=1, help="Largest number of tokens of a rank in one pass.")
    ] = None,
    method: Annotated[str, typer.Option("--method", help=f"One of {', '.join(METHODS)}.")] = "balanced",
    show: Annotated[int, typer.Option("--show", min=0, help="Number of ranks listed for each pass.")] = 16,
    png: Annotated[Path | None, typer.Option("--png", help="File for a picture of the layout.")] = None,
) -> int:
    """Print and draw the layout of a batch of documents over the ranks: rings, load of every rank, balance."""
    if config:
        launch = load_launch_config(config_file(config[0]), config[1:])
        ranks = ranks or launch.data_parallel_size * launch.parallel.context
        nodes = nodes or min(launch.launch.nodes, ranks)
        tokens = launch.train.global_batch_size * launch.train.seq_length if tokens is None else tokens
    ranks, nodes = ranks or 8, nodes or 1
    if ranks % nodes:
        raise _wrong("--ranks", ranks, f"give a multiple of the {nodes} nodes")
    if method not in METHODS:
        raise _wrong("--method", method, did_you_mean(method, METHODS, "method"))
    if distribution not in DISTRIBUTIONS:
        raise _wrong("--distribution", distribution, did_you_mean(distribution, DISTRIBUTIONS, "distribution"))
    batch = _batch(lengths, distribution, 65536 * ranks if tokens is None else tokens, seed)
    share = -(-sum(batch) // ranks)
    topology = Topology(nodes, ranks // nodes, min(nics, ranks // nodes))
    try:
        result = METHODS[method](batch, topology, capacity=capacity or max(1, share + share // _SPARE), cost=None)
    except ValueError as error:
        raise _wrong(f"--method {method}", None, str(error)) from error
    print(describe(result, ranks=show))
    if png is not None:
        with writing("plan --png", png):
            png.write_bytes(draw(result))
        print(f"drawn: {png}")
    return 0


def _batch(path: Path | None, distribution: str, tokens: int, seed: int) -> list[int]:
    if path is None:
        return sample(distribution, tokens, seed)
    try:
        return read_lengths(path)
    except OSError as error:
        raise _wrong("--lengths", path, f"{error.strerror}; give a file or a folder that can be read") from error
    except ValueError as error:
        raise _wrong("--lengths", path, str(error)) from error


def _wrong(option: str, value: object, remedy: str) -> ConfigError:
    return ConfigError("command line", f"plan {option}", value, remedy)


def draw(layout: Plan) -> bytes:
    """The layout as a PNG: at most 64 ranks of at most three passes."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks, shown = min(layout.topology.ranks, MOST_RANKS), min(len(layout.passes), MOST_PASSES)
    height = 1.7 + shown * max(1.6, 0.13 * ranks + 0.6)
    figure: Any = Figure(figsize=(12, height), dpi=130, layout="constrained")
    axes = figure.subplots(shown, 2, width_ratios=(2.6, 1), squeeze=False, sharey="row")
    for index in range(shown):
        _draw_tokens(axes[index][0], layout, index, ranks)
        _draw_load(axes[index][1], layout, index, ranks)
    result = balance(layout)
    figure.suptitle(
        f"{layout.method}: {len(layout.lengths)} documents, {sum(layout.lengths):,} tokens on "
        f"{layout.topology.ranks} ranks; attention balance {result.attention:.3f}, with linear layers "
        f"{result.compute:.3f}; {len(layout.passes)} pass(es), {shown} drawn",
        fontsize=10.5,
        color=_INK,
        x=0.01,
        ha="left",
    )
    figure.legend(
        handles=[
            Patch(color=_WHOLE, label="whole documents"),
            Patch(color=_INTRA[0], label="part of a document, intra-node ring (one colour per ring)"),
            Patch(color=_INTER[0], label="part of a document, inter-node ring"),
        ],
        loc="outside lower left",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    out = io.BytesIO()
    figure.savefig(out, format="png", facecolor="white")
    return out.getvalue()


def _draw_tokens(axes: Any, layout: Plan, index: int, ranks: int) -> None:
    part = layout.passes[index]
    left = [0] * layout.topology.ranks
    for number, ring in enumerate(part.rings):
        palette = _INTER if ring.zone == "inter" else _INTRA
        members = [(position, rank) for position, rank in enumerate(ring.ranks) if rank < ranks]
        counts = [ring.tokens(position) for position, _ in members]
        rows = [rank for _, rank in members]
        starts = [left[rank] for rank in rows]
        axes.barh(rows, counts, left=starts, height=0.86, color=palette[number % 4], edgecolor="white", lw=0.3)
        for rank, count in zip(rows, counts, strict=True):
            left[rank] += count
    whole = [sum(layout.lengths[document] for document in part.local[rank]) for rank in range(ranks)]
    axes.barh(range(ranks), whole, left=left[:ranks], height=0.86, color=_WHOLE)
    for rank in range(ranks):
        ends, end = [], left[rank]
        for document in part.local[rank]:
            end += layout.lengths[document]
            ends.append(end)
        axes.vlines(ends, rank - 0.43, rank + 0.43, color="white", lw=0.4)
    axes.axvline(layout.capacity, color=_INK, lw=0.8, ls=":")
    axes.set_ylim(ranks - 0.4, -0.6)
    axes.set_ylabel("rank")
    _style_axes(axes, f"Pass {index}: tokens held (dotted: capacity)", layout, ranks)


def _draw_load(axes: Any, layout: Plan, index: int, ranks: int) -> None:
    table = loads(layout, index)
    mean = sum(load.attention_fs for load in table) / len(table) / FS_PER_US
    axes.barh(range(ranks), [load.attention_fs / FS_PER_US for load in table[:ranks]], height=0.86, color=_ATTENTION)
    axes.barh(range(ranks), [load.message_fs / FS_PER_US for load in table[:ranks]], height=0.3, color=_MESSAGE)
    axes.axvline(mean, color=_INK, lw=0.8, ls=":")
    _style_axes(axes, "modelled time, us: attention, messages (thin); dotted: mean", layout, ranks)


def _style_axes(axes: Any, title: str, layout: Plan, ranks: int) -> None:
    axes.set_title(title, fontsize=8.5, loc="left", color=_INK)
    axes.grid(axis="x", color=_GRID, lw=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=7.5, length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    for boundary in range(layout.topology.devices_per_node, ranks, layout.topology.devices_per_node):
        axes.axhline(boundary - 0.5, color=_INK, lw=0.5)
