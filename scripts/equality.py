#!/usr/bin/env python
"""Trains the same models with and without the plugin and compares every loss and grad-norm.

    python scripts/prepare_data.py --output data/stdlib
    python scripts/equality.py --data data/stdlib --json docs/results/equality.json
    python scripts/equality.py --data data/stdlib --transformer-impl transformer_engine --json equality_te.json

A GPT and a LLaMA (RMSNorm, SwiGLU, RoPE, grouped queries), in every layout below, in fp32 and bf16, on text; then
training saved half-way and continued with the plugin on, off, and switched. No GPU is needed. `--device cuda` trains on
the GPUs of this machine; with `--share-gpu` all ranks use one, which needs NCCL 2.30.3. `docs/numerics.md` says where
the bounds come from. Exit code 1 where one does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_overlap.config import LaunchConfig  # noqa: E402
from megatron_overlap.tools.launch.plan import LaunchPlan, entry_args, execute, gpu_env, plan  # noqa: E402
from megatron_overlap.tools.launch.processes import RunError, worker_commands  # noqa: E402
from scripts.gpu.part_process import SHARED_GPU_ENV, device_text  # noqa: E402
from scripts.trust.deviations import (  # noqa: E402
    BF16_FACTOR,
    FP32_BOUND,
    NAMES,
    Check,
    Curves,
    deviation,
    medians,
    scaled,
)
from scripts.trust.layouts import ALONE, GROUPED, LAYOUTS, Layout  # noqa: E402

ROWS, ROWS_OF_DOCUMENTS = 128, 512
"""Tokens of a micro-batch's row."""
SEED = 1234
"""Megatron's default: of the weights and the order of the data."""

RESUMED = [layout for layout in LAYOUTS if layout.name in ("TP2+SP", "TP2+SP-sequence-split")]
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt": {"ffn_hidden_size": 512},
    "llama": {"ffn_hidden_size": 344, "num_query_groups": 4},
}


