"""Measures what `validate_simulator.py` holds the simulator against: a profile of this machine, and training steps.

The profile is made of GEMMs, operations and messages that are timed by themselves (`measure/machine.py`, on two hosts
of a netlab), three times: before the steps, among them and after; the medians count. One figure, what a call of torch
costs in the program around it, is taken from the steps of a model too small to compute anything, which is not among
those that are compared. Nothing else of a step goes into the profile.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_overlap.config import LaunchConfig, load_launch_config, without_overlap
from megatron_overlap.config.cluster import ClusterProfile, load_cluster_profile, profile_folder, with_hosts
from megatron_overlap.launch.workers import run_workers
from megatron_overlap.measure import machine
from megatron_overlap.measure.calibration import BASE, lab_tree, middle, write_profile
from megatron_overlap.measure.compare import WARM_UP_ITERATIONS
from megatron_overlap.measure.peak import measure_peak
from megatron_overlap.measure.rounds import run_rounds
from megatron_overlap.simulate.job import job_of
from megatron_overlap.simulate.step import simulate_step
from megatron_overlap.tune.cost import CostModel

ROOT = Path(__file__).resolve().parents[1]
STEPS = ROOT / "docs" / "results" / "step_times.json"
LINES_GBPS = (1.0, 8.0)
# A shape is measured again, once, when GEMMs around it ran so much faster or slower than the profile's.
FLIPPED, AGAIN = 0.08, 2


@dataclass(frozen=True)
class Shape:
    """A config and what is changed in it. Its data parallel overlap, where it has one, is Megatron's own."""

    config: str
    overrides: tuple[str, ...]


def _llama(*overrides: str) -> Shape:
    return Shape("llama_tp2_netlab.yaml", ("train.iterations=10", *overrides))


def _gpt(*overrides: str) -> Shape:
    shape = ("model.hidden_size=768", "model.num_attention_heads=12", "model.num_query_groups=12")
    more = ("model.ffn_hidden_size=3072", "model.vocab_size=4000", "model.max_position_embeddings=1024")
    hosts = ("launch.ranks_per_node=null", "launch.hosts.hosts=2", "launch.hosts.ranks_per_host=1")
    batch = ("train.global_batch_size=1", "train.iterations=10")
    return Shape("gpt_tp2_overlap.yaml", (*shape, *more, *hosts, *batch, *overrides))


def _replicas(*overrides: str) -> Shape:
    return Shape("gpt_dp2_netlab.yaml", ("overlap.data.method=megatron", "train.iterations=10", *overrides))


_NARROW = ("model.hidden_size=512", "model.ffn_hidden_size=1408")
SHAPES = (
    _llama("model.num_layers=2", "launch.hosts.gbps=0.3"),
    _llama("model.num_layers=2", "launch.hosts.gbps=0.8"),
    _llama("model.num_layers=2", "launch.hosts.gbps=2"),
    _llama("model.num_layers=2", "launch.hosts.gbps=8"),
    _llama("model.num_layers=2", "launch.hosts.gbps=0.5", *_NARROW),
    _llama("model.num_layers=2", "launch.hosts.gbps=0.5", "train.seq_length=512"),
    _llama("model.num_layers=2", "launch.hosts.gbps=1", "train.global_batch_size=4"),
    _llama("model.num_layers=1", "launch.hosts.gbps=0.5"),
    _llama("model.num_layers=4", "launch.hosts.gbps=1"),
    _llama("model.num_layers=3", "launch.hosts.gbps=1", "train.seq_length=512", "train.global_batch_size=3"),
    _gpt("model.num_layers=3", "train.seq_length=512", "launch.hosts.gbps=0.5"),
    _gpt("model.num_layers=2", "train.seq_length=1024", "launch.hosts.gbps=1", "train.global_batch_size=2"),
    _replicas("launch.hosts.gbps=1"),
    _replicas("launch.hosts.gbps=3", "train.global_batch_size=4"),
)
TINY = _llama(
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.vocab_size=128",
    "train.seq_length=64",
    "train.global_batch_size=4",
    "train.iterations=12",
    "launch.hosts.gbps=8",
)


def variants(shape: Shape) -> dict[str, LaunchConfig]:
    """`without` overlap and `with` it."""
    loaded = load_launch_config(ROOT / "configs" / shape.config, shape.overrides)
    if loaded.parallel.tensor > 1:
        return {"without": without_overlap(loaded), "with": loaded}
    off = load_launch_config(ROOT / "configs" / shape.config, (*shape.overrides, "overlap.data.method=none"))
    return {"without": off.model_copy(update={"name": f"{off.name}_none"}), "with": loaded}


def model_of(config: LaunchConfig, profile: ClusterProfile) -> CostModel:
    """The profile with the config's line."""
    hosts = config.launch.hosts
    assert hosts is not None
    return CostModel(with_hosts(profile, hosts.gbps, hosts.ranks_per_host), config.train.precision)


