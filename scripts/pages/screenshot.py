"""A picture of a page of HTML as Chromium shows it on a laptop, small enough for a repository.

python scripts/pages/screenshot.py runs/report/compare.html docs/images/compare_report.png
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_TALLEST, _MARGIN = 6000, 16


def browser() -> str | None:
    """The first of `BROWSERS` that there is."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def shoot(page: Path, width: int, program: str) -> Image.Image:
    """The page from its top to its last mark, `width` pixels wide.

    Raises:
        subprocess.CalledProcessError: the browser failed.
        ValueError: it drew nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.png"
        argv = [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        argv += [f"--window-size={width},{_TALLEST}", f"--screenshot={file}", page.resolve().as_uri()]
        subprocess.run(argv, check=True, capture_output=True, timeout=120)
        image = Image.open(file).convert("RGB")
    marks = ImageChops.difference(image, Image.new("RGB", image.size, "white")).getbbox()
    if marks is None:
        raise ValueError(f"{page}: the browser showed an empty page")
    return image.crop((0, 0, width, min(marks[3] + _MARGIN, _TALLEST)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("output", type=Path, help="PNG of 256 colours")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--colors", type=int, default=256)
    arguments = parser.parse_args()
    program = browser()
    if program is None:
        print(f"screenshot: no browser: install one of {', '.join(BROWSERS)}", file=sys.stderr)
        return 2
    image = shoot(arguments.page, arguments.width, program)
    image.quantize(arguments.colors, dither=Image.Dither.NONE).save(arguments.output, optimize=True)
    print(f"{arguments.output}: {image.width} x {image.height}, {arguments.output.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
