"""The files of a comparison: complete or absent, and the page needs no other file."""

from __future__ import annotations

import base64
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_overlap.tools.compare import report
from megatron_overlap.tools.compare.comparison import Comparison, compare
from megatron_overlap.tools.launch.run_records import Fallback, StepExposed
from tests.tools.compare.samples import record, side

FALLBACKS = (Fallback("row <b>8->4", "gemm_rs", "forward", "a bias & more", 3),)


def comparison(serial: bool = False) -> Comparison:
    a = side("plain", [record([9, 9, 120, 121, 119]), record([9, 9, 118, 122, 120])])
    b = side("hidden", [record([9, 9, 60, 61, 62], fallbacks=FALLBACKS), record([9, 9, 59, 60, 61])])
    c = side("hidden_serial", [record([9, 9, 80, 81, 82]), record([9, 9, 81, 80, 79])])
    settings = {"notes": ["Two rounds."]}
    return compare([a, b, c] if serial else [a, b], serial=serial, settings=settings)


def pictures(page: str) -> list[str]:
    """The SVGs of a report, in order."""
    return [base64.b64decode(data).decode() for data in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)]


class Page(HTMLParser):
    """Collects the text of a page and the addresses that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for key, value in attrs if key in ("src", "href", "srcset", "action", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_three_files_agree_and_the_page_fetches_nothing(tmp_path: Path) -> None:
    result = comparison()
    report.write(result, tmp_path, {"plain": "name: plain\n", "hidden": "name: hidden # <script>\n"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare.html", "compare.json", "compare.png"]
    written = json.loads((tmp_path / "compare.json").read_text())
    assert written["speedup"]["median"] == pytest.approx(1.985, abs=0.02)
    png = (tmp_path / "compare.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width = int.from_bytes(png[16:20])
    assert width > 1500

    source = (tmp_path / "compare.html").read_text()
    page = Page()
    page.feed(source)
    assert len(page.fetched) == 1
    assert page.fetched[0].startswith("data:image/svg+xml;base64,")
    assert ">hidden:  60.5 ms,  MFU 33.1%<" in pictures(source)[0]
    assert not re.search(r"url\((?!#)", source)
    assert "@import" not in source
    assert "script" not in page.tags
    for row in report.rows(result):
        assert all(cell in page.text for cell in row.cells)
    assert "row <b>8->4" in page.text
    assert "a bias & more" in page.text
    assert "name: hidden # <script>" in page.text


def test_the_attribution_is_in_terminal_and_page(tmp_path: Path) -> None:
    result = comparison(serial=True)
    report.write(result, tmp_path, {})
    assert report.attribution(result) == (
        "Attribution: faster messages 1.491x (1.485 to 1.496), overlap 1.331x (1.329 to 1.332)"
    )
    assert "faster messages" in (tmp_path / "compare.html").read_text()
    assert report.attribution(comparison()) is None


def test_the_table_has_every_run_and_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    report.write(comparison(serial=True), tmp_path, {})
    shown = capsys.readouterr().out
    for word in ("plain", "hidden_serial", "reference", "MFU", "tokens/s", "p20 to p80", "119.0 to 121.0", "1.984x"):
        assert word in shown


def test_the_json_has_null_for_nan_and_infinity(tmp_path: Path) -> None:
    diverged = [8.0, math.nan, math.inf]
    result = compare([side("a", [record([1, 1, 1], losses=diverged)]), side("b", [record([1, 1, 1], losses=diverged)])])
    report.write(result, tmp_path, {})
    written = json.loads((tmp_path / "compare.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert written["runs"][0]["losses"] == [8.0, None, None]


def test_no_file_is_written_if_one_of_them_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="configs|undefined|None"):
        report.write(comparison(), tmp_path, None)  # type: ignore[arg-type]
    assert not (tmp_path / "compare.json").exists()
    assert not (tmp_path / "compare.png").exists()


def test_exposed_communication_is_in_table_json_and_page(tmp_path: Path) -> None:
    """Means over the timed steps, without the two warm-up steps of the launch."""
    steps = [StepExposed(900.0, {("gather", "forward"): 900.0})] * 2
    for total in (10.0, 20.0, 60.0):
        steps.append(StepExposed(total, {("gather", "forward"): total / 2, ("scatter", "dgrad"): total / 2}))
    traced = replace(record([9, 9, 100, 100, 100]), exposed=tuple(steps))
    result = compare([side("plain", [record([9, 9, 120, 121, 119])]), side("hidden", [traced])])
    cells = {row.label: row.cells for row in report.rows(result)}
    assert cells["exposed communication, ms"] == ("unknown", "20.0")
    assert cells["share of the step"] == ("unknown", "30.0%")
    report.write(result, tmp_path, {})
    plain, hidden = json.loads((tmp_path / "compare.json").read_text())["runs"]
    assert plain["exposed"] is None
    assert hidden["exposed"]["by_op"] == [
        {"op": "gather", "direction": "forward", "ms": 15.0, "median_ms": 10.0},
        {"op": "scatter", "direction": "dgrad", "ms": 15.0, "median_ms": 10.0},
    ]
    assert "exposed communication, ms" in (tmp_path / "compare.html").read_text()


def test_without_events_no_row_names_exposed_communication(tmp_path: Path) -> None:
    result = comparison()
    assert "exposed" not in " ".join(row.label for row in report.rows(result))
    report.write(result, tmp_path, {})
    assert "exposed communication, ms" not in (tmp_path / "compare.html").read_text()


def test_calls_that_could_not_run_fused_are_reported(tmp_path: Path) -> None:
    why = {"fused kernels need CUDA, not cpu": 24}
    result = compare([side("plain", [record([9, 9, 120])]), side("fused", [record([9, 9, 60], not_fused=why)])])
    line = "fused: 24 calls with method fused ran p2p: fused kernels need CUDA, not cpu."
    assert line in report.notes(result)
    report.write(result, tmp_path, {"plain": "", "fused": ""})
    assert line in (tmp_path / "compare.html").read_text()
    assert json.loads((tmp_path / "compare.json").read_text())["runs"][1]["plugin"]["not_fused"] == why
