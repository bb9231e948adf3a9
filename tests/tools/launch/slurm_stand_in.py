"""What `srun` and `scontrol` do for a batch file, with processes of this machine: every node is this one.

Installed as an executable of either name by `test_slurm.py`. `srun` starts the tasks for real, with the environment
that Slurm gives them, ends all when one fails (as `--kill-on-bad-exit` asks), and keeps its own command line in
`$STAND_IN_SAID`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def srun(argv: list[str]) -> int:
    Path(os.environ["STAND_IN_SAID"]).write_text(json.dumps(argv))
    options = {}
    while argv and argv[0].startswith("--"):
        key, _, value = argv.pop(0).partition("=")
        options[key] = value
    nodes, each = int(options["--nodes"]), int(options["--ntasks-per-node"])
    tasks = []
    for number in range(nodes * each):
        slurm = {
            "SLURM_PROCID": number,
            "SLURM_LOCALID": number % each,
            "SLURM_NODEID": number // each,
            "SLURM_NTASKS": nodes * each,
            "SLURM_NNODES": nodes,
        }
        tasks.append(subprocess.Popen(argv, env={**os.environ, **{key: str(value) for key, value in slurm.items()}}))
    try:
        while any(task.poll() is None for task in tasks):
            failed = [task.returncode for task in tasks if task.returncode]
            if failed:
                return abs(failed[0])
            time.sleep(0.05)
        return max(abs(task.returncode) for task in tasks)
    finally:
        for task in tasks:
            task.kill()
            task.wait()


def scontrol(argv: list[str]) -> int:
    assert argv[:2] == ["show", "hostnames"], argv
    print(argv[2].replace(",", "\n"))
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol}[Path(sys.argv[0]).name](sys.argv[1:]))
