"""Other releases of megatron-core, each in a folder of its own: no second environment is needed to test one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLDEST = "0.16.1"
NEWEST = "0.19.2"


def megatron_folder(release: str) -> Path:
    """A folder that holds megatron-core `release` for PYTHONPATH; installed once, into `.cache/` of the repository.

    Raises:
        RuntimeError: pip could not install it; the message has pip's own words.
    """
    folder = ROOT / ".cache" / f"megatron-core-{release}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(exist_ok=True)
    # Installed beside it and renamed: an interrupted or concurrent run never leaves half a release.
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--target", str(unfinished), f"megatron-core=={release}"]
        installed = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        if installed.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{installed.stdout}{installed.stderr}")
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def release_environment(release: str) -> dict[str, str]:
    """Environment of a process that imports megatron-core `release` instead of the installed one."""
    paths = [str(megatron_folder(release)), str(ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def run_python(
    arguments: Sequence[str], *, release: str | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs this Python with `arguments` in the repository, on another release if one is named."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} if release is None else release_environment(release)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