def measure(shapes: int | None, out: Path) -> None:
    """Calibrate, train the first so many shapes, or all, and write both: on a quiet machine."""
    chosen = SHAPES[:shapes]
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:4.0f} s  {text}", flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = [_calibrate(say)]
        runs = []
        for number, shape in enumerate(chosen):
            if number == len(chosen) // 2 > 0:
                found.append(_calibrate(say))
            runs.append(_train(shape, folder / str(number), f"{number + 1} of {len(chosen)}", say))
        found.append(_calibrate(say))
        gemms = statistics.median(one["peak_tflops"] for pair in found for one in pair)
        again = [number for number, run in enumerate(runs) if abs(run["gemm_tflops"] / gemms - 1) > FLIPPED]
        for number in again[:AGAIN]:
            repeated = _train(chosen[number], folder / f"{number}-again", f"{number + 1} again", say)
            if abs(repeated["gemm_tflops"] / gemms - 1) < abs(runs[number]["gemm_tflops"] / gemms - 1):
                runs[number] = repeated | {"repeated": True}
        tiny = _times(without_overlap(variants(TINY)["with"]), folder / "tiny")
        say(f"tiny model: {tiny:.0f} ms")
        tree = _tree(found, tiny, folder)
    content = {"profile": tree, "calibrations": found, "tiny_step_ms": tiny, "runs": runs}
    out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _calibrate(say: Any) -> list[dict[str, Any]]:
    """This machine's figures, over both lines."""
    found = []
    for gbps in LINES_GBPS:
        with tempfile.TemporaryDirectory() as folder:
            run_workers(machine.__file__, [folder, "calibrate", "bf16"], 2, hosts=2, gbps=gbps, timeout_s=120)
            found.append(json.loads(Path(folder, "rank0.json").read_text()))
    say(f"calibrated: GEMM {found[0]['peak_tflops']:.3f} and {found[1]['peak_tflops']:.3f} TFLOP/s a rank")
    return found


def _train(shape: Shape, folder: Path, what: str, say: Any) -> dict[str, Any]:
    """Each variant twice, in turn; the median of all steps counts."""
    used = list(variants(shape).values())
    recorded = run_rounds(used, 1, folder / "1")
    rate = measure_peak(used[1]).tflops  # in the middle
    again = run_rounds(used[::-1], 1, folder / "2")[::-1]
    launches = {
        name: [one.records[0].step_time_ms[WARM_UP_ITERATIONS:] for one in pair]
        for name, *pair in zip(variants(shape), recorded, again, strict=True)
    }
    times = {name: statistics.median(itertools.chain(*steps)) for name, steps in launches.items()}
    shown = ", ".join(f"{time_ms:.0f} ms {name}" for name, time_ms in times.items())
    say(f"{what}: {shown}, GEMM {rate:.3f} TFLOP/s ({shape.config} {' '.join(shape.overrides)})")
    return {
        "config": shape.config,
        "overrides": list(shape.overrides),
        "step_time_ms": times,
        "launches_ms": {name: [statistics.median(steps) for steps in each] for name, each in launches.items()},
        "gemm_tflops": rate,
        "versions": recorded[0].records[0].meta.get("versions", {}),
    }


def _times(config: LaunchConfig, folder: Path) -> float:
    record = run_rounds([config], 1, folder)[0].records[0]
    return statistics.median(record.step_time_ms[WARM_UP_ITERATIONS:])


def _tree(found: Sequence[Sequence[Mapping[str, Any]]], tiny_ms: float, folder: Path) -> dict[str, Any]:
    """The profile's content, `base` by name."""
    slow, fast = (middle([pair[index] for pair in found]) for index in range(2))
    source = f"measured beside the steps, {time.strftime('%Y-%m-%d')}: medians of {len(found)} calibrations"
    tree = lab_tree(slow, fast, LINES_GBPS, "bf16", source)
    tree["base"] = f"{BASE}.yaml"
    config = variants(TINY)["without"]

    def modelled_ms(call_us: float) -> float:
        tree["device"]["call_us"] = {"value": call_us, "source": "not yet known"}
        return simulate_step(job_of(config), model_of(config, stored(tree, folder))).step_us / 1e3

    free = modelled_ms(0.0)
    each = max(0.0, (tiny_ms - free) / (modelled_ms(1.0) - free))
    said = f"steps of a model of 64 columns, {tiny_ms:.0f} ms, less what is modelled without; the only step used"
    tree["device"]["call_us"] = {"value": each, "source": said}
    return tree


def stored(tree: Mapping[str, Any], folder: Path) -> ClusterProfile:
    """The profile of a file's content, by way of `folder`."""
    path = folder / "profile.yaml"
    write_profile(path, {**tree, "base": str(profile_folder() / tree["base"])})
    return load_cluster_profile(str(path))


def measured(steps: Path) -> Iterator[tuple[Shape, Mapping[str, float]]]:
    """The shapes of a file and their step times in ms, by variant."""
    for run in json.loads(steps.read_text(encoding="utf-8"))["runs"]:
        yield Shape(run["config"], tuple(run["overrides"])), run["step_time_ms"]


def measured_profile(steps: Path) -> ClusterProfile:
    """The profile that was measured beside them, or `netlab` where none was."""
    tree = json.loads(steps.read_text(encoding="utf-8"))["profile"]
    if tree is None:
        return load_cluster_profile(BASE)
    with tempfile.TemporaryDirectory() as folder:
        return stored(tree, Path(folder))
