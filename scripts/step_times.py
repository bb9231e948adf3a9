"""Measures what `validate_simulator.py` holds the simulator against: a profile of this machine, and training steps.

The profile is made of GEMMs, operations and messages that are timed by themselves (`tools/doctor/machine.py`, on two
hosts
of a netlab), again and again between the launches; the medians of all count. One figure, what a call of torch costs
in the program around it, is taken from the steps of a small model which is not among those that are compared, though
large enough that the program finds no cache as it left it. Nothing else of a step goes into the profile.

A machine may be faster at one time than at another: every variant is launched in each of some rounds, and the median of
its launches counts. What single launches differ from that median is what no model can foretell. A pair that these
rounds do not tell apart is launched more often.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_overlap.autotune.cost_model import CostModel
from megatron_overlap.config import LaunchConfig, load_launch_config, without_overlap
from megatron_overlap.config.cluster import ClusterProfile, load_cluster_profile, profile_folder, with_hosts
from megatron_overlap.tools.compare.rounds import Recorded, run_rounds
from megatron_overlap.tools.doctor import machine
from megatron_overlap.tools.doctor.calibration import lab_tree, middle, write_profile
from megatron_overlap.tools.launch.ranks import run_workers
from megatron_overlap.tools.simulate.job import job_of
from megatron_overlap.tools.simulate.step import simulate_step

ROOT = Path(__file__).resolve().parents[1]
STEPS = ROOT / "docs" / "results" / "step_times.json"
LINES_GBPS = (0.5, 8.0)
# Lines between them, for what computation loses beside messages.
BETWEEN_GBPS = (1.5,)
# Steps of a launch, and those at its start that are slower than the later ones.
ITERATIONS, SETTLING = 13, 5
# All variants are launched so often, and the machine calibrated before each of so many of them in turn.
ROUNDS, CALIBRATE_EVERY = 2, 3
# Pairs that are not told apart are launched up to so often.
MOST_ROUNDS = 8
_Say = Callable[[str], None]


@dataclass(frozen=True)
class Shape:
    """A config and what is changed in it. Its data parallel overlap, where it has one, is Megatron's own."""

    config: str
    overrides: tuple[str, ...]


def _llama(*overrides: str) -> Shape:
    return Shape("llama_tp2_netlab.yaml", (f"train.iterations={ITERATIONS}", *overrides))


def _gpt(*overrides: str) -> Shape:
    shape = ("model.hidden_size=768", "model.num_attention_heads=12", "model.num_query_groups=12")
    more = ("model.ffn_hidden_size=3072", "model.vocab_size=4000", "model.max_position_embeddings=1024")
    hosts = ("launch.ranks_per_node=null", "launch.hosts.hosts=2", "launch.hosts.ranks_per_host=1")
    batch = ("train.global_batch_size=1", f"train.iterations={ITERATIONS}")
    return Shape("gpt_tp2_overlap.yaml", (*shape, *more, *hosts, *batch, *overrides))


def _replicas(*overrides: str) -> Shape:
    return Shape("gpt_dp2_netlab.yaml", ("overlap.data.method=stock", f"train.iterations={ITERATIONS}", *overrides))


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
    say = _clock()
    small = variants(SMALL)["without"]
    small_ms, found = [], []
    runs: list[dict[str, Any]] = [
        {"config": shape.config, "overrides": list(shape.overrides), "launches_ms": {}} for shape in chosen
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for turn in range(ROUNDS):
            # What comes late in one round comes early in the next.
            for number, shape in list(enumerate(chosen))[:: -1 if turn % 2 else 1]:
                if number % CALIBRATE_EVERY == 0:
                    found.append(_calibrate(say))
                    small_ms.append(_times(small, folder / f"{turn}-small-{number}"))
                shown = _train(shape, turn, folder / f"{turn}-{number}", runs[number])
                say(f"round {turn + 1} of {ROUNDS}, {number + 1} of {len(chosen)}: {shown}")
        found.append(_calibrate(say))
        say(f"small model: {', '.join(f'{each:.0f}' for each in small_ms)} ms")
        content: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "small_steps_ms": small_ms}
        content |= {"calibrations": found, "runs": runs}
        content["profile"] = profile_content(content, folder)
    _write(out, content)
    tell_apart(out)


def tell_apart(out: Path) -> None:
    """Launch the pairs of a file that are not told apart again, until they are or `MOST_ROUNDS` have been."""
    content, say = json.loads(out.read_text(encoding="utf-8")), _clock()
    for run in content["runs"]:
        shape, launches_ms = Shape(run["config"], tuple(run["overrides"])), run["launches_ms"]
        while (turn := len(launches_ms["with"])) < MOST_ROUNDS and not apart(launches_ms):
            with tempfile.TemporaryDirectory() as name:
                say(f"not told apart, launched {turn} times: {_train(shape, turn, Path(name), run)}")
            _write(out, content)


