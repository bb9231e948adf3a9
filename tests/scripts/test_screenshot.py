"""Pictures of the report for the pages."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.releases import ROOT

SCRIPT = ROOT / "scripts" / "pages" / "screenshot.py"


@pytest.mark.skipif(runpy.run_path(str(SCRIPT))["browser"]() is None, reason="no Chromium here")
def test_the_picture_ends_where_the_page_ends(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<body style="margin:0"><div style="height:700px;background:#0072b2"></div></body>')
    argv = [sys.executable, str(SCRIPT), str(page), str(tmp_path / "page.png"), "--width", "640"]
    subprocess.run(argv, check=True, timeout=150)
    image = Image.open(tmp_path / "page.png")
    assert image.size == (640, 716)
    assert image.mode == "P"


def test_without_a_browser_it_says_so(tmp_path: Path) -> None:
    argv = [sys.executable, str(SCRIPT), "page.html", "page.png"]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "no browser: install one of chromium" in done.stderr
