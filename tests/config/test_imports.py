"""Reading a config and answering a command line needs no torch: it is fast, and works before torch is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.config.test_wrong_input import environment


@pytest.mark.parametrize(
    "work",
    [
        "import megatron_overlap.config",
        "from megatron_overlap import cli; assert cli.main(['schema']) == 0",
        "from megatron_overlap import cli; assert cli.main(['--help']) == 0",
        "from megatron_overlap import cli; assert cli.main(['launch', 'nowhere.yaml']) == 2",
    ],
)
def test_torch_is_not_imported(work: str) -> None:
    check = "import sys; loaded = {'torch', 'megatron', 'numpy'} & set(sys.modules); assert not loaded, loaded"
    argv = [sys.executable, "-c", f"{work}\n{check}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=environment())
    assert done.returncode == 0, done.stderr
