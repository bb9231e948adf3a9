"""What a device can do at best: a table of data sheet figures, and where it has none, a measurement.

All figures are dense. Data sheets often print the figure with sparsity first, which is twice as much.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from megatron_overlap.config import LaunchConfig
from megatron_overlap.tools.launch.processes import run_ranks
from megatron_overlap.tools.launch.results import RankCommand

Precision = Literal["fp32", "bf16", "fp16"]

# TFLOP/s with dense bf16 or fp16 inputs and fp32 sums, by a part of the driver's device name. Longer names first: the
# first that is found counts. Only what a data sheet says; all other devices are measured.
HALF_TFLOPS: Mapping[str, float] = MappingProxyType(
    {
        "GB200": 2500.0,  # GB200 NVL72 data sheet: 5 PFLOP/s a GPU with sparsity
        "B200": 2250.0,  # HGX B200 data sheet: 4.5 PFLOP/s a GPU with sparsity
        "GH200": 989.4,  # GH200 data sheet: 1979 with sparsity
        "H200 NVL": 835.5,  # H200 data sheet: 1671 with sparsity
        "H200": 989.4,  # the same, SXM: 1979 with sparsity
        "H100 NVL": 835.5,  # H100 NVL data sheet: 1671 with sparsity
        "H100 PCIe": 756.4,  # H100 architecture white paper, table of peak rates, PCIe
        "H100": 989.4,  # the same, SXM5
        "H800 PCIe": 756.4,  # the H100's rates, with fewer NVLinks
        "H800": 989.4,
        "H20": 148.0,  # H20 data sheet
        "A100": 311.9,  # A100 architecture white paper, every form factor
        "A800": 311.9,  # the A100's rates, with fewer NVLinks
        "A30": 165.0,  # A30 data sheet
        "A40": 149.7,  # A40 data sheet
        "A10": 125.0,  # A10 data sheet
        "L40S": 362.1,  # L40S data sheet: 733 with sparsity
        "L40": 181.1,  # L40 data sheet: 362 with sparsity
        "L20": 119.5,  # L20 data sheet
        "L4": 121.0,  # L4 data sheet: 242 with sparsity
    }
)


@dataclass(frozen=True)
class Peak:
    """The best a device can do.

    Attributes:
        tflops: per device (per rank on CPU), in 10^12 operations a second.
        source: where the figure is from, in words.
        measured: whether it was measured here.
    """

    tflops: float
    source: str
    measured: bool


def known_peak(device_name: str, precision: Precision) -> Peak | None:
    """The data sheet's figure, None where the table has none.

    fp32 has none: whether a GEMM runs in TF32 is a setting, so it is measured.
    """
    if precision == "fp32":
        return None
    if "MIG" in device_name:  # a part of the device
        return None
    for name, tflops in HALF_TFLOPS.items():
        # Whole words: `A10` is not in `A100`, nor `H200` in `GH200`.
        if re.search(rf"(?<![A-Z0-9]){name}(?![A-Z0-9])", device_name, re.IGNORECASE):
            return Peak(tflops, f"data sheet of the {name}, dense {precision}", measured=False)
    return None


def find_peak(device_name: str, cfg: LaunchConfig) -> Peak:
    """The peak for a run: from the table, or measured on this machine.

    Raises:
        RunError: the measurement failed.
    """
    peak = known_peak(device_name, cfg.train.precision) if cfg.launch.device == "cuda" else None
    return peak if peak is not None else measure_peak(cfg)


def measure_peak(cfg: LaunchConfig) -> Peak:
    """Time large square GEMMs as the run has them: its precision, its threads, all ranks of the machine at once.

    Ranks that are started together share caches, memory and clock rate just as in the run, which one alone would not.

    Raises:
        RunError: a rank failed.
    """
    device, precision = cfg.launch.device, cfg.train.precision
    ranks = cfg.world_size if device == "cpu" else 1
    threads = cfg.launch.threads_per_rank
    with tempfile.TemporaryDirectory() as folder:
        commands = []
        for rank in range(ranks):
            argv = [
                sys.executable,
                "-m",
                "megatron_overlap.tools.doctor.gemm_rate",
                f"{folder}/{rank}.json",
                device,
                precision,
            ]
            commands.append(RankCommand(rank, argv, {"OMP_NUM_THREADS": str(threads)}))
        run_ranks(commands, timeout_s=120, log_dir=Path(folder) / "logs")
        rates = [float(json.loads(Path(f"{folder}/{rank}.json").read_text())["tflops"]) for rank in range(ranks)]
    what = f"measured: best square {precision} GEMM"
    if device == "cpu":
        what += f", {ranks} processes at once, {threads} thread{'s' if threads > 1 else ''} each"
    return Peak(statistics.median(rates), what, measured=True)
