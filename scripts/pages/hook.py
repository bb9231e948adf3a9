"""What mkdocs calls: makes the page of all keys, and leaves pages out of the navigation that this checkout has not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import reference  # beside this file, which is no package
from mkdocs.structure.files import File, Files

GENERATED = "reference.md"


def on_config(config: Any) -> Any:
    """Drops what is not there: a feature whose page another branch brings."""
    folder = Path(config.docs_dir)
    config.nav = [_existing(section, folder) for section in config.nav]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the page made from the schema."""
    files.append(File.generated(config, GENERATED, content=reference.page()))
    return files


def _existing(section: dict[str, list[dict[str, str]]], folder: Path) -> dict[str, list[dict[str, str]]]:
    return {
        title: [page for page in pages if all(name == GENERATED or (folder / name).is_file() for name in page.values())]
        for title, pages in section.items()
    }
