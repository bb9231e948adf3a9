"""`megatron-overlap patches`: the attributes that the plugin replaces, and whether each patch applies to a release."""

import itertools
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from megatron_overlap.config.errors import usage_error
from megatron_overlap.patching.manifest import Verdict, judge_source, load_manifests
from megatron_overlap.patching.source import PACKAGE, DirectoryTree, Target, installed_tree, megatron_release

_LISTED = 20  # attributes of one feature; more are one row if their verdicts are equal


def patches(
    megatron: Annotated[
        Path | None,
        typer.Option(help="A megatron-core wheel, or a folder with megatron/core. Default: the installed one."),
    ] = None,
    reasons: Annotated[bool, typer.Option("--reasons", help="List every attribute, and why it is replaced.")] = False,
) -> int:
    """List the attributes that the plugin replaces, and whether each patch applies to a release of Megatron.

    The command reads source files and does not import Megatron. Exit code 1: a patch is refused.
    """
    manifests = sorted(load_manifests(), key=lambda manifest: manifest.feature)
    if megatron is None:
        tree, shown = installed_tree(), "the installed one"
        remedy = "no megatron-core is installed; pip install megatron-core, or name one with --megatron"
    else:
        tree, shown = DirectoryTree(megatron) if megatron.exists() else None, str(megatron)
        remedy = "holds no megatron-core; give a wheel, or the folder that contains megatron/core"
    if tree is None or (release := megatron_release(tree)) is None:
        raise usage_error("--megatron", shown, remedy)
    narrow = [Column(heading, no_wrap=True) for heading in ("replaced", "verdict")]
    table = Table("feature", *narrow, "reason", title=f"megatron-core {release}", title_justify="left")
    refused = False
    for feature, group in itertools.groupby(manifests, key=lambda manifest: manifest.feature):
        judged = [(manifest, judge_source(manifest, tree)) for manifest in group]
        refused |= any(judgement.verdict is Verdict.REFUSED for _, judgement in judged)
        if not reasons and len(judged) > _LISTED and all(found == judged[0][1] for _, found in judged):
            found = judged[0][1]
            table.add_row(feature, f"{len(judged)} attributes, see --reasons", str(found.verdict), found.reason)
        else:
            for index, (manifest, found) in enumerate(judged):
                reason = found.reason
                if reasons:
                    reason += f"\n{' '.join(manifest.why.split())}"
                    reason += f"\nNot compared: {' '.join(manifest.unchecked.split())}" if manifest.unchecked else ""
                shown = "" if index else feature
                table.add_row(shown, _short_name(manifest.target), str(found.verdict), reason, end_section=reasons)
        table.add_section()
    # Rich cuts words at 80 columns where the output is not a terminal.
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 1 if refused else 0


def _short_name(target: str) -> str:
    """`Class.method` of Megatron; for functions, and attributes of torch, the module as well."""
    parsed = Target.parse(target)
    if not parsed.module.startswith(f"{PACKAGE}."):
        return f"{parsed.module}.{parsed.qualname}"
    return parsed.qualname if "." in parsed.qualname else f"{parsed.module.rpartition('.')[2]}.{parsed.qualname}"
