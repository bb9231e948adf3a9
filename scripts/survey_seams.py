"""Compares megatron-core releases at the patched symbols: prints a table, and the entries for the files in patches/.

Reads wheels and `pip install --target` folders without importing them. A new release is added in three steps: survey
it, review the differences, and paste its entry under `releases:`.

    pip download --no-deps megatron-core==0.19.2 -d wheels
    python scripts/survey_seams.py wheels/*.whl
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_overlap.config.resources import resource_folder
from megatron_overlap.patching.manifest import Manifest, digest_of, judge_source, load_manifests
from megatron_overlap.patching.source import (
    DirectoryTree,
    SourceTree,
    Target,
    definitions,
    installed_tree,
    megatron_release,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the survey; 2 when a source holds no megatron-core, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", type=Path, help="wheels or folders; none: what is installed here")
    parser.add_argument("--symbol", action="append", default=[], help="survey module:Class.attr instead of patches/")
    arguments = parser.parse_args(argv)
    try:
        releases = _releases(arguments.sources)
        symbols = [str(Target.parse(text)) for text in arguments.symbol]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    console = Console()
    manifests = [] if symbols else load_manifests()
    console.print(_seams(releases, symbols or _all_symbols(manifests)))
    for manifest in manifests:
        if manifest.unchecked is not None:
            continue
        _print_entries(console, manifest, releases)
    return 0


def _releases(sources: Sequence[Path]) -> dict[str, SourceTree]:
    trees: list[tuple[str, SourceTree | None]] = [(str(source), DirectoryTree(source)) for source in sources]
    releases: dict[str, SourceTree] = {}
    for name, tree in trees or [("this environment", installed_tree())]:
        release = None if tree is None else megatron_release(tree)
        if tree is None or release is None:
            raise ValueError(f"{name}: holds no megatron-core: give a wheel, or a folder that contains megatron/core")
        releases[release] = tree
    return dict(sorted(releases.items()))


def _all_symbols(manifests: Sequence[Manifest]) -> list[str]:
    checked = [manifest for manifest in manifests if manifest.unchecked is None]
    names = [name for manifest in checked for name in (manifest.target, *manifest.relies_on)]
    return list(dict.fromkeys(names))


def _seams(releases: dict[str, SourceTree], symbols: Sequence[str]) -> Table:
    table = Table("symbol", *releases, "signatures", "bodies", title="same number: same source", title_justify="left")
    for symbol in symbols:
        digests = {release: digest_of(tree, symbol) for release, tree in releases.items()}
        bodies = list(dict.fromkeys(digest for digest in digests.values() if digest is not None))
        signatures = {
            definition.signature for tree in releases.values() for definition in definitions(tree, Target.parse(symbol))
        }
        numbers = ["-" if digest is None else str(bodies.index(digest) + 1) for digest in digests.values()]
        table.add_row(Target.parse(symbol).qualname, *numbers, str(len(signatures)), str(len(bodies)))
    return table


def _print_entries(console: Console, manifest: Manifest, releases: dict[str, SourceTree]) -> None:
    folder = resource_folder("patches")
    console.print(f"\n# {manifest.target}, for patches/ in {folder}", soft_wrap=True, highlight=False)
    for release, tree in releases.items():
        judgement = judge_source(manifest, tree)
        found = definitions(tree, Target.parse(manifest.target))
        lines = [f"  # {judgement.verdict}: {judgement.reason}"]
        if len(found) != 1:
            lines.append(f"  # defined {len(found)} times in {release}: no entry")
        for definition in found if len(found) == 1 else []:
            lines += [f"  {release}:", f'    signature: "{definition.signature}"', f"    digest: {definition.digest}"]
            lines += ["    relies_on:"] if manifest.relies_on else []
            lines += [f"      {name}: {digest_of(tree, name) or 'null'}" for name in manifest.relies_on]
        console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())
