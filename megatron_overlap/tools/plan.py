"""`megatron-overlap plan`: print the layout of a batch of documents over the ranks, computed without a run."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_overlap.config import ConfigError, load_launch_config
from megatron_overlap.config.errors import did_you_mean
from megatron_overlap.config.resources import config_file
from megatron_overlap.schedules.varlen.balance import describe
from megatron_overlap.schedules.varlen.baselines import METHODS
from megatron_overlap.schedules.varlen.topology import Topology
from megatron_overlap.tools.document_lengths import DISTRIBUTIONS, read_lengths, sample

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
) -> int:
    """Print the layout of a batch of documents over the ranks: rings, load of every rank, balance."""
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
