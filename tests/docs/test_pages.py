"""Generated pages and quoted code agree with the package; links resolve; pages are within their lengths."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from megatron_overlap.config import load_launch_config
from megatron_overlap.schedules import all_gather_plan, reduce_scatter_plan
from tests.helpers.releases import ROOT
from tests.schedules.verify import describe

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
# A page of this documentation, named in a docstring, a comment or a message; not one of another project.
PAGE_NAME = re.compile(r"(?<!torchtitan )(?<!Flux )\bdocs/[\w/]+\.md\b")
NAMES_A_PAGE = [
    file
    for folder in ("megatron_overlap", "scripts", "tests", "patches", "configs")
    for file in sorted((ROOT / folder).rglob("*"))
    if file.suffix in (".py", ".sh", ".yaml") and PAGE_NAME.search(file.read_text(encoding="utf-8"))
]
SLOW_TO_SIMULATE = ("gpt3_175b_tp8_pp16", "llama2_70b_tp8_pp4")
ON_GPUS = [
    pytest.param(file, marks=[pytest.mark.long] if file.parent.name in SLOW_TO_SIMULATE else [], id=file.parent.name)
    for file in sorted((ROOT / "configs").glob("gpu/*/overlap.yaml"))
]


def test_the_page_quotes_the_present_schedules() -> None:
    page = (ROOT / "docs" / "design" / "architecture.md").read_text()
    assert f"{describe(all_gather_plan(4, 1))}\n\n{describe(reduce_scatter_plan(4, 1))}\n```" in page


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} <= named


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as mkdocs and GitHub form them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("file", NAMES_A_PAGE, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_name_existing_pages(file: Path) -> None:
    missing = {page for page in PAGE_NAME.findall(file.read_text(encoding="utf-8")) if not (ROOT / page).exists()}
    assert not missing


def test_the_documentation_is_short() -> None:
    """Words of all pages as `wc -w docs/*.md docs/design/*.md` counts them."""
    pages = [*DOCS.glob("*.md"), *(DOCS / "design").glob("*.md")]
    assert set(pages) == set(DOCS.rglob("*.md"))
    assert 16_000 <= sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 24_000


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    assert len(text.split()) <= 700


@pytest.mark.parametrize("file", ON_GPUS)
def test_a_config_states_the_simulated_mfu(file: Path) -> None:
    """The stated MFU is within two points, so that a change of the cost model need not update every file."""
    sentence = runpy.run_path(str(ROOT / "scripts" / "expected_mfu.py"))["sentence"](load_launch_config(file))
    stated = re.search(r"^# Expected, modelled: (.*)\.$", file.read_text(), flags=re.MULTILINE)
    assert stated is not None
    numbers = [[int(n) for n in re.findall(r"(\d+) %", text)] for text in (stated[1], sentence)]
    assert len(numbers[0]) == len(numbers[1])
    assert all(abs(a - b) <= 2 for a, b in zip(*numbers, strict=True)), sentence
    assert re.sub(r"\d+", "", stated[1]) == re.sub(r"\d+", "", sentence)
