"""The wheel is built, unpacked elsewhere, and used without the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megatron_overlap.patching.manifest import load_manifests
from megatron_overlap.version import __version__

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the wheel, as `pip install --no-deps` would write them."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    assert wheel.name == f"megatron_overlap-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def command(installed: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Runs the command of the unpacked wheel outside the repository."""
    code = "import sys; from megatron_overlap.cli import main; sys.exit(main(sys.argv[1:]))"
    env = {**os.environ, "PYTHONPATH": str(installed) + os.pathsep + os.environ.get("PYTHONPATH", "")}
    start = [sys.executable, "-P", "-c", code, *argv]
    return subprocess.run(start, cwd=installed.parent, env=env, capture_output=True, text=True, timeout=120)


def test_the_wheel_has_the_package_and_its_resources_and_nothing_else(installed: Path) -> None:
    package = installed / "megatron_overlap"
    for folder, files in {
        "_patches": sorted((ROOT / "patches").rglob("*")),
        "_configs": sorted((ROOT / "configs").rglob("*")),
        "_scripts": [*(ROOT / "scripts").glob("pretrain_*.py"), ROOT / "scripts" / "generate_gpt.py"],
    }.items():
        source = ROOT / folder.removeprefix("_")
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                assert (package / folder / file.relative_to(source)).read_bytes() == file.read_bytes()
    templates = {file.name for file in package.glob("**/templates/*")}
    assert {"base.html.j2", "compare.html.j2", "generation.html.j2", "compare.css", "slurm.sh.j2"} <= templates
    assert {path.name.partition("-")[0] for path in installed.iterdir()} == {"megatron_overlap"}
    (metadata,) = installed.glob("*.dist-info")
    assert "Apache License" in (metadata / "licenses" / "LICENSE").read_text()
    assert "megatron-overlap = megatron_overlap.cli:main" in (metadata / "entry_points.txt").read_text()


def test_patches_and_schema_run_from_the_wheel(installed: Path) -> None:
    schema = command(installed, "schema")
    assert "model" in json.loads(schema.stdout)["properties"], schema.stderr
    patches = command(installed, "patches", "--reasons")
    assert patches.returncode == 0, patches.stderr
    targets = [manifest.target.rpartition(":")[2] for manifest in load_manifests(ROOT / "patches")]
    assert all(name in patches.stdout for name in targets)


def test_a_shipped_config_is_planned_by_its_name(installed: Path) -> None:
    done = command(installed, "launch", "cpu/llama_tp2/overlap", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"{installed}/megatron_overlap/_scripts/pretrain_llama.py" in done.stdout
    assert "RANK=1" in done.stdout


def test_a_name_that_is_not_shipped_is_one_line_with_the_nearest(installed: Path) -> None:
    done = command(installed, "launch", "llama_tp2_overlpa", "--dry-run")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("command line: CONFIG: llama_tp2_overlpa: no such file or shipped config")
    assert line.endswith("did you mean cpu/llama_tp2/overlap?")
