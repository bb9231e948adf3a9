"""`megatron-overlap patches`: what is replaced in Megatron, and whether it fits the release at hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from megatron_overlap.config.errors import ConfigError
from megatron_overlap.patching.compatibility import Verdict, judge_source
from megatron_overlap.patching.errors import ManifestError
from megatron_overlap.patching.manifest import load_manifests
from megatron_overlap.patching.source import (
    DirectoryTree,
    SourceTree,
    WheelTree,
    installed_tree,
    megatron_release,
)


def patches(
    megatron: Annotated[
        Path | None,
        typer.Option(help="A megatron-core wheel, or a folder that holds megatron/core; default: the installed one."),
    ] = None,
) -> int:
    """Show, for each replaced function, why it is replaced and whether the release at hand is one that was read.

    Reads sources only and imports nothing of Megatron. Exit code 1: a patch is refused.
    """
    try:
        manifests = load_manifests()
    except ManifestError as error:
        print(error, file=sys.stderr)
        return 2
    tree, release = _tree(megatron)
    table = Table("replaced", "feature", "verdict", "because", "why this place", show_lines=True)
    table.title = f"megatron-core {release}"
    refused = False
    for manifest in manifests:
        judgement = judge_source(manifest, tree)
        refused |= judgement.verdict is Verdict.REFUSED
        name = manifest.target.rpartition(":")[2]
        table.add_row(name, manifest.feature, str(judgement.verdict), judgement.reason, " ".join(manifest.why.split()))
    # Rich would cut words at 80 columns where the output is not a terminal.
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    return 1 if refused else 0


def _tree(megatron: Path | None) -> tuple[SourceTree, str]:
    tree: SourceTree | None
    if megatron is None:
        tree, shown = installed_tree(), "the installed one"
        remedy = "no megatron-core is installed; pip install megatron-core, or name one with --megatron"
    else:
        is_wheel = megatron.suffix == ".whl" and megatron.is_file()
        tree, shown = WheelTree(megatron) if is_wheel else DirectoryTree(megatron), str(megatron)
        remedy = "holds no megatron-core; give a wheel, or the folder that contains megatron/core"
    release = None if tree is None else megatron_release(tree)
    if tree is None or release is None:
        raise ConfigError("command line", "--megatron", shown, remedy)
    return tree, release
