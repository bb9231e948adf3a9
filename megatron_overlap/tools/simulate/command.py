"""`megatron-overlap simulate`: predict the step time of a launch config on a cluster."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from megatron_overlap.autotune.cost_model import CostModel
from megatron_overlap.config import ConfigError, load_launch_config
from megatron_overlap.config.cluster import load_cluster_profile, with_hosts
from megatron_overlap.config.errors import writing
from megatron_overlap.config.resources import config_file
from megatron_overlap.tools.compare.flops import CONVENTION
from megatron_overlap.tools.simulate.job import ExpertOverlap, Job, Split, job_of
from megatron_overlap.tools.simulate.layer import generation_us
from megatron_overlap.tools.simulate.linear import LinearOverlap, Method, unsupported_reason
from megatron_overlap.tools.simulate.step import StepTime, simulate_step
from megatron_overlap.tools.simulate.sweep import Memory, memory_of, sweep

DISCLAIMER = "Simulated, not measured. The accuracy is in docs/simulate.md."

_METHODS: dict[str, Method | Literal["auto"]] = {
    "no overlap": "serial",
    "stock path": "stock",
    "sliced collectives": "sliced",
    "userbuffers-like pipeline": "userbuffers",
    "Flux-like fused kernels": "fused",
    "this plugin, p2p": "p2p",
    "this plugin, auto": "auto",
}
_SPLITS: dict[str, Split] = {"this plugin, batch split": "batch", "this plugin, sequence split": "sequence"}
_EXPERTS: dict[str, ExpertOverlap] = {"experts, stock path": "none", "experts, this plugin": "p2p"}


def simulate(
    config: Annotated[Path, Argument(help="Launch config: a YAML file, or the name of a shipped one.")],
    overrides: Annotated[list[str] | None, Argument(help="key=value, which overrides the file.")] = None,
    cluster: Annotated[str, Option(help="Profile: a name in configs/clusters, or a YAML file.")] = "h100_dgx",
    find: Annotated[bool, Option("--sweep", help="Simulate every layout with this number of ranks.")] = False,
    generation: Annotated[bool, Option("--generation", help="Simulate prefill and decode of one layer too.")] = False,
    output: Annotated[Path | None, Option("--json", help="Write all results as JSON.")] = None,
) -> int:
    """Predict the time of a training step on a cluster without running it."""
    cfg = load_launch_config(config_file(config), overrides or ())
    profile = load_cluster_profile(cluster)
    if cfg.launch.hosts is not None:
        profile = with_hosts(profile, cfg.launch.hosts.gbps, cfg.launch.hosts.ranks_per_host)
    try:
        job = job_of(cfg)
        model = CostModel(profile, job.precision)
        link = model.link(job.tensor)
        if cfg.overlap.transport == "copies" and link.per_node < min(2, link.size):
            raise ValueError("overlap.transport: copies: the nodes have one tensor parallel rank, or not equally many")
    except ValueError as error:
        key, _, rest = str(error).partition(": ")
        value, _, remedy = rest.partition(": ")
        raise ConfigError(str(config), key, value, remedy or rest) from error
    memory = _memory(memory_of(job))
    listed = {text: method for text, method in _METHODS.items() if not unsupported_reason(method, link)}
    methods = {name: figures(other, model, simulate_step(other, model)) for name, other in _jobs(job, listed).items()}
    left_out = [f"overlap.{name}" for name in ("ulysses", "varlen") if getattr(cfg.overlap, name).method != "none"]
    what = f"{left_out[0]} is not simulated: attention is Megatron's ring over whole sequences. " if left_out else ""
    content: dict[str, Any] = {
        "what": what + DISCLAIMER,
        "cluster": profile.name,
        "layout": job.label(),
        "ranks": job.world_size,
        "flops_convention": CONVENTION,
        "step": methods["as configured"],
        "memory_gib": memory,
        "methods": methods,
    }
    if find:
        found, tried = sweep(job, model)
        best = [
            {"layout": layout.label(), **figures(layout, model, time), "memory_gib": _memory(needed)}
            for layout, time, needed in found[:10]
        ]
        content["sweep"] = {"tried": tried, "too_large": tried - len(found), "best": best}
    if generation:
        content["generation_us"] = generation_us(job, model, listed)
    console = Console(highlight=False)
    _show(console, job, model, content)
    if output is not None:
        with writing("simulate --json", output):
            output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        console.print(f"json: {output}", soft_wrap=True)
    capacity = profile.device.memory_gib.value
    if memory["total"] > capacity:
        console.print(f"does not fit in memory: about {memory['total']:.0f} GiB of {capacity:.0f}", style="bold")
        return 1
    return 0


def _jobs(job: Job, listed: Mapping[str, Method | Literal["auto"]]) -> dict[str, Job]:
    jobs = {"as configured": job}
    for text, method in listed.items():
        overlap = LinearOverlap(method, copies=job.tensor_overlap.copies)
        jobs[text] = replace(job, tensor_overlap=overlap, split="auto" if method == "auto" else "none")
    for text, parts in _SPLITS.items():
        split_job = replace(job, tensor_overlap=LinearOverlap("auto"), split=parts)
        if split_job.used_split == parts:
            jobs[text] = split_job
    if job.experts is not None and job.experts.parallel > 1:
        for text, way in _EXPERTS.items():
            jobs[text] = replace(job, experts=replace(job.experts, overlap=way))
    return jobs


def figures(job: Job, model: CostModel, step: StepTime) -> dict[str, float]:
    """Figures of a step."""
    seconds = step.step_us * 1e-6
    rate = job.flops() / job.world_size / seconds / 1e12
    return {
        "step_ms": step.step_us / 1e3,
        "mfu": rate / model.profile.peak_tflops(job.precision),
        "tflops_per_device": rate,
        "tokens_per_s_per_device": job.tokens / seconds / job.world_size,
        "compute_ms": step.compute_us / 1e3,
        **{f"exposed_{kind}_ms": getattr(step, f"{kind}_us") / 1e3 for kind in ("tensor", "context", "expert", "data")},
        "pipeline_ms": step.pipeline_us / 1e3,
        "optimizer_ms": step.optimizer_us / 1e3,
    }


def _memory(memory: Memory) -> dict[str, float]:
    return {"total": memory.total, **asdict(memory)}


def _show(console: Console, job: Job, model: CostModel, content: Mapping[str, Any]) -> None:
    profile = model.profile
    console.print(f"{job.label()}, {job.world_size} ranks on {profile.name}: {profile.description}")
    console.print(_table("Simulated step (times in ms)", "tensor parallelism", content["methods"]))
    memory = content["memory_gib"]
    console.print(
        f"Estimated memory of a rank: {memory['total']:.0f} GiB of {profile.device.memory_gib.value:.0f} "
        f"({memory['parameters_and_gradients']:.0f} parameters and gradients, {memory['optimizer']:.0f} optimizer, "
        f"{memory['activations']:.0f} activations).",
        soft_wrap=True,
    )
    if "sweep" in content:
        found = content["sweep"]
        title = f"Best of {found['tried']} layouts, {found['too_large']} do not fit in memory; simulated (times in ms)"
        rows = {row["layout"]: row | {"gib": row["memory_gib"]["total"]} for row in found["best"]}
        console.print(_table(title, "layout", rows))
    if "generation_us" in content:
        titles = {
            "prefill": "Prefill of N tokens",
            "decode": f"Decode of N requests with {job.seq_length} cached tokens",
        }
        times = content["generation_us"]
        for name, title in titles.items():
            columns = [(key.removeprefix(f"{name} "), key, 1.0, 0) for key in next(iter(times.values())) if name in key]
            console.print(_table(f"{title}, one layer, simulated (us)", "tensor parallelism", times, columns))
    console.print(f"Tokens/s: per device. MFU: {CONVENTION}. {content['what']}", style="dim", soft_wrap=True)


_Column = tuple[str, str, float, int]
_COLUMNS: tuple[_Column, ...] = (
    ("step", "step_ms", 1.0, 1),
    ("MFU %", "mfu", 100.0, 1),
    ("tokens/s", "tokens_per_s_per_device", 1.0, 0),
    ("tensor", "exposed_tensor_ms", 1.0, 1),
    ("context", "exposed_context_ms", 1.0, 1),
    ("expert", "exposed_expert_ms", 1.0, 1),
    ("data", "exposed_data_ms", 1.0, 1),
    ("pipeline", "pipeline_ms", 1.0, 1),
    ("GiB", "gib", 1.0, 0),
)
"""Heading, key, factor and decimals. `tensor` to `pipeline` are exposed communication and pipeline waits."""


def _table(
    title: str, first: str, rows: Mapping[str, Mapping[str, float]], columns: Sequence[_Column] = _COLUMNS
) -> Table:
    """A table with one row per name, without columns of zeros only."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    columns = [column for column in columns if any(row.get(column[1], 0.0) > 0.0 for row in rows.values())]
    for heading, *_ in columns:
        table.add_column(heading, justify="right", overflow="fold")  # an ellipsis would hide digits
    for name, row in rows.items():
        table.add_row(name, *(f"{factor * row[key]:.{digits}f}" for _, key, factor, digits in columns))
    return table
