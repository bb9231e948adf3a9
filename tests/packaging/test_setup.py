"""`scripts/setup.sh` deletes no environment that it has not made."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_an_environment_of_the_user_stays(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for file in ("pyproject.toml", "scripts/setup.sh"):
        shutil.copy(ROOT / file, tmp_path / file)
    mine = tmp_path / ".venv" / "mine"
    mine.parent.mkdir()
    mine.touch()
    command = ["bash", "-c", ". scripts/setup.sh; setup_environment"]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "megatron_overlap: .venv exists, and this script has not made it: move it away\n"
    assert mine.exists()
