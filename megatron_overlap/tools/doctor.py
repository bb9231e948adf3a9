"""`megatron-overlap doctor`: versions, devices, environment variables, and a self-test on a few ranks."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import permutations, starmap
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from typer import Option

from megatron_overlap.comm import destroy_process_groups
from megatron_overlap.comm.symmetric.cuda import local_unsupported_reason
from megatron_overlap.ops import all_gather_linear, linear_reduce_scatter, reference
from megatron_overlap.patching.manifest import load_permits
from megatron_overlap.session import installed_release
from megatron_overlap.tools.gemm_rate import slow_precision_reason
from megatron_overlap.tools.launch.processes import RunError, run_workers
from megatron_overlap.tools.launch.rehearsal import permits_table

VERSIONS = ("megatron-overlap", "megatron-core", "torch", "triton", "transformer-engine", "apex")
_TOOL_S = 20.0
_TOLERANCE = 1e-5  # relative; fp32 sums of a few terms in another order

# Values of environment variables (regular expressions) that do harm, and the remedy.
_ENABLED = "(?!0$).+"
_HARMFUL_ON_GPUS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        "1",
        "slows data parallel, FSDP and expert overlap; the plugin orders kernels by events and does not need it. "
        "Megatron requires it before Blackwell with tensor or context parallelism: set it only there",
    ),
    "CUDA_LAUNCH_BLOCKING": (_ENABLED, "disables all overlap: unset it"),
    "NCCL_P2P_DISABLE": (_ENABLED, "GPUs exchange data through host memory: unset it"),
    "NCCL_IB_DISABLE": (_ENABLED, "nodes use TCP: unset it"),
}
_HARMFUL = {
    "NCCL_DEBUG": ("INFO|TRACE", "writes lines in every step: set it to WARN"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "checks every collective: unset it"),
    "MEGATRON_OVERLAP": ("0", "disables the plugin: unset it"),
}

Verdict = tuple[Literal["works", "works slower", "not available"], str]  # whether a feature works, and the reason


def command(
    ranks: Annotated[int, Option(min=2, max=16, help="Ranks of the self-test, on this machine.")] = 2,
    deadline: Annotated[float, Option(min=0.1, help="Seconds after which the self-test fails.")] = 60.0,
) -> int:
    """Report which features work on this machine, and why others work slower or not at all."""
    console = Console()
    cuda = torch.cuda.is_available()
    releases = [f"{name} {installed_release(name) or 'not installed'}" for name in VERSIONS]
    console.print(", ".join([f"python {platform.python_version()}", *releases]), highlight=False)
    for line in devices():
        console.print(line, highlight=False, markup=False)
    if (slow := slow_precision_reason("bf16")) is not None:
        console.print(slow, highlight=False, soft_wrap=True)
    for name, value, remedy in environment(os.environ, cuda=cuda):
        console.print(f"environment: {name}={value}: {remedy}", highlight=False, soft_wrap=True)
    failure = _self_test(console, ranks, deadline)
    table = Table("feature", "verdict", "reason", box=box.SIMPLE_HEAD)
    for feature, verdict in verdicts(failure, ranks).items():
        table.add_row(feature, *verdict)
    console.print(table)
    if not cuda:
        console.print(permits_table(load_permits()))
    return 0 if failure is None else 1


def devices() -> list[str]:
    """The GPUs, their interconnect, and the number of pairs with peer access; one line each."""
    if not torch.cuda.is_available():
        return [f"no GPU; {os.cpu_count()} cores of {platform.processor() or platform.machine()}"]
    count = torch.cuda.device_count()
    properties = map(torch.cuda.get_device_properties, range(count))
    lines = [f"GPU {index}: {gpu.name}, {gpu.total_memory >> 30} GiB" for index, gpu in enumerate(properties)]
    if pairs := list(permutations(range(count), 2)):
        able = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        lines.append(f"peer access: {able} of {len(pairs)} pairs")
    if (tool := shutil.which("nvidia-smi")) is not None:
        try:
            shown = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=_TOOL_S, check=False)
            lines += shown.stdout.splitlines()
        except (OSError, subprocess.TimeoutExpired) as error:
            lines.append(f"no topology: {error}")
    return lines


def environment(env: Mapping[str, str], *, cuda: bool) -> list[tuple[str, str, str]]:
    """Variables that slow a run down or disable the plugin: name, value, and remedy."""
    rules = {**(_HARMFUL_ON_GPUS if cuda else {}), **_HARMFUL}
    found = [
        (name, env[name], remedy)
        for name, (values, remedy) in rules.items()
        if re.fullmatch(values, env.get(name, ""), re.IGNORECASE)
    ]
    threads, cores = env.get("OMP_NUM_THREADS", ""), os.cpu_count() or 1
    if threads.isdigit() and int(threads) > cores:
        found.append(("OMP_NUM_THREADS", threads, f"more threads than the {cores} cores: use cores / ranks"))
    return found


def verdicts(self_test: str | None, ranks: int) -> dict[str, Verdict]:
    """The verdict on each feature. `self_test` is the reason why the self-test on `ranks` ranks failed, or None."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    p2p: Verdict = ("works slower", "no GPU: the processor both computes and copies messages")
    if self_test is not None:
        p2p = ("not available", f"the self-test failed: {self_test}")
    elif gpus:
        p2p = ("works", f"NCCL, {gpus} GPUs; the self-test ran over gloo on {ranks} ranks")
    core: Verdict = ("works", "see `megatron-overlap patches`")
    if importlib.util.find_spec("megatron") is None:
        core = ("not available", "megatron-core is not installed")
    # With copy engines and fused kernels the ranks write to each other's memory.
    reason = local_unsupported_reason()
    if not reason and gpus < 2:
        reason = f"needs at least 2 GPUs in a node, this one has {gpus}"
    if not reason and not all(starmap(torch.cuda.can_device_access_peer, permutations(range(gpus), 2))):
        reason = "some pairs of GPUs have no peer access"
    peers, instead = "all pairs of GPUs have peer access", "NCCL" if gpus else "gloo"
    copies: Verdict = ("works", f"{peers}. Groups inside the node use it, also Ulysses; other groups NCCL")
    fused: Verdict = ("works", f"{peers}. Not yet run on several GPUs: `auto` measures it first")
    if reason:
        copies = ("not available", f"{reason}: messages use {instead}")
        fused = ("not available", f"{reason}: `method: fused` runs p2p")
    others = {"tensor: p2p by copy engines": copies, "tensor: fused": fused}
    return {"tensor: p2p": p2p, "data: p2p": p2p, "ulysses: p2p": p2p, "in Megatron": core, **others}


