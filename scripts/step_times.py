"""Measures the reference data of `validate_simulator.py`: a profile of this machine, and training steps.

The profile is made from separately timed GEMMs, operations and messages (`calibrate.py`, on two hosts of a
netlab), measured several times between the launches; the median of each figure counts. One figure comes from training
steps: the cost of a tensor library call, from a small model that is not among the compared ones. That model is large
enough to evict the caches.

The speed of a machine changes over time: every variant is launched once in each of several rounds, and the median of
its launches counts. A pair of variants that differs by less than its scatter is launched more often.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import calibrate
import measured_profile

from megatron_overlap.autotune.cost_model import CostModel
from megatron_overlap.config import LaunchConfig, load_launch_config, without_overlap
from megatron_overlap.config.cluster import ClusterProfile, load_cluster_profile, profile_folder, with_hosts
from megatron_overlap.tools.compare.comparison import Launched
from megatron_overlap.tools.compare.rounds import read_training, run_rounds
from megatron_overlap.tools.launch.netlab import Netlab
from megatron_overlap.tools.simulate.job import job_of
from megatron_overlap.tools.simulate.step import simulate_step

ROOT = Path(__file__).resolve().parents[1]
STEPS = ROOT / "docs" / "results" / "step_times.json"
LINE_GBPS = 0.5
"""Rate of the line between the hosts during a calibration."""
ITERATIONS, WARM_UP = 13, 5
"""Steps of a launch, and the slower steps at its start that do not count."""
ROUNDS, CALIBRATE_EVERY = 2, 3
"""Launches of each variant, and the number of shapes between two calibrations."""
MAX_ROUNDS = 8
"""Launches of a pair whose difference is within its scatter."""
_Print = Callable[[str], None]


@dataclass(frozen=True)
class Shape:
    """A config and its overrides. Data parallel overlap, where a config has it, is that of Megatron."""

    config: str
    overrides: tuple[str, ...]


def _llama(*overrides: str) -> Shape:
    return Shape("cpu/llama_tp2/netlab.yaml", (f"train.iterations={ITERATIONS}", *overrides))


def _gpt(*overrides: str) -> Shape:
    shape = ("model.hidden_size=768", "model.num_attention_heads=12", "model.num_query_groups=12")
    more = ("model.ffn_hidden_size=3072", "model.vocab_size=4000", "model.max_position_embeddings=1024")
    hosts = ("launch.ranks_per_node=null", "launch.hosts.hosts=2", "launch.hosts.ranks_per_host=1")
    batch = ("train.global_batch_size=1", f"train.iterations={ITERATIONS}")
    return Shape("cpu/gpt_tp2/overlap.yaml", (*shape, *more, *hosts, *batch, *overrides))


def _replicas(*overrides: str) -> Shape:
    return Shape("cpu/gpt_dp2/netlab.yaml", ("overlap.data.method=stock", f"train.iterations={ITERATIONS}", *overrides))


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
SMALL = _llama(
    "model.num_layers=1",
    "model.vocab_size=512",
    "train.seq_length=512",
    "train.global_batch_size=4",
    "launch.hosts.gbps=8",
)


def variants(shape: Shape) -> dict[str, LaunchConfig]:
    """The config `without` and `with` overlap."""
    loaded = load_launch_config(ROOT / "configs" / shape.config, shape.overrides)
    if loaded.parallel.tensor > 1:
        return {"without": without_overlap(loaded), "with": loaded}
    off = load_launch_config(ROOT / "configs" / shape.config, (*shape.overrides, "overlap.data.method=none"))
    return {"without": off.model_copy(update={"name": f"{off.name}_none"}), "with": loaded}


def model_of(config: LaunchConfig, profile: ClusterProfile) -> CostModel:
    """The cost model of the profile with the line rate of the config."""
    hosts = config.launch.hosts
    assert hosts is not None
    return CostModel(with_hosts(profile, hosts.gbps, hosts.ranks_per_host), config.train.precision)


def measure(shapes: int | None, out: Path) -> None:
    """Calibrate, train the first `shapes` shapes (None: all), and write both. Needs a quiet machine."""
    chosen = SHAPES[:shapes]
    log = _clock()
    small = variants(SMALL)["without"]
    small_ms, found = [], []
    runs: list[dict[str, Any]] = [
        {"config": shape.config, "overrides": list(shape.overrides), "launches_ms": {}} for shape in chosen
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for round_number in range(ROUNDS):
            # Every second round is in reversed order.
            for number, shape in list(enumerate(chosen))[:: -1 if round_number % 2 else 1]:
                if number % CALIBRATE_EVERY == 0:
                    found.append(_calibrate(log))
                    small_ms.append(_times(small, folder / f"{round_number}-small-{number}"))
                shown = _train(shape, round_number, folder / f"{round_number}-{number}", runs[number])
                log(f"round {round_number + 1} of {ROUNDS}, {number + 1} of {len(chosen)}: {shown}")
        found.append(_calibrate(log))
        log(f"small model: {', '.join(f'{each:.0f}' for each in small_ms)} ms")
        content: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "small_steps_ms": small_ms}
        content |= {"calibrations": found, "runs": runs}
        content["profile"] = profile_content(content, folder)
    _write(out, content)
    clarify_order(out)


def clarify_order(out: Path) -> None:
    """Launch the pairs of a file with an unclear order again, until it is clear or after `MAX_ROUNDS` launches."""
    content, log = json.loads(out.read_text(encoding="utf-8")), _clock()
    for run in content["runs"]:
        shape, launches_ms = Shape(run["config"], tuple(run["overrides"])), run["launches_ms"]
        while (launches := len(launches_ms["with"])) < MAX_ROUNDS and not apart(launches_ms):
            with tempfile.TemporaryDirectory() as name:
                log(f"unclear order after {launches} launches: {_train(shape, launches, Path(name), run)}")
            _write(out, content)


def apart(launches_ms: Mapping[str, list[float]]) -> bool:
    """Whether launches without and with overlap differ by more than two standard errors of the difference."""
    off, on = launches_ms["without"], launches_ms["with"]
    error = math.sqrt(sum(statistics.variance(each) / len(each) for each in (off, on)))
    return abs(statistics.mean(off) - statistics.mean(on)) > 2 * error


def _clock() -> _Print:
    start = time.monotonic()
    return lambda text: print(f"{time.monotonic() - start:4.0f} s  {text}", flush=True)


def _write(out: Path, content: Mapping[str, Any]) -> None:
    out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _calibrate(log: _Print) -> dict[str, Any]:
    """The figures of this machine, on two hosts."""
    with Netlab(hosts=2, gbps=LINE_GBPS) as lab:
        found = calibrate.run_ranks(2, "bf16", lab, timeout_s=120)
    log(f"calibrated: GEMM {found['peak_tflops']:.3f} TFLOP/s a rank")
    return found


def medians(found: Sequence[Any]) -> Any:
    """The median of every figure of several calibrations."""
    if isinstance(found[0], Mapping):
        return {key: medians([one[key] for one in found]) for key in found[0]}
    if isinstance(found[0], list | tuple):
        return [medians(part) for part in zip(*found, strict=True)]
    return statistics.median(found)


def _train(shape: Shape, round_number: int, folder: Path, run: dict[str, Any]) -> str:
    """Launch each variant once, in reversed order in odd rounds, add the times to `run`, and describe them."""
    named = list(variants(shape).items())[:: -1 if round_number % 2 else 1]
    sides = run_rounds([config for _, config in named], 1, folder, read=read_training)
    for (name, _), side in zip(named, sides, strict=True):
        run["launches_ms"].setdefault(name, []).append(_median(side))
    run["versions"] = sides[0].records[0].meta.get("versions", {})
    shown = ", ".join(f"{run['launches_ms'][name][-1]:.0f} ms {name}" for name, _ in named)
    return f"{shown} ({shape.config} {' '.join(shape.overrides)})"


def _times(config: LaunchConfig, folder: Path) -> float:
    return _median(run_rounds([config], 1, folder, read=read_training)[0])


def _median(side: Launched[Any]) -> float:
    return statistics.median(side.records[0].step_time_ms[WARM_UP:])


def profile_content(measured: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The content of a profile, with its base by name.

    Args:
        measured: the date, the calibrations and the steps of the small model from a file of step times.
        folder: for a temporary file.
    """
    found = measured["calibrations"]
    source = f"measured between the steps, {measured['date']}: medians of {len(found)} calibrations"
    tree = measured_profile.profile_tree(medians(found), "bf16", source, LINE_GBPS)
    tree["base"] = f"{measured_profile.BASE}.yaml"
    config, small_ms = variants(SMALL)["without"], statistics.median(measured["small_steps_ms"])

    def modelled_ms(call_us: float) -> float:
        tree["device"]["call_us"] = {"value": call_us, "source": "not yet known"}
        return simulate_step(job_of(config), model_of(config, stored(tree, folder))).step_us / 1e3

    free = modelled_ms(0.0)
    call_us = max(0.0, (small_ms - free) / (modelled_ms(1.0) - free))
    origin = f"steps of a small model, {small_ms:.0f} ms, minus the modelled time without calls; the only step used"
    tree["device"]["call_us"] = {"value": call_us, "source": origin}
    return tree


def stored(tree: Mapping[str, Any], folder: Path) -> ClusterProfile:
    """The profile with this content, read from a file in `folder`."""
    path = folder / "profile.yaml"
    measured_profile.write_profile(path, {**tree, "base": str(profile_folder() / tree["base"])})
    return load_cluster_profile(str(path))


@dataclass(frozen=True)
class Measured:
    """A shape, and the step times of its launches in ms by variant."""

    shape: Shape
    launches_ms: Mapping[str, list[float]]


def measured(steps: Path) -> tuple[ClusterProfile, list[Measured]]:
    """The profile and the steps of a file."""
    content = json.loads(steps.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name:
        profile = stored(content["profile"], Path(name))
    return profile, [
        Measured(Shape(run["config"], tuple(run["overrides"])), run["launches_ms"]) for run in content["runs"]
    ]
