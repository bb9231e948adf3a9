"""`megatron-overlap plan`: print the layout of a batch of documents over the ranks, computed without a run."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from megatron_overlap.config import load_launch_config
from megatron_overlap.config.errors import did_you_mean, usage_error
from megatron_overlap.config.resources import config_file
from megatron_overlap.schedules.varlen.partition import METHODS
from megatron_overlap.schedules.varlen.plan import describe
from megatron_overlap.schedules.varlen.topology import Topology

_LENGTHS = "plan --lengths"


def plan(
    lengths: Annotated[Path, Option(help="File with one length per line, or folder of documents (a token per byte).")],
    config: Annotated[
        list[str] | None, Argument(help="Launch config (file or shipped name) and key=value: gives ranks and nodes.")
    ] = None,
    ranks: Annotated[int | None, Option(min=1, help="Number of ranks that share the batch. Default: 8.")] = None,
    nodes: Annotated[int | None, Option(min=1, help="Number of nodes. Default: 1.")] = None,
    nics: Annotated[int, Option(min=1, help="Network cards per node.")] = 1,
    capacity: Annotated[int | None, Option(min=1, help="Most tokens of a rank. Default: 17/16 of the mean.")] = None,
    method: Annotated[str, Option(help=f"One of {', '.join(METHODS)}.")] = "balanced",
    show: Annotated[int, Option(min=0, help="Number of ranks listed.")] = 16,
) -> int:
    """Show which rank gets which documents of a batch: rings, loads and balance."""
    if config:
        launch = load_launch_config(config_file(config[0]), config[1:])
        ranks = ranks or launch.data_parallel_size * launch.parallel.context
        nodes = nodes or min(launch.launch.nodes, ranks)
    ranks, nodes = ranks or 8, nodes or 1
    if ranks % nodes:
        raise usage_error("plan --ranks", ranks, f"give a multiple of the {nodes} nodes")
    if method not in METHODS:
        raise usage_error("plan --method", method, did_you_mean(method, METHODS, "method"))
    batch = read_lengths(lengths)
    share = -(-sum(batch) // ranks)
    topology = Topology(nodes, ranks // nodes, min(nics, ranks // nodes))
    try:
        # Without --capacity, a rank holds up to 1/16 more than its share.
        result = METHODS[method](batch, topology, capacity=capacity or max(1, share + share // 16), cost=None)
    except ValueError as error:
        name, value, remedy = str(error).split(": ", 2)
        raise usage_error(f"plan --{name}", value, remedy) from error
    print(describe(result, ranks=show))
    return 0


def read_lengths(path: Path) -> list[int]:
    """Reads the lengths of documents from a text file with one length per line, or from a folder.

    The text files of a folder, at any depth, are documents with one token per byte, in the order of their paths. Raises
    ConfigError if the folder or file cannot be read or has no documents, or a line is not a length.
    """
    try:
        if path.is_dir():
            kinds = (".py", ".txt", ".rst", ".md")
            files = sorted(file for file in path.rglob("*") if file.suffix in kinds and file.is_file())
            if not files:
                raise usage_error(_LENGTHS, path, f"no {', '.join(kinds)} files in this folder")
            return [file.stat().st_size for file in files]
        lines = list(map(str.strip, path.read_text(encoding="utf-8").splitlines()))
    except OSError as error:
        remedy = f"{error.strerror}; give a file or a folder that can be read"
        raise usage_error(_LENGTHS, path, remedy) from error
    except UnicodeDecodeError as error:
        raise usage_error(_LENGTHS, path, "is not UTF-8 text; write one length per line") from error
    for number, text in enumerate(lines, start=1):
        if text and not (text.isascii() and text.isdigit()):
            raise usage_error(_LENGTHS, f"{path}, line {number}", f"{text[:40]}: write one whole number per line")
    if not any(lines):
        raise usage_error(_LENGTHS, path, "the file is empty; write one length per line")
    return [int(text) for text in lines if text]
