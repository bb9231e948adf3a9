"""`megatron-overlap doctor`: what this machine can do, whether a few ranks can talk, and how fast it is."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_overlap.config import ConfigError
from megatron_overlap.tools.doctor import calibration, findings, machine
from megatron_overlap.tools.doctor.gemm_rate import DTYPES
from megatron_overlap.tools.doctor.precision import objection
from megatron_overlap.tools.launch.processes import RunError
from megatron_overlap.tools.launch.ranks import run_workers

TEST_DEADLINE_S, CALIBRATE_DEADLINE_S = 10.0, 60.0
# Sums of a handful of terms in another order, fp32.
_TOLERANCE = 1e-5


def command(
    ranks: Annotated[int, typer.Option("--ranks", min=2, max=16, help="Ranks of the self-test, on this machine.")] = 2,
    deadline: Annotated[
        float, typer.Option("--deadline", min=0.1, help="Seconds after which the self-test has failed.")
    ] = TEST_DEADLINE_S,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Also measure GEMMs and messages and write a cluster profile.")
    ] = False,
    output: Annotated[Path, typer.Option("--output", help="With --calibrate: the profile.")] = Path("calibrated.yaml"),
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            help="With --calibrate: fp32, bf16 or fp16; else bf16, or fp32 on a processor without bf16.",
        ),
    ] = None,
) -> int:
    """Say what works here, what works slower, and what does not, and why."""
    if precision is not None and precision not in DTYPES:
        raise ConfigError("command line", "doctor --precision", precision, "use fp32, bf16 or fp16")
    console = Console()
    cuda = torch.cuda.is_available()
    console.print(", ".join(f"{name} {release}" for name, release in findings.versions().items()), highlight=False)
    for line in findings.devices():
        console.print(line, highlight=False, markup=False)
    slow = objection(precision or "bf16")
    if slow is not None:
        console.print(slow, highlight=False, soft_wrap=True)
    for name, value, remedy in findings.environment(os.environ, cuda=cuda):
        console.print(f"environment: {name}={value}: {remedy}", highlight=False, soft_wrap=True)
    failure = _self_test(console, ranks, deadline)
    table = Table("feature", "verdict", "because", box=box.SIMPLE_HEAD)
    for finding in findings.findings(failure, ranks):
        table.add_row(finding.feature, finding.verdict, finding.because)
    console.print(table)
    if failure is not None:
        return 1
    if not calibrate:
        return 0
    return _calibrate(console, ranks, output, precision or ("bf16" if slow is None else "fp32"))


def _self_test(console: Console, ranks: int, deadline: float) -> str | None:
    """Why the self-test failed, None where it went well."""
    console.print(f"self-test: {ranks} ranks, at most {deadline:g} s ...", highlight=False)
    start = time.perf_counter()
    try:
        results = _run("test", ranks, "fp32", deadline)
    except RunError as error:
        return str(error)
    worst = max(result["difference"] for result in results)
    if not worst <= _TOLERANCE:
        return f"overlapped layers differ from plain collectives by {worst:.1e}, more than {_TOLERANCE:.0e}"
    took = time.perf_counter() - start
    console.print(f"self-test: forward and backward agree with plain collectives, {took:.1f} s", highlight=False)
    return None


def _calibrate(console: Console, ranks: int, output: Path, precision: Any) -> int:
    console.print(f"calibrating in {precision}, at most {CALIBRATE_DEADLINE_S:g} s ...", highlight=False)
    try:
        found = _run("calibrate", ranks, precision, CALIBRATE_DEADLINE_S)[0]
    except RunError as error:
        console.print(f"calibration failed: {error}", highlight=False, soft_wrap=True)
        return 1
    source = f"doctor --calibrate on {socket.gethostname()}, {time.strftime('%Y-%m-%d')}"
    try:
        calibration.write_profile(output, calibration.profile_tree(found, precision, source))
    except OSError as error:
        remedy = f"{error.strerror}; give a file that can be written"
        raise ConfigError("command line", "doctor --output", str(output), remedy) from error
    table = Table("not used to calibrate", box=box.SIMPLE_HEAD)
    for heading in ("measured us", "modelled us", "error"):
        table.add_column(heading, justify="right")
    for check in calibration.checks(output, found, precision):
        table.add_row(check.what, f"{check.measured_us:.0f}", f"{check.modelled_us:.0f}", f"{check.error:+.1%}")
    console.print(table)
    console.print(f"{output}: for simulate --cluster {output}", highlight=False, soft_wrap=True)
    return 0


def _run(task: str, ranks: int, precision: str, deadline: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        run_workers(machine.__file__, [folder, task, precision], ranks, timeout_s=deadline)
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(ranks)]
