"""`megatron-overlap patches`: lists every attribute that the plugin replaces, and whether the patch fits a release."""

import itertools
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from megatron_overlap.config.errors import ConfigError
from megatron_overlap.patching import ManifestError
from megatron_overlap.patching.manifest import Verdict, judge_source, load_manifests
from megatron_overlap.patching.source import (
    PACKAGE,
    DirectoryTree,
    SourceTree,
    Target,
    installed_tree,
    megatron_release,
)

_WIDTH = 120


def patches(
    megatron: Annotated[
        Path | None,
        typer.Option(help="A megatron-core wheel, or a folder that holds megatron/core; default: the installed one."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also print why each is replaced.")] = False,
) -> int:
    """List every replaced attribute by feature, and whether its patch fits the given release.

    Reads source files and imports nothing of Megatron. Exit code 1: a patch is refused.
    """
    try:
        manifests = sorted(load_manifests(), key=lambda manifest: manifest.feature)
    except ManifestError as error:
        print(error, file=sys.stderr)
        return 2
    tree, release = _tree(megatron)
    table = Table("feature", title=f"megatron-core {release}", title_justify="left")
    table.add_column("replaced", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("reason" if not verbose else "reason, and why this attribute is replaced")
    refused = False
    for feature, group in itertools.groupby(manifests, key=lambda manifest: manifest.feature):
        shown = feature
        for manifest in group:
            judgement = judge_source(manifest, tree)
            refused |= judgement.verdict is Verdict.REFUSED
            reason = judgement.reason
            if verbose:
                reason += f"\n{' '.join(manifest.why.split())}"
                reason += f"\nNot compared: {' '.join(manifest.unchecked.split())}" if manifest.unchecked else ""
            table.add_row(shown, _short_name(manifest.target), str(judgement.verdict), reason, end_section=verbose)
            shown = ""
        table.add_section()
    # Rich cuts words at 80 columns where the output is not a terminal.
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)
    return 1 if refused else 0


def _short_name(target: str) -> str:
    """`Class.method` of Megatron; for functions, and attributes of torch, the module as well."""
    parsed = Target.parse(target)
    package, _, _ = parsed.module.partition(".")
    if package != PACKAGE:
        return f"{parsed.module}.{parsed.qualname}"
    return parsed.qualname if "." in parsed.qualname else f"{parsed.module.rpartition('.')[2]}.{parsed.qualname}"


def _tree(megatron: Path | None) -> tuple[SourceTree, str]:
    tree: SourceTree | None
    if megatron is None:
        tree, shown = installed_tree(), "the installed one"
        remedy = "no megatron-core is installed; pip install megatron-core, or name one with --megatron"
    else:
        tree, shown = DirectoryTree(megatron) if megatron.exists() else None, str(megatron)
        remedy = "holds no megatron-core; give a wheel, or the folder that contains megatron/core"
    release = None if tree is None else megatron_release(tree)
    if tree is None or release is None:
        raise ConfigError("command line", "--megatron", shown, remedy)
    return tree, release