class Runs:
    """Launches trainings, each in a folder of its own under `folder`."""

    def __init__(self, folder: Path, options: argparse.Namespace, tell: Callable[[str], None]) -> None:
        self._folder, self._options, self._tell = folder, options, tell
        self.count = 0

    def more_seeds(self, layout: Layout, first: dict[str, float], bound: dict[str, float]) -> range:
        """The seeds of further bf16 trainings, whose median deviation is judged.

        How far rounding moves one training is chance, and rarely very far, above all where it sends single tokens to
        other experts. Lower precision would move every training. Without experts `min_seeds` are enough if the first
        training is within the bound.
        """
        enough = layout.expert == 1 and all(first[name] <= bound[name] for name in NAMES)
        return range(1, self._options.min_seeds if enough else self._options.seeds)

    def train(
        self,
        arch: str,
        layout: Layout,
        precision: str,
        plugin: bool,
        *,
        seed: int = SEED,
        save: bool = False,
        load: Path | None = None,
    ) -> tuple[Curves, dict[str, Any]]:
        """One training; its curves and the plugin's report of rank 0.

        Raises:
            RunError: a rank failed.
        """
        self.count += 1
        name = f"{self.count:02d}-{arch}-{layout.name}-{precision}-{'plugin' if plugin else 'stock'}"
        run_dir = self._folder / name.lower().replace("+", "-")
        options, half = self._options, self._options.iterations // 2
        rows = ROWS_OF_DOCUMENTS if layout.documents else ROWS
        varlen = ("balanced" if plugin else "masked") if layout.documents else "none"
        places = {"save": str(run_dir / "saved"), "save_interval": half} if save else {}
        if load is not None:
            places["load"] = str(load)
        config = LaunchConfig.model_validate(
            {
                "name": run_dir.name,
                "model": {
                    "arch": arch,
                    "num_layers": 2,
                    "hidden_size": 128,
                    "num_attention_heads": 8,
                    "vocab_size": 4000,
                    "max_position_embeddings": rows,
                    **ARCHITECTURES[arch],
                    **({"add_bias": False} if layout.expert > 1 else {}),
                },
                "parallel": {
                    "tensor": layout.tensor,
                    "context": layout.context,
                    "pipeline": layout.pipeline,
                    "sequence_parallel": layout.sequence_parallel,
                },
                "train": {
                    "seq_length": rows,
                    "micro_batch_size": 1 if layout.documents or layout.split == "sequence" else 2,
                    "global_batch_size": 4 if layout.documents else 8,
                    "iterations": options.iterations,
                    "seed": seed,
                    "precision": precision,
                    "lr": 1e-3,
                    "min_lr": 1e-4,
                    "lr_warmup_iterations": 2,
                    "transformer_impl": options.transformer_impl,
                    "recompute": layout.recompute,
                    "distributed_optimizer": layout.sharded,
                    **places,
                },
                "data": {"kind": "text", "path": str(options.data)},
                "overlap": {
                    "tensor": {
                        "method": options.method if plugin else "none",
                        "schedule": options.schedule,
                        "chunks_per_rank": options.chunks_per_rank,
                        "split": layout.split,
                        "split_at": layout.split_at or "auto",
                    },
                    "data": {"method": "p2p" if plugin and layout.data > 1 and layout.expert == 1 else "stock"},
                    "ulysses": {"method": "p2p" if layout.context > 1 and not layout.documents else "none"},
                    "expert": {"method": "p2p" if plugin and layout.expert > 1 else "none"},
                    "varlen": {"method": varlen},
                },
                "launch": {"device": options.device, "ranks_per_node": layout.ranks, "timeout_s": options.timeout},
                "megatron_args": [
                    # The whole weight is drawn and then cut: the same model in every layout. Several buckets.
                    *("--use-cpu-initialization", "--ddp-bucket-size", "100000"),
                    *(*layout.flags, *options.megatron_args),
                ],
            }
        )
        start_s = time.monotonic()
        execute(on_shared_gpu(plan(config, run_dir)) if options.share_gpu else plan(config, run_dir))
        self._tell(f"{run_dir.name}: {time.monotonic() - start_s:.0f} s")
        # The last pipeline stage has the loss.
        lines = (run_dir / f"steps-rank{layout.ranks - 1}.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        report = json.loads((run_dir / "report-rank0.json").read_text())
        return {row["iteration"]: {name: row[name] for name in NAMES} for row in steps}, report

    def checkpoint(self) -> Path:
        """The half-way checkpoint of the run just made, as a folder to load from."""
        saved = next(self._folder.glob(f"{self.count:02d}-*")) / "saved"
        (saved / "latest_checkpointed_iteration.txt").write_text(str(self._options.iterations // 2))
        return saved


def on_shared_gpu(launch: LaunchPlan) -> LaunchPlan:
    """The same launch with all ranks on the first GPU."""
    config = launch.config
    argv = [sys.executable, "-m", "megatron_overlap", *entry_args(config, launch.run_dir)]
    ranks = worker_commands(argv, config.world_size)
    env = gpu_env(config) | SHARED_GPU_ENV | {"LOCAL_RANK": "0"}
    return replace(launch, commands=tuple(replace(each, env={**each.env, **env}) for each in ranks))


def calls_of(report: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Overlapped calls by kind and direction, and fallbacks by reason."""
    calls: dict[str, int] = {}
    fallbacks: dict[str, int] = {}
    for module in report["modules"]:
        if module["overlapped"]:
            key = f"{module['kind']} {module['direction']}"
            calls[key] = calls.get(key, 0) + module["overlapped"]
        for reason, count in module["fallbacks"].items():
            fallbacks[reason] = fallbacks.get(reason, 0) + count
    return calls, fallbacks


def compare_layout(
    runs: Runs, arch: str, layout: Layout, alone: dict[str, Curves], iterations: Sequence[int]
) -> Iterator[Check]:
    """A layout with and without the plugin, fp32 first: bf16 is judged by it.

    `alone`: stock on one rank, by precision.
    """
    exact: Curves = {}
    for precision in ("fp32", "bf16"):
        plain = layout.without_context
        alike = plain.ranks == 1 and not layout.documents
        stock = alone[precision] if alike else runs.train(arch, plain, precision, False)[0]
        mine, report = runs.train(arch, layout, precision, True)
        beside = {"plugin from stock": deviation(mine, stock, iterations)}
        if not layout.documents and layout.expert == layout.pipeline == 1:  # else other tokens, or another model
            beside["stock from TP1 stock"] = deviation(stock, alone[precision], iterations)
            beside["plugin from TP1 stock"] = deviation(mine, alone[precision], iterations)
        if precision == "fp32":
            exact = stock
            what, off, bound = "from stock", beside["plugin from stock"], dict.fromkeys(NAMES, FP32_BOUND)
        else:
            of_plugin, of_stock = [deviation(mine, exact, iterations)], [deviation(stock, exact, iterations)]
            for seed in runs.more_seeds(layout, of_plugin[0], scaled(of_stock[0])):
                found = deviations_of_seed(runs, arch, layout, seed, iterations)
                of_plugin.append(found[0])
                of_stock.append(found[1])
            for number, (plugin, own) in enumerate(zip(of_plugin, of_stock, strict=True)):
                suffix = f", seed {number}" if number else ""
                beside |= {f"plugin from fp32{suffix}": plugin, f"stock from fp32{suffix}": own}
            what, off, bound = "from fp32", medians(of_plugin), scaled(medians(of_stock))
        check = Check(arch, layout.name, precision, what, off, bound, beside, *calls_of(report))
        yield check.judge(layout.calls)


def deviations_of_seed(
    runs: Runs, arch: str, layout: Layout, seed: int, iterations: Sequence[int]
) -> tuple[dict[str, float], dict[str, float]]:
    """Deviations of plugin and stock in bf16 with another seed from stock in fp32 with that seed."""
    exact, stock, mine = (
        runs.train(arch, layout, precision, plugin, seed=seed)[0]
        for precision, plugin in (("fp32", False), ("bf16", False), ("bf16", True))
    )
    return deviation(mine, exact, iterations), deviation(stock, exact, iterations)


def compare_resumed(runs: Runs, arch: str, layout: Layout, iterations: Sequence[int]) -> Iterator[Check]:
    """Saved half-way with the plugin on and off, continued with it on and off."""
    rest = iterations[len(iterations) // 2 :]
    exact: Curves = {}
    for precision in ("fp32", "bf16"):
        whole, resumed = resumed_runs(runs, arch, layout, precision, rest)
        exact = whole[False] if precision == "fp32" else exact
        of_stock = [deviation(whole[False], exact, iterations)]
        of_plugin = {how: [deviation(curves, exact, rest)] for how, (curves, _) in resumed.items()}
        worst = {name: max(of_run[0][name] for of_run in of_plugin.values()) for name in NAMES}
        for seed in runs.more_seeds(layout, worst, scaled(of_stock[0])) if precision == "bf16" else ():
            other = runs.train(arch, layout, "fp32", False, seed=seed)[0]
            of_seed, resumed_of_seed = resumed_runs(runs, arch, layout, precision, rest, seed)
            of_stock.append(deviation(of_seed[False], other, iterations))
            for how, (curves, _) in resumed_of_seed.items():
                of_plugin[how].append(deviation(curves, other, rest))
        bound = dict.fromkeys(NAMES, FP32_BOUND) if precision == "fp32" else scaled(medians(of_stock))
        for (before, after), (curves, report) in resumed.items():
            beside = {"from the whole run": deviation(curves, whole[before], rest)}
            for seed, off in enumerate(of_plugin[before, after][1:], start=1):
                beside[f"plugin from fp32, seed {seed}"] = off
            words = {False: "off", True: "on"}
            what = f"resumed, {words[before]} then {words[after]}"
            off = medians(of_plugin[before, after])
            check = Check(arch, layout.name, precision, what, off, bound, beside, *calls_of(report))
            yield check.judge(layout.calls if after else None)


Resumed = dict[tuple[bool, bool], tuple[Curves, dict[str, Any]]]
"""Curves and report of a training, by whether the plugin was on before and after it was resumed."""


def resumed_runs(
    runs: Runs, arch: str, layout: Layout, precision: str, rest: Sequence[int], seed: int = SEED
) -> tuple[dict[bool, Curves], Resumed]:
    """Whole trainings with the plugin off and on, and each continued half-way with it off and on."""
    whole: dict[bool, Curves] = {}
    resumed: Resumed = {}
    for before in (False, True):
        whole[before], _ = runs.train(arch, layout, precision, before, save=True, seed=seed)
        saved = runs.checkpoint()
        for after in (False, True):
            resumed[before, after] = runs.train(arch, layout, precision, after, load=saved, seed=seed)
            found = sorted(resumed[before, after][0])
            if found != list(rest):
                raise RunError(f"resumed at iteration {min(found, default=0)} instead of {rest[0]}")
        shutil.rmtree(saved)
    return whole, resumed


def table(checks: Sequence[Check]) -> Table:
    """All checks for a terminal; deviations are relative, the largest over the iterations."""
    shown = Table("model", "layout", "", "plugin", title="deviation (bound)", title_justify="left")
    for heading in ("loss", "grad-norm", "from stock TP1: loss", "grad-norm"):
        shown.add_column(heading, justify="right")
    shown.add_column("")
    for check in checks:
        cells = [f"{check.deviation[name]:.1e} ({check.bound[name]:.1e})" for name in NAMES]
        alone = check.beside.get("plugin from TP1 stock", {})
        cells += [f"{alone[name]:.1e}" if alone else "" for name in NAMES]
        how = check.what if check.calls or check.what.startswith("resumed") else f"{check.what}; falls back, by name"
        shown.add_row(check.arch, check.layout, check.precision, how, *cells, "ok" if check.ok else "NOT EQUAL")
    return shown


def as_json(options: argparse.Namespace, meta: dict[str, Any], checks: Sequence[Check], complete: bool) -> str:
    """What is kept of the comparison."""
    content = {
        "command": shlex.join(["python", "scripts/equality.py", *sys.argv[1:]]),
        "complete": complete,
        "equal": complete and all(check.ok for check in checks),
        "iterations": options.iterations,
        "seeds": options.seeds,
        "transformer_impl": options.transformer_impl,
        "overlap": {name: getattr(options, name) for name in ("method", "schedule", "chunks_per_rank")},
        "megatron_args": options.megatron_args,
        "bounds": {"fp32": FP32_BOUND, "bf16": f"{BF16_FACTOR} x stock's own deviation from fp32, medians over seeds"},
        **meta,
        "checks": [asdict(check) for check in checks],
    }
    return json.dumps(content, indent=1) + "\n"


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """Where it ran."""
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = cpus[0].partition(":")[2].strip() if cpus else platform.processor()
    device = "cpu, gloo over loopback, 1 thread a rank"
    if options.device == "cuda":
        device = device_text() + (", shared by all ranks" if options.share_gpu else "")
    return {"cpu": name, "cores": os.cpu_count(), "device": device}


def versions(folder: Path) -> dict[str, str]:
    """What ran, as the first run wrote it down."""
    found = sorted(folder.glob("*/meta-rank0.json"))
    return dict(json.loads(found[0].read_text())["versions"]) if found else {}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    layouts = [layout.name for layout in LAYOUTS]
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("data/stdlib"), help="folder made by prepare_data.py")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--runs", type=Path, default=Path("runs/equality"), help="folder of the trainings; replaced")
    parser.add_argument("--iterations", type=int, default=20, help="an even number of training steps")
    parser.add_argument("--models", nargs="+", choices=list(ARCHITECTURES), default=list(ARCHITECTURES))
    parser.add_argument("--layouts", nargs="*", choices=layouts, default=layouts)
    parser.add_argument(
        "--seeds", type=int, default=3, help="bf16 trainings with experts, or where the first misses the bound"
    )
    parser.add_argument("--min-seeds", type=int, default=1, help="bf16 trainings of every other layout")
    parser.add_argument("--no-resume", action="store_true", help="leave the checkpoints out")
    parser.add_argument("--transformer-impl", choices=("local", "transformer_engine"), default="local")
    parser.add_argument("--method", choices=("p2p", "fused"), default="p2p", help="of tensor parallelism")
    parser.add_argument("--schedule", choices=("auto", "ring", "direct"), default="auto")
    parser.add_argument("--chunks-per-rank", type=int, default=2, help="messages a rank's rows are cut into")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one training")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on the first GPU; needs NCCL 2.30.3")
    parser.add_argument(
        "--megatron-args", type=shlex.split, default=[], metavar="TEXT", help="further arguments of every training"
    )
    options = parser.parse_args(argv)
    if options.share_gpu and options.device == "cpu":
        parser.error("--share-gpu: needs --device cuda")
    if options.iterations < 4 or options.iterations % 2:
        parser.error(f"--iterations: {options.iterations}: must be even, and at least 4")
    if not (options.data / "data.json").is_file():
        parser.error(f"--data: {options.data}: no data; run: python scripts/prepare_data.py --output {options.data}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; 0 all equal, 1 not."""
    options = parse(argv)
    # TransformerEngine's fp32 GEMMs round to TF32 otherwise.
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    console = Console(stderr=True, highlight=False)
    shutil.rmtree(options.runs, ignore_errors=True)
    start_s = time.monotonic()

    def tell(text: str) -> None:
        console.print(f"[{time.monotonic() - start_s:4.0f} s] {text}", markup=False)

    runs = Runs(options.runs, options, tell)
    iterations = range(1, options.iterations + 1)
    local = options.transformer_impl == "local"
    layouts = [each for each in LAYOUTS if each.name in options.layouts and not (local and GROUPED in each.experts)]
    checks: list[Check] = []

    def keep(complete: bool) -> None:
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            meta = {
                "versions": versions(options.runs),
                "machine": machine(options),
                "seconds": time.monotonic() - start_s,
            }
            options.json.write_text(as_json(options, meta, checks, complete))

    failed = False
    for arch in options.models:
        try:
            alone = {name: runs.train(arch, ALONE, name, False)[0] for name in ("fp32", "bf16") if layouts}
        except RunError as error:
            tell(str(error))
            failed = True
            continue
        parts = [compare_layout(runs, arch, each, alone, iterations) for each in layouts]
        parts += [compare_resumed(runs, arch, each, iterations) for each in RESUMED if not options.no_resume]
        for part in parts:
            try:
                for check in part:
                    checks.append(check)
                    keep(complete=False)
            except RunError as error:
                tell(str(error))
                failed = True
    keep(complete=not failed)
    Console(width=None if sys.stdout.isatty() else 150).print(table(checks))
    return 0 if not failed and all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
