"""Runs a training script as its arguments say, without one adaptation to the CPU: `NAME SCRIPT ARGS...`."""

import runpy
import sys

from megatron_overlap.adapters import cpu
from megatron_overlap.config.resources import transformer_engine_folder
from megatron_overlap.patching.manifest import load_permits

if __name__ == "__main__":
    name, *sys.argv = sys.argv[1:]
    if "transformer_engine" in sys.argv:
        sys.path.append(str(transformer_engine_folder()))
    cpu.adapt([permit for permit in load_permits() if permit.name == name])
    runpy.run_path(sys.argv[0], run_name="__main__")