def apart(launches_ms: Mapping[str, list[float]]) -> bool:
    """Whether launches without and with overlap differ by more than two standard errors of the difference."""
    off, on = launches_ms["without"], launches_ms["with"]
    error = math.sqrt(sum(statistics.variance(each) / len(each) for each in (off, on)))
    return abs(statistics.mean(off) - statistics.mean(on)) > 2 * error


def _clock() -> _Say:
    start = time.monotonic()
    return lambda text: print(f"{time.monotonic() - start:4.0f} s  {text}", flush=True)


def _write(out: Path, content: Mapping[str, Any]) -> None:
    out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _calibrate(say: _Say) -> list[dict[str, Any]]:
    """This machine's figures, over all lines."""
    found = []
    tasks = [("calibrate", gbps) for gbps in LINES_GBPS] + [("beside", gbps) for gbps in BETWEEN_GBPS]
    for task, gbps in tasks:
        with tempfile.TemporaryDirectory() as folder:
            run_workers(machine.__file__, [folder, task, "bf16"], 2, hosts=2, gbps=gbps, timeout_s=120)
            found.append(json.loads(Path(folder, "rank0.json").read_text()))
    say(f"calibrated: GEMM {found[0]['peak_tflops']:.3f} and {found[1]['peak_tflops']:.3f} TFLOP/s a rank")
    return found


def _train(shape: Shape, turn: int, folder: Path, run: dict[str, Any]) -> str:
    """One launch of each variant, in the other order every other turn, into `run`; returns it in words."""
    named = list(variants(shape).items())[:: -1 if turn % 2 else 1]
    sides = run_rounds([config for _, config in named], 1, folder)
    for (name, _), side in zip(named, sides, strict=True):
        run["launches_ms"].setdefault(name, []).append(_median(side))
    run["versions"] = sides[0].records[0].meta.get("versions", {})
    shown = ", ".join(f"{run['launches_ms'][name][-1]:.0f} ms {name}" for name, _ in named)
    return f"{shown} ({shape.config} {' '.join(shape.overrides)})"


def _times(config: LaunchConfig, folder: Path) -> float:
    return _median(run_rounds([config], 1, folder)[0])


def _median(side: Recorded) -> float:
    return statistics.median(side.records[0].step_time_ms[SETTLING:])


def profile_content(measured: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A profile's content, `base` by name.

    Args:
        measured: what a file of step times has: its date, calibrations and steps of the small model.
        folder: for a file on the way.
    """
    found = measured["calibrations"]
    slow, fast, *between = (middle([lines[index] for lines in found]) for index in range(len(found[0])))
    source = f"measured beside the steps, {measured['date']}: medians of {len(found)} calibrations"
    tree = lab_tree(slow, fast, LINES_GBPS, "bf16", source, between)
    tree["base"] = f"{machine.BASE}.yaml"
    config, small_ms = variants(SMALL)["without"], statistics.median(measured["small_steps_ms"])

    def modelled_ms(call_us: float) -> float:
        tree["device"]["call_us"] = {"value": call_us, "source": "not yet known"}
        return simulate_step(job_of(config), model_of(config, stored(tree, folder))).step_us / 1e3

    free = modelled_ms(0.0)
    each = max(0.0, (small_ms - free) / (modelled_ms(1.0) - free))
    said = f"steps of a small model, {small_ms:.0f} ms, less what is modelled without; the only step used"
    tree["device"]["call_us"] = {"value": each, "source": said}
    return tree


def stored(tree: Mapping[str, Any], folder: Path) -> ClusterProfile:
    """The profile of a file's content, by way of `folder`."""
    path = folder / "profile.yaml"
    write_profile(path, {**tree, "base": str(profile_folder() / tree["base"])})
    return load_cluster_profile(str(path))


@dataclass(frozen=True)
class Measured:
    """A shape, and by variant the step times of its launches in ms."""

    shape: Shape
    launches_ms: Mapping[str, list[float]]


def measured(steps: Path) -> tuple[ClusterProfile, list[Measured]]:
    """What a file has: the machine's profile, and its steps."""
    content = json.loads(steps.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name:
        profile = stored(content["profile"], Path(name))
    return profile, [
        Measured(Shape(run["config"], tuple(run["overrides"])), run["launches_ms"]) for run in content["runs"]
    ]
