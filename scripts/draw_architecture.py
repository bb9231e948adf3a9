"""Draws the floors of the package from the import contract, the docstrings and the sizes of its parts.

The floors are those of the contract "imports go down only" in pyproject.toml: a part imports parts below it only. A box
is one sub-package or module, with its purpose (the first sentence of its docstring) and its size.
"""

from __future__ import annotations

import argparse
import ast
import textwrap
import tomllib
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_overlap"
CONTRACT = "imports go down only"
COLOURS = ("#cfe2f3", "#d9ead3", "#fff2cc", "#f4cccc", "#d9d2e9", "#e6e6e6")


def floors() -> list[list[str]]:
    """The floors from top to bottom, each with the names of its sub-packages and modules."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["name"] == CONTRACT)
    separated = [layer.replace(":", "|").split("|") for layer in layers]
    return [[name.strip().removeprefix(f"{PACKAGE}.") for name in names] for names in separated]


def files_of(name: str) -> list[Path]:
    """The Python files of a sub-package or module."""
    folder = ROOT / PACKAGE / name
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def purpose_of(name: str) -> str:
    """The first sentence of the docstring of a sub-package or module."""
    folder = ROOT / PACKAGE / name
    source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(source.read_text())) or ""
    return docstring.split("\n\n")[0].replace("\n", " ").split(". ")[0].rstrip(".")


def draw(output: Path) -> None:
    """Writes the picture to `output`."""
    rows = floors()
    figure = Figure(figsize=(12, 0.86 * len(rows)))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(-len(rows), 0)
    for level, row in enumerate(rows):
        width = (0.98 - 0.01 * (len(row) - 1)) / len(row)
        for place, name in enumerate(row):
            left = 0.01 + place * (width + 0.01)
            box = FancyBboxPatch(
                (left, -level - 0.95),
                width,
                0.88,
                boxstyle="round,pad=0,rounding_size=0.008",
                facecolor=COLOURS[level % len(COLOURS)],
                edgecolor="none",
            )
            axes.add_patch(box)
            files = files_of(name)
            lines = sum(len(file.read_text().splitlines()) for file in files)
            size = f"{len(files)} files, {lines:,} lines" if len(files) > 1 else f"{lines} lines"
            axes.text(left + 0.008, -level - 0.2, name, va="center", fontsize=11, weight="bold")
            axes.text(left + width - 0.008, -level - 0.2, size, ha="right", va="center", fontsize=8)
            text = "\n".join(textwrap.wrap(purpose_of(name), round(width * 155)))
            axes.text(left + 0.008, -level - 0.36, text, va="top", fontsize=9)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(f"drawn: {output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "architecture.png")
    draw(parser.parse_args().output)


if __name__ == "__main__":
    main()
