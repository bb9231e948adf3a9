"""Changes one line of the program at a time, and checks that a test fails.

    python scripts/mutants.py --json docs/results/mutants.json [--kind schedules] [--jobs 2]

`scripts/trust/mutants.yaml` lists the changes and the tests that have to fail. Every mutant is made in a copy of the
tree; the tests must pass there without it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import yaml

from megatron_overlap.config.resources import transformer_engine_folder

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "scripts" / "trust" / "mutants.yaml"
COPIED = ("megatron_overlap", "tests", "patches", "configs", "scripts", "pyproject.toml", "docs")


@dataclass(frozen=True)
class Mutant:
    """One change, and the tests that must fail with it."""

    number: int
    kind: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Makes the change in a tree.

        Raises:
            ValueError: the line is not there once: the list has to follow the program.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"mutants.yaml: {self.file}: occurs {text.count(self.before)} times: {self.before!r}")
        path.write_text(text.replace(self.before, self.after), encoding="utf-8")


def load(path: Path = LIST) -> Iterator[Mutant]:
    """All mutants of the list."""
    number = 0
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
        for before, after in entry["lines"]:
            number += 1
            yield Mutant(number, entry["kind"], entry["file"], before, after, tuple(entry["tests"].split()))


def passes(root: Path, tests: tuple[str, ...], limit_s: float) -> bool:
    """Whether the tests pass in a tree; a test run that does not end counts as failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not long", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    folder = transformer_engine_folder()
    if folder is not None:
        environment["MEGATRON_OVERLAP_TE"] = str(folder)  # the copied tree has none, and its tests would skip
    process = subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(timeout=limit_s) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


def judge(mutant: Mutant, limit_s: float) -> str:
    """What the tests say about a mutant."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tree / name)
        if not passes_unchanged(tree, mutant.tests, limit_s):
            return "not judged: the tests fail without it"
        mutant.apply(tree)
        return "survived" if passes(tree, mutant.tests, limit_s) else "caught"


_unchanged: dict[tuple[str, ...], bool] = {}
_one_at_a_time = Lock()


def passes_unchanged(root: Path, tests: tuple[str, ...], limit_s: float) -> bool:
    """Whether the tests pass without a mutant; they run once."""
    with _one_at_a_time:
        if tests not in _unchanged:
            _unchanged[tests] = passes(root, tests, limit_s)
        return _unchanged[tests]


def main() -> int:
    """0: all were caught; 1: not all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="", help="only these, separated by commas")
    parser.add_argument("--file", default="", help="only of files whose name contains this")
    parser.add_argument("--first", type=int, default=1, help="begin with this number")
    parser.add_argument("--limit", type=float, default=300.0, help="of one test run, seconds")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin none after this time")
    parser.add_argument("--resume", action="store_true", help="skip the mutants that the JSON file lists as caught")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument(
        "--json",
        type=Path,
        help="add the verdicts to this file, and drop those of mutants that are not listed any more",
    )
    options = parser.parse_args()
    kinds = options.kind.split(",") if options.kind else None
    every = list(load())
    chosen = [m for m in every[options.first - 1 :] if (kinds is None or m.kind in kinds) and options.file in m.file]
    if options.resume:
        if options.json is None:
            parser.error("--resume needs --json FILE with the earlier results")
        known = _known(options.json)
        chosen = [mutant for mutant in chosen if known.get(_change(mutant)) != "caught"]
    verdicts: dict[Mutant, str] = {}
    until = time.monotonic() + 60 * options.minutes
    with ThreadPoolExecutor(options.jobs) as pool:
        judged = pool.map(lambda m: judge(m, options.limit) if time.monotonic() < until else None, chosen)
        for mutant, verdict in zip(chosen, judged, strict=True):
            if verdict is None:
                continue
            verdicts[mutant] = verdict
            change = next(iter(mutant.after.splitlines()), "(removed)")
            print(f"{mutant.number} {mutant.kind} {mutant.file}: {verdict}: {change}", flush=True)
            if options.json:
                _add(options.json, verdicts, every)
    print(dict(Counter((mutant.kind, verdict) for mutant, verdict in verdicts.items())))
    return int(any(verdict != "caught" for verdict in verdicts.values()))


def _add(path: Path, verdicts: dict[Mutant, str], every: list[Mutant]) -> None:
    """Writes the verdicts to the file, and keeps its verdicts of other mutants that are still listed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = _known(path)
    rows |= {_change(mutant): verdict for mutant, verdict in verdicts.items()}
    kept = [
        {"kind": mutant.kind, "change": _change(mutant), "verdict": rows[_change(mutant)]}
        for mutant in every
        if _change(mutant) in rows
    ]
    path.write_text(json.dumps(kept, indent=1) + "\n")


def _known(path: Path) -> dict[tuple[str, ...], str]:
    """The verdicts of a file, by change."""
    rows = json.loads(path.read_text()) if path.is_file() else []
    return {tuple(row["change"]): row["verdict"] for row in rows}


def _change(mutant: Mutant) -> tuple[str, ...]:
    """What tells a mutant from the others, also when the list grows."""
    return (mutant.file, mutant.before, mutant.after, *mutant.tests)


if __name__ == "__main__":
    sys.exit(main())
