"""What this machine has, and what that means for each feature."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_overlap.comm.symmetric.cuda import local_objection

VERSIONS = ("megatron-overlap", "megatron-core", "torch", "triton", "transformer-engine", "apex")
Verdict = Literal["works", "works slower", "not available"]


@dataclass(frozen=True)
class Finding:
    """One line of the result."""

    feature: str
    verdict: Verdict
    because: str


def versions() -> dict[str, str]:
    """Installed releases, and Python's."""
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def devices() -> list[str]:
    """GPUs, how they are joined, and whether each pair can read the other's memory; one line each."""
    if not torch.cuda.is_available():
        return [f"no GPU; {os.cpu_count()} cores of {platform.processor() or platform.machine()}"]
    count = torch.cuda.device_count()
    lines = []
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        lines.append(f"GPU {index}: {device.name}, {device.total_memory >> 30} GiB")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    able = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    if pairs:
        lines.append(f"peer access: {able} of {len(pairs)} pairs")
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        shown = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
        lines += shown.stdout.splitlines()
    return lines


def environment(env: Mapping[str, str], *, cuda: bool) -> list[tuple[str, str, str]]:
    """Variables that hurt: name, value, and what to do."""
    hurts = []

    def look(name: str, bad: Any, remedy: str) -> None:
        if name in env and bad(env[name]):
            hurts.append((name, env[name], remedy))

    if cuda:
        look(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            lambda value: value == "1",
            "slows data parallel, FSDP and expert overlap; this plugin orders by events and does not need it. Megatron"
            " asks for it before Blackwell with tensor or context parallelism: keep it there, unset it elsewhere",
        )
        look("CUDA_LAUNCH_BLOCKING", lambda value: value != "0", "nothing overlaps with it: unset it")
        look("NCCL_P2P_DISABLE", lambda value: value != "0", "GPUs go through the host's memory: unset it")
        look("NCCL_IB_DISABLE", lambda value: value != "0", "nodes talk over TCP: unset it")
    look("NCCL_DEBUG", lambda value: value.upper() in ("INFO", "TRACE"), "writes lines in every step: set it to WARN")
    look("TORCH_DISTRIBUTED_DEBUG", lambda value: value.upper() == "DETAIL", "checks every collective: unset it")
    look("MEGATRON_OVERLAP", lambda value: value == "0", "the plugin is switched off: unset it to have any overlap")
    look(
        "OMP_NUM_THREADS",
        lambda value: value.isdigit() and int(value) > (os.cpu_count() or 1),
        f"more threads than the {os.cpu_count()} cores: they take turns; use cores / ranks",
    )
    return hurts


def findings(self_test: str | None, ranks: int) -> list[Finding]:
    """What each feature can be expected to do.

    Args:
        self_test: why the self-test failed; None: it went well.
        ranks: that it ran on.
    """
    cuda = torch.cuda.is_available()
    gpus = torch.cuda.device_count() if cuda else 0
    result = []
    for feature in ("tensor: p2p", "data: p2p", "ulysses: p2p"):
        if self_test is not None:
            result.append(Finding(feature, "not available", f"the self-test failed: {self_test}"))
        elif not cuda:
            result.append(Finding(feature, "works slower", "no GPU: the processor that computes also moves the bytes"))
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
    """Whether this process's GPUs can write each other's memory, as fused kernels do. A run tries it for real."""
    because = local_objection()
    if because:
        return "not available", f"{because}: `method: fused` runs p2p"
    if gpus < 2:
        return "not available", f"needs at least 2 GPUs in a node, there are {gpus}: `method: fused` runs p2p"
    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    if not all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs):
        return "not available", "not every GPU can access every other one: `method: fused` runs p2p"
    return "works", "every GPU can access every other one; not run on GPUs yet: `auto` measures it first"
