"""`megatron-overlap doctor`: versions, devices, environment variables, a self-test on a few ranks, and calibration."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_overlap.comm.symmetric.cuda import local_unsupported_reason
from megatron_overlap.config import ConfigError
from megatron_overlap.tools.doctor import calibration, machine
from megatron_overlap.tools.doctor.gemm_rate import DTYPES, slow_precision_reason
from megatron_overlap.tools.launch.processes import RunError
from megatron_overlap.tools.launch.ranks import run_workers

TEST_DEADLINE_S, CALIBRATE_DEADLINE_S = 10.0, 60.0
VERSIONS = ("megatron-overlap", "megatron-core", "torch", "triton", "transformer-engine", "apex")
_TOLERANCE = 1e-5
"""Relative; fp32 sums of a few terms in another order."""

Verdict = Literal["works", "works slower", "not available"]


@dataclass(frozen=True)
class Finding:
    """The verdict on one feature, and the reason."""

    feature: str
    verdict: Verdict
    reason: str


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
            help="With --calibrate: fp32, bf16 or fp16; default bf16, or fp32 on a processor without bf16.",
        ),
    ] = None,
) -> int:
    """Report what works on this machine, what works slower, what is not available, and the reasons."""
    if precision is not None and precision not in DTYPES:
        raise ConfigError("command line", "doctor --precision", precision, "use fp32, bf16 or fp16")
    console = Console()
    cuda = torch.cuda.is_available()
    console.print(", ".join(f"{name} {release}" for name, release in versions().items()), highlight=False)
    for line in devices():
        console.print(line, highlight=False, markup=False)
    slow = slow_precision_reason(precision or "bf16")
    if slow is not None:
        console.print(slow, highlight=False, soft_wrap=True)
    for name, value, remedy in environment(os.environ, cuda=cuda):
        console.print(f"environment: {name}={value}: {remedy}", highlight=False, soft_wrap=True)
    failure = _self_test(console, ranks, deadline)
    table = Table("feature", "verdict", "reason", box=box.SIMPLE_HEAD)
    for finding in findings(failure, ranks):
        table.add_row(finding.feature, finding.verdict, finding.reason)
    console.print(table)
    if failure is not None:
        return 1
    if not calibrate:
        return 0
    return _calibrate(console, ranks, output, precision or ("bf16" if slow is None else "fp32"))


def versions() -> dict[str, str]:
    """Releases of Python and of the installed packages."""
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def devices() -> list[str]:
    """The GPUs, their interconnect, and the number of pairs with peer access; one line each."""
    if not torch.cuda.is_available():
        return [f"no GPU; {os.cpu_count()} cores of {platform.processor() or platform.machine()}"]
    count = torch.cuda.device_count()
    lines = []
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        lines.append(f"GPU {index}: {device.name}, {device.total_memory >> 30} GiB")
    pairs = _gpu_pairs(count)
    if pairs:
        able = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        lines.append(f"peer access: {able} of {len(pairs)} pairs")
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        shown = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
        lines += shown.stdout.splitlines()
    return lines


def environment(env: Mapping[str, str], *, cuda: bool) -> list[tuple[str, str, str]]:
    """Variables that slow a run down or disable the plugin: name, value, and remedy."""
    cores = os.cpu_count() or 1
    enabled: Callable[[str], bool] = lambda value: value != "0"  # noqa: E731
    checks: list[tuple[bool, str, Callable[[str], bool], str]] = [
        (
            True,
            "CUDA_DEVICE_MAX_CONNECTIONS",
            lambda value: value == "1",
            "slows data parallel, FSDP and expert overlap; the plugin orders kernels by events and does not need it. "
            "Megatron requires it before Blackwell with tensor or context parallelism: set it only there",
        ),
        (True, "CUDA_LAUNCH_BLOCKING", enabled, "disables all overlap: unset it"),
        (True, "NCCL_P2P_DISABLE", enabled, "GPUs exchange data through host memory: unset it"),
        (True, "NCCL_IB_DISABLE", enabled, "nodes use TCP: unset it"),
        (
            False,
            "NCCL_DEBUG",
            lambda value: value.upper() in ("INFO", "TRACE"),
            "writes lines in every step: set it to WARN",
        ),
        (
            False,
            "TORCH_DISTRIBUTED_DEBUG",
            lambda value: value.upper() == "DETAIL",
            "checks every collective: unset it",
        ),
        (False, "MEGATRON_OVERLAP", lambda value: value == "0", "disables the plugin: unset it"),
        (
            False,
            "OMP_NUM_THREADS",
            lambda value: value.isdigit() and int(value) > cores,
            f"more threads than the {cores} cores: use cores / ranks",
        ),
    ]
    return [
        (name, env[name], remedy)
        for needs_cuda, name, is_bad, remedy in checks
        if (cuda or not needs_cuda) and name in env and is_bad(env[name])
    ]


def findings(self_test: str | None, ranks: int) -> list[Finding]:
    """The verdict on each feature.

    Args:
        self_test: why the self-test failed; None if it passed.
        ranks: number of ranks of the self-test.
    """
    cuda = torch.cuda.is_available()
    gpus = torch.cuda.device_count() if cuda else 0
    result = []
    for feature in ("tensor: p2p", "data: p2p", "ulysses: p2p"):
        if self_test is not None:
            result.append(Finding(feature, "not available", f"the self-test failed: {self_test}"))
        elif not cuda:
            result.append(Finding(feature, "works slower", "no GPU: the processor both computes and copies messages"))
        else:
            result.append(Finding(feature, "works", f"NCCL, {gpus} GPUs; the self-test ran over gloo on {ranks} ranks"))
    core = importlib.util.find_spec("megatron") is not None
    result.append(
        Finding("in Megatron", "works", "see `megatron-overlap patches`")
        if core
        else Finding("in Megatron", "not available", "megatron-core is not installed")
    )
    result.append(Finding("tensor: fused", *_fused(gpus)))
    return result


def _fused(gpus: int) -> tuple[Verdict, str]:
    """Whether the GPUs of this process can write to each other's memory, which fused kernels need."""
    reason = local_unsupported_reason()
    if reason:
        return "not available", f"{reason}: `method: fused` runs p2p"
    if gpus < 2:
        return "not available", f"needs at least 2 GPUs in a node, this one has {gpus}: `method: fused` runs p2p"
    if not all(torch.cuda.can_device_access_peer(a, b) for a, b in _gpu_pairs(gpus)):
        return "not available", "some pairs of GPUs have no peer access: `method: fused` runs p2p"
    return "works", "all pairs of GPUs have peer access. Not yet run on several GPUs: `auto` measures it first"


def _gpu_pairs(count: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(count) for b in range(count) if a != b]


def _self_test(console: Console, ranks: int, deadline: float) -> str | None:
    """Why the self-test failed; None if it passed."""
    console.print(f"self-test: {ranks} ranks, at most {deadline:g} s ...", highlight=False)
    start = time.perf_counter()
    try:
        results = _run("test", ranks, "fp32", deadline)
    except RunError as error:
        return str(error)
    worst = max(result["difference"] for result in results)
    if not worst <= _TOLERANCE:
        return f"overlapped layers differ from plain collectives by {worst:.1e}, more than {_TOLERANCE:.0e}"
    seconds = time.perf_counter() - start
    console.print(f"self-test: forward and backward agree with plain collectives, {seconds:.1f} s", highlight=False)
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
    table = Table("not used for calibration", box=box.SIMPLE_HEAD)
    for heading in ("measured, us", "modelled, us", "error"):
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