def _self_test(console: Console, ranks: int, deadline: float) -> str | None:
    """Why the self-test failed; None if it passed."""
    console.print(f"self-test: {ranks} ranks, at most {deadline:g} s ...", highlight=False)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_workers(__file__, [folder], ranks, timeout_s=deadline)
        except RunError as error:
            return str(error)
        worst = max(float(Path(folder, f"rank{rank}").read_text()) for rank in range(ranks))
    if not worst <= _TOLERANCE:
        return f"overlapped layers differ from plain collectives by {worst:.1e}, more than {_TOLERANCE:.0e}"
    seconds = time.perf_counter() - start
    console.print(f"self-test: forward and backward agree with plain collectives, {seconds:.1f} s", highlight=False)
    return None


def _self_test_rank(folder: Path) -> None:
    """One rank of the self-test. `FOLDER/rank{r}` gets the largest relative difference from plain collectives."""
    dist.init_process_group("gloo")
    group, rank, worst = dist.group.WORLD, dist.get_rank(), 0.0
    assert group is not None
    torch.manual_seed(rank)
    for overlapped, plain, rows in (
        (all_gather_linear, reference.all_gather_linear, 48),
        (linear_reduce_scatter, reference.linear_reduce_scatter, 48 * dist.get_world_size()),
    ):
        x, w = torch.randn(rows, 40), torch.randn(24, 40)
        results = []
        for function in (overlapped, plain):
            leaves = [tensor.clone().requires_grad_() for tensor in (x, w)]
            y = function(leaves[0], leaves[1], group=group)
            torch.autograd.backward(y.square().sum())
            results.append([y.detach(), *(leaf.grad for leaf in leaves)])
        for ours, theirs in zip(*results, strict=True):
            worst = max(worst, float((ours - theirs).abs().max() / theirs.abs().max()))
    (folder / f"rank{rank}").write_text(str(worst))
    destroy_process_groups()


if __name__ == "__main__":
    _self_test_rank(Path(sys.argv[1]))
