"""Generates configs, command lines, calls of operations and trainings: each works, or is refused with one line.

    python scripts/fuzz.py --configs 10000 --calls 2000 --seed 0
    python scripts/prepare_data.py --output data/stdlib
    python scripts/fuzz.py --configs 0 --calls 0 --trainings 100 --seed 0

Configs and command lines run in this process, as the command `megatron-overlap launch --dry-run` runs them: 0 done, or
exit code 2 with one line; anything else is a failure and is printed with its number, which with the seed makes it again
(`--only N`). Op calls run on 2 to 4 ranks, with shapes, types, cuts, patterns and lateness drawn, against their
references within the bound of docs/numerics.md. Trainings are launches of `trust/launches.py`, three steps on CPU.
Loss, grad-norm and evaluations equal those of the stock path within the bounds of docs/numerics.md. Launches that save
are also resumed before the last step, with the plugin on after off and off after on. One that the stock path does not
run counts as `stock failed`, and one without an overlapped call as `not overlapped`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_overlap.cli import main as command  # noqa: E402
from megatron_overlap.config import ConfigError, LaunchConfig, OverlapConfig, load_launch_config  # noqa: E402
from megatron_overlap.config.launch import PRESETS  # noqa: E402
from megatron_overlap.config.loading import without_overlap  # noqa: E402
from megatron_overlap.tools.launch.plan import execute, plan  # noqa: E402
from megatron_overlap.tools.launch.processes import RunError  # noqa: E402
from scripts.trust.deviations import FP32_BOUND, NAMES, Curves, deviation, scaled  # noqa: E402
from scripts.trust.launches import drawn_launch  # noqa: E402

WORDS = [
    "auto",
    "none",
    "p2p",
    "fused",
    "ring",
    "direct",
    "balanced",
    "yes",
    "",
    "~",
    "0",
    "-1",
    "1e400",
    "nan",
    ".inf",
]
WORDS += ["2", "3", "4", "8", "64", "1024", "true", "false", "null", "cpu", "cuda", "bf16", "fp16", "fp32", "[]", "{}"]
WORDS += [
    "[1, 2]",
    "{a: 1}",
    "!!python/object/apply:os.system [ls]",
    "${oc.env:HOME}",
    "'",
    '"',
    "a: b: c",
    "\t",
    "é",
    "\x00",
]
WORDS += [
    "&a [*a]",
    "*b",
    "9" * 400,
    "x" * 5000,
    "../../etc/passwd",
    "; rm -rf /",
    "$(id)",
    "`id`",
    "%s%n",
    "1_000",
    "0x10",
]


SEEDS = (1234, 1, 2)
"""Of a bf16 training; the medians of all three are judged where the first misses the bound."""
REFUSAL = re.compile(r"megatron_overlap\.[\w.]+\.(Usage|Fallback|MissingFlag|Ulysses|Varlen|UnsupportedConfig)Error: ")
"""Errors in which the plugin names what it does not support."""


class StockError(RunError):
    """The stock path does not run a drawn launch."""


def section(draw: random.Random, model: Any, depth: int = 0) -> dict[str, Any]:
    """Some keys of a section, mostly with values that may be right."""
    found: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        if draw.random() < 0.6:
            continue
        inner = info.annotation
        if hasattr(inner, "model_fields"):
            found[name] = section(draw, inner, depth + 1) if draw.random() < 0.95 else value(draw)
        else:
            default = info.get_default(call_default_factory=True) if not info.is_required() else None
            found[name] = default if draw.random() < 0.3 else value(draw)
    if draw.random() < 0.05:
        found[draw.choice(["trian", "metod", "", "x" * 300, "name ", "__class__", "a.b"])] = value(draw)
    return found


def value(draw: random.Random) -> Any:
    """Anything that YAML can hold."""
    kind = draw.random()
    if kind < 0.35:
        return draw.choice([1, 2, 4, 8, 16, 32, 64, 128])
    if kind < 0.5:
        return draw.choice([0, -1, 3, 7, 1.5, 1e-9, 1e300, True, False, None, 10**30])
    if kind < 0.9:
        return draw.choice(WORDS)
    return draw.choice([[], {}, [1, "a"], {"a": 1}, {1: 2}, [[]], {"method": "none"}])


def plausible(draw: random.Random) -> dict[str, Any]:
    """A config that is mostly right, so that the checks behind the schema are reached too."""
    tensor, context = draw.choice([1, 2, 4, 8]), draw.choice([1, 1, 1, 2])
    tree = {
        "name": draw.choice(["run", "a.b-c", "7"]),
        "model": {"preset": draw.choice(sorted(PRESETS))},
        "parallel": {"tensor": tensor, "context": context, "sequence_parallel": draw.random() < 0.5 and tensor > 1},
        "train": {
            "seq_length": draw.choice([64, 128, 100, 2048]),
            "micro_batch_size": draw.choice([1, 2]),
            "global_batch_size": draw.choice([4, 8, 16]),
            "iterations": draw.choice([1, 5]),
        },
        "launch": {"device": draw.choice(["cpu", "cuda"])},
        "overlap": section(draw, OverlapConfig),
    }
    for _ in range(draw.choice([0, 0, 1, 2])):
        place = tree[draw.choice(["model", "parallel", "train", "launch"])]
        assert isinstance(place, dict)
        name = draw.choice(
            sorted({key for info in LaunchConfig.model_fields.values() for key in _keys(info.annotation)})
        )
        place[name] = value(draw)
    return tree


def _keys(model: Any) -> list[str]:
    return list(getattr(model, "model_fields", {}))


def text_of(draw: random.Random) -> bytes:
    """A config file."""
    kind = draw.random()
    tree = plausible(draw) if kind < 0.6 else section(draw, LaunchConfig)
    text = yaml.safe_dump(tree, allow_unicode=True)
    if kind > 0.9:
        # Somebody's editor, disk or network.
        data = bytearray(text.encode())
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data) + 1)
            data[at : at + draw.randint(0, 3)] = draw.choice(
                [b"", b"\t", b":", b"- ", b"\xff", b"\n", b"{", b"#", b"\x00"]
            )
        return bytes(data)
    return text.encode()


def arguments(draw: random.Random, path: str) -> list[str]:
    """A command line of `launch`."""
    words = ["launch", path, "--dry-run"]
    for _ in range(draw.choice([0, 0, 1, 2])):
        key = draw.choice(
            ["train.seq_length", "parallel.tensor", "overlap.*.method", "overlap.check.every", "a.b", "", "name"]
        )
        words.append(f"{key}={draw.choice(WORDS)}".replace("\x00", "\\0"))
    if draw.random() < 0.1:
        words.insert(
            draw.randrange(len(words) + 1), draw.choice(["--help-me", "--", "-x", "--dry", "=", "launch", "tune"])
        )
    return words


def one_config(seed: int, number: int, folder: Path) -> tuple[str, str]:
    """What came of it: `runs`, `refused` or `failed`, and for the last why."""
    draw = random.Random(f"{seed} {number}")
    path = folder / "config.yaml"
    path.write_bytes(text_of(draw))
    argv = arguments(draw, str(path))
    out, error = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = command(argv)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        return "failed", f"{argv}\n{path.read_bytes()!r}\n{traceback.format_exc()}"
    said = error.getvalue()
    if code == 0:
        return "runs", ""
    if code == 2 and said.endswith("\n") and said.count("\n") == 1:
        return "refused", ""
    return "failed", f"{argv}\n{path.read_bytes()!r}\nexit code {code}: {said}"


def fuzz_configs(count: int, seed: int, only: int | None) -> int:
    """The number of failures."""
    tally: Counter[str] = Counter()
    here = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        os.chdir(folder)
        try:
            for number in range(count) if only is None else [only]:
                what, why = one_config(seed, number, Path(folder))
                tally[what] += 1
                if why:
                    print(f"config {number}: {why}", flush=True)
        finally:
            os.chdir(here)
        left = sorted(path.name for path in Path(folder).iterdir())
    more = [name for name in left if name != "config.yaml"]
    print(f"configs: {dict(tally)}, seed {seed}; files that dry-runs left: {more}")
    return tally["failed"]


def fuzz_calls(count: int, seed: int) -> int:
    """The number of runs of 20 calls that failed."""
    from tests.helpers.world import World
    from tests.ops.tensor_parallel import linear_workers

    world, failed, done = World(answer_s=300), 0, 0
    try:
        while done < count:
            ranks, part = random.Random(f"{seed} {done}").choice([2, 3, 4]), min(20, count - done)
            try:
                world.run(ranks, linear_workers.random_calls, seed * 1_000_003 + done, part)
            except AssertionError as error:
                failed += 1
                print(f"calls {done} to {done + part}: {error}", flush=True)
            done += part
            if done % 200 == 0:
                print(f"{done} of {count} op calls", file=sys.stderr, flush=True)
    finally:
        world.close()
    print(f"op calls: {done}, runs of 20 that failed: {failed}, seed {seed}")
    return failed


def one_training(seed: int, number: int, folder: Path) -> tuple[str, str]:
    """What came of it, and the reason.

    `equal`, `not overlapped` (equal, without an overlapped call), `refused`, `stock failed` or `failed`.
    """
    content = drawn_launch(random.Random(f"{seed} {number}")) | {"name": f"t{number}"}
    path = folder / f"{number}.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    try:
        config = load_launch_config(path)
        within = compared(config, folder / f"{number}-{SEEDS[0]}", SEEDS[0])
        if config.train.precision == "bf16" and not all(off <= bound for off, bound in within.values()):
            seeds = [within, *(compared(config, folder / f"{number}-{each}", each) for each in SEEDS[1:])]
            within = {
                name: (median(each[name][0] for each in seeds), median(each[name][1] for each in seeds))
                for name in NAMES
            }
    except ConfigError as error:
        return "refused", str(error)
    except StockError as error:
        return "stock failed", str(error)
    except RunError as error:
        return "refused" if REFUSAL.search(str(error)) else "failed", str(error)
    report = json.loads((folder / f"{number}-{SEEDS[0]}" / "plugin" / "report-rank0.json").read_text())
    overlapped = sum(module["overlapped"] for module in report["modules"])
    others = sum(count for module in report["modules"] for count in module["fallbacks"].values())
    text = ", ".join(f"{name} {off:.1e} ({bound:.1e})" for name, (off, bound) in within.items())
    text += f"; {overlapped} calls overlapped, {others} not"
    if not all(off <= bound for off, bound in within.values()):
        return "failed", text
    return "equal" if overlapped else "not overlapped", text


def compared(config: LaunchConfig, folder: Path, seed: int) -> dict[str, tuple[float, float]]:
    """Deviation of the plugin and its bound by quantity, for one seed; see docs/numerics.md."""
    stock = stock_of(config)

    def run(name: str, launch: LaunchConfig, **train: object) -> Curves:
        run_dir, saves = folder / name, launch.train.save is not None and not name.endswith("resumed")
        keys = {"seed": seed, "save": str(run_dir / "saved") if saves else None}
        keys |= {} if saves else {"save_interval": None}
        changed = LaunchConfig.model_validate(
            {**launch.model_dump(), "train": {**launch.train.model_dump(), **keys, **train}}
        )
        try:
            execute(plan(changed, run_dir))
        except RunError as error:
            if name.startswith("stock"):
                raise StockError(str(error)) from error
            raise
        if saves:
            (run_dir / "saved" / "latest_checkpointed_iteration.txt").write_text("2")  # resumes before the last step
        return curves(run_dir, changed.world_size - 1)

    exact = own = run("stock", stock)
    bound = dict.fromkeys(NAMES, FP32_BOUND)
    if config.train.precision != "fp32":
        exact = run("stock-fp32", stock, precision="fp32")
        bound = scaled(deviation(own, exact, sorted(exact)))
    found = [deviation(run("plugin", config), exact, sorted(exact))]
    if config.train.save is not None:
        of_stock, of_plugin = ({"load": str(folder / name / "saved")} for name in ("stock", "plugin"))
        again = run("stock-resumed", stock, **of_stock)
        if min(again, key=abs, default=0) == 0 or max(deviation(again, own, sorted(again)).values()) > FP32_BOUND:
            raise StockError("the stock path does not resume where it was saved")
        resumed = run("plugin-resumed", config, **of_stock), run("plugin-to-stock-resumed", stock, **of_plugin)
        found += [deviation(each, exact, sorted(again)) for each in resumed]
    return {name: (max(each[name] for each in found), bound[name]) for name in NAMES}


def stock_of(config: LaunchConfig) -> LaunchConfig:
    """The launch without the plugin, on one context rank if dropout, checkpoints and optimizer shards permit.

    Megatron has no context parallelism on the CPU: otherwise the plugin's schedule without overlap takes its place. The
    distributed optimizer has another grad-norm on other numbers of ranks (3e-5): its CPU sum of squares is plain fp32.
    """
    off, train = without_overlap(config), config.train
    if config.parallel.context == 1 or config.model.hidden_dropout or train.save or train.distributed_optimizer:
        return off
    tree = off.model_dump()
    tree["parallel"]["context"] = 1
    tree["launch"]["ranks_per_node"] = config.world_size // config.parallel.context
    tree["overlap"]["ulysses"] = {"method": "none"}
    tree["overlap"]["varlen"] = {"method": "none" if config.overlap.varlen.method == "none" else "masked"}
    return LaunchConfig.model_validate(tree)


def curves(run_dir: Path, last_rank: int) -> Curves:
    """Loss and grad-norm by iteration; the losses of evaluations by their place before the end: -1 the last."""
    lines = (run_dir / f"steps-rank{last_rank}.jsonl").read_text().splitlines()
    found: Curves = {row["iteration"]: row for row in map(json.loads, lines)}
    log = (run_dir / "logs" / f"rank{last_rank}.log").read_text()
    losses = re.findall(r"validation loss at .*?loss value: (\S+)", log)
    return found | {-place: {"loss": float(loss), "grad_norm": 0.0} for place, loss in enumerate(losses[::-1], 1)}


def fuzz_trainings(count: int, seed: int, only: int | None) -> int:
    """The number of failures. Their configs and logs stay."""
    tally: Counter[str] = Counter()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-trainings-"))
    numbers = itertools.count() if only is None else iter([only])
    while tally.total() - tally["refused"] < count and (number := next(numbers, None)) is not None:
        what, why = one_training(seed, number, folder)
        tally[what] += 1
        errors = [line for line in why.splitlines() if re.search(r"[Ee]rror\b", line)]
        shown = why if what == "failed" else (errors or [why.partition("\n")[0]])[-1]
        print(f"training {number}: {what}: {shown}", flush=True)
        if what != "failed":
            for made in folder.glob(f"{number}-*"):
                shutil.rmtree(made)
    print(f"trainings: {dict(tally)}, seed {seed}; configs, and the logs of failures: {folder}")
    return tally["failed"]


def main() -> int:
    """0: no failure; 1: some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, default=10_000)
    parser.add_argument("--calls", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trainings", type=int, default=0, help="half a minute each")
    parser.add_argument("--only", type=int, help="one config, or one training with --configs 0, by its number")
    options = parser.parse_args()
    failures = fuzz_configs(options.configs, options.seed, options.only) if options.configs else 0
    if options.calls and options.only is None:
        failures += fuzz_calls(options.calls, options.seed)
    if options.trainings:
        failures += fuzz_trainings(options.trainings, options.seed, None if options.configs else options.only)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
