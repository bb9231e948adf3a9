"""Sentences drawn at random from the documentation and the docstrings, to be read against the style of the project.

python scripts/pages/sentences.py --count 20 --seed 20261125
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def sentences() -> Iterator[tuple[str, str]]:
    """(file, sentence) of every sentence with at least four words, in the order of the files."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        prose = [line for line in text.splitlines() if not re.match(r" {4,}\S|[|#!<:]", line)]
        yield from _split(page, re.sub(r"^ *(?:- |\d+\. )", "\n\n", "\n".join(prose), flags=re.MULTILINE))
    for file in sorted((ROOT / "megatron_overlap").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = (ast.get_docstring(node) or "").replace("Args:", "\n").replace("Returns:", "\n")
                yield from _split(file, re.sub(r"^ *\w+: ", "\n\n", text, flags=re.MULTILINE))


def _split(file: Path, text: str) -> Iterator[tuple[str, str]]:
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[])", " ".join(paragraph.split())):
            if len(sentence.split()) >= 4:
                yield str(file.relative_to(ROOT)), sentence


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    known = list(sentences())
    for file, sentence in random.Random(arguments.seed).sample(known, min(arguments.count, len(known))):
        print(f"{file}: {sentence}")


if __name__ == "__main__":
    main()
