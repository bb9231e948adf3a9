"""Runs Megatron's unit tests on CPU ranks, without and with the plugin: tests that pass without it must pass with it.

    python scripts/megatron_tests.py ~/Megatron-LM --json docs/results/megatron_tests.json
    MEGATRON_LM_PATH=~/Megatron-LM python scripts/megatron_tests.py --tests tests/unit_tests/tensor_parallel

A checkout of Megatron-LM is needed, and `pip install mock einops` for its tests; it is read and not changed. They are
written for eight GPUs: here eight processes run each file together under `adapters/cpu`. Where they ask for
TransformerEngine's layers they get Megatron's local ones; what needs more of it, or a GPU, fails or is skipped both
times. A test passes where it passes on every rank. Where a file makes no progress the test it is in counts as `hung`,
and the rest is run without it. Exit code 1 where a test passes without the plugin and not with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

TESTS = (
    "tensor_parallel/test_layers.py",
    "tensor_parallel/test_mappings.py",
    "tensor_parallel/test_initialization.py",
    "tensor_parallel/test_tensor_parallel_utils.py",
    "tensor_parallel/test_tp_attrs_without_init.py",
    "tensor_parallel/test_cross_entropy.py",
    "tensor_parallel/test_data.py",
    "tensor_parallel/test_random.py",
    "transformer/test_attention.py",
    "transformer/test_attention_no_rope.py",
    "transformer/test_mlp.py",
    "transformer/test_transformer_layer.py",
    "transformer/test_transformer_block.py",
    "distributed/test_distributed_data_parallel.py",
    "distributed/test_param_and_grad_buffer.py",
    "distributed/test_finalize_model_grads.py",
    "distributed/test_grad_sync_with_expert_parallel.py",
    "distributed/test_grad_reduce_for_replicated_embedder.py",
    "distributed/test_param_layout.py",
    "distributed/test_reduce_scatter_with_fp32_accumulation.py",
    "dist_checkpointing/test_optimizer.py",
    "test_optimizer.py",
)
"""Tensor parallel layers, mappings, attention, DDP, distributed optimizer, and what is built of them."""
WORST = ("hung", "failed", "skipped", "passed")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=os.environ.get("MEGATRON_LM_PATH"))
    parser.add_argument("--tests", nargs="+", help="files or folders of the checkout; else those of what is replaced")
    parser.add_argument("--ranks", type=int, default=8, help="processes; Megatron's tests expect eight")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds without progress after which a test hangs")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args(argv)
    if options.checkout is None or not (Path(options.checkout) / "tests" / "unit_tests").is_dir():
        parser.error("name a Megatron-LM checkout (a folder with tests/unit_tests), or set MEGATRON_LM_PATH")
    options.checkout = Path(options.checkout).resolve()
    return options


def files(options: argparse.Namespace) -> list[str]:
    """The test files, relative to the checkout; those of the list that a release does not have are left out."""
    named = options.tests or [f"tests/unit_tests/{name}" for name in TESTS]
    found: list[str] = []
    for name in named:
        path = options.checkout / name
        if path.is_dir():
            found += [str(each.relative_to(options.checkout)) for each in sorted(path.rglob("test_*.py"))]
        elif path.is_file():
            found.append(name)
        elif options.tests:
            sys.exit(f"{path}: no such file")
    if not found:
        sys.exit(f"{options.checkout}: none of the tests is there; give a checkout of Megatron-LM, or --tests")
    return found


class Ranks:
    """One file's tests in forked processes that have Megatron imported."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder, self._number = options, folder, 0
        self.reasons: dict[str, str] = {}
        """The first line of what a test that failed last said, on the first rank that it failed on."""

    def run(self, name: str, plugin: bool) -> tuple[dict[str, str], Counter[str]]:
        """Outcome of every test of the file, the worst of all ranks, and how many calls took which path."""
        outcomes: dict[str, str] = {}
        calls: Counter[str] = Counter()
        while True:
            hung = self._once(name, plugin, outcomes, calls)
            if not hung:
                return outcomes, calls
            outcomes |= dict.fromkeys(hung, "hung")

    def _once(self, name: str, plugin: bool, outcomes: dict[str, str], calls: Counter[str]) -> list[str]:
        """Runs those that have no outcome yet; returns the tests that some rank did not come back from."""
        from torch import multiprocessing

        from scripts.trust import megatron_rank

        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        context = multiprocessing.get_context("fork")
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
        del store
        work = (self._options.checkout, name, sorted(outcomes), plugin, self._options.ranks, port, folder)
        processes = [context.Process(target=megatron_rank.run, args=(r, *work)) for r in range(self._options.ranks)]
        for process in processes:
            process.start()
        try:
            self._wait(processes, folder)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()
        return self._read(folder, outcomes, calls)

    def _wait(self, processes: Sequence[Any], folder: Path) -> None:
        """Until all have ended, or nothing has been written for too long."""
        seen, since = -1, time.monotonic()
        while any(process.is_alive() for process in processes) and time.monotonic() - since < self._options.limit:
            size = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
            if size != seen:
                seen, since = size, time.monotonic()
            time.sleep(0.1)

    def _read(self, folder: Path, outcomes: dict[str, str], calls: Counter[str]) -> list[str]:
        ranks: dict[str, dict[int, str]] = {}
        stuck: set[str] = set()
        found: dict[str, str] = {}
        for rank in range(self._options.ranks):
            path, current = folder / f"rank{rank}.jsonl", ""
            for line in path.read_text().splitlines() if path.is_file() else ():
                row = json.loads(line)
                current = row.get("begun", current)
                if "test" in row:
                    ranks.setdefault(row["test"], {})[rank] = row["outcome"]
                    current = ""
                    if row["reason"]:
                        found.setdefault(row["test"], row["reason"])
                calls.update(row.get("calls", {}))
            stuck |= {current} if current else set()
        complete = {test: row for test, row in ranks.items() if len(row) == self._options.ranks}
        outcomes |= {test: min(row.values(), key=WORST.index) for test, row in complete.items()}
        self.reasons |= found
        # A rank that was not stuck may have gone on: what it did alone is run again with all.
        return sorted(stuck)


def summary(
    name: str, off: dict[str, str], on: dict[str, str], calls: Counter[str], reasons: dict[str, str]
) -> dict[str, Any]:
    """One file: counts of both runs, why tests fail in both, and every test that came out otherwise."""
    failed = [test for test, outcome in on.items() if outcome == off.get(test) == "failed"]
    changed = {test: [off.get(test, "absent"), on.get(test, "absent")] for test in sorted({*off, *on})}
    return {
        "file": name,
        "off": dict(Counter(off.values())),
        "on": dict(Counter(on.values())),
        "calls": dict(calls),
        "failed_in_both": dict(Counter(reasons.get(test, "not told") for test in failed)),
        "changed": {test: pair for test, pair in changed.items() if pair[0] != pair[1]},
    }


def cells(counts: dict[str, int]) -> str:
    return " | ".join(str(counts.get(kind, 0)) for kind in ("passed", "skipped", "failed", "hung"))


def main(argv: Sequence[str] | None = None) -> int:
    """0: whatever passed still passes; 1: not."""
    options = parse(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    root = str(Path(__file__).resolve().parents[1])
    # The checkout's `megatron` and `tests` come before any other.
    here = (root, str(Path(root) / "scripts"))
    sys.path[:] = [str(options.checkout), root, *(path for path in sys.path if path not in here)]
    from scripts.trust import megatron_rank

    release = megatron_rank.prepare()
    rows: list[dict[str, Any]] = []
    print(f"Megatron-Core {release}, {options.ranks} CPU ranks")
    print("| file | off: passed | skipped | failed | hung | on: passed | skipped | failed | hung | overlapped | s |")
    print("|---|" + "---|" * 10, flush=True)
    with tempfile.TemporaryDirectory(prefix="megatron-tests-") as folder:
        ranks = Ranks(options, Path(folder))
        for name in files(options):
            start = time.monotonic()
            off, _ = ranks.run(name, False)
            on, calls = ranks.run(name, True)
            row = summary(name, off, on, calls, ranks.reasons)
            rows.append(row)
            short = name.removeprefix("tests/unit_tests/")
            seconds = time.monotonic() - start
            print(f"| {short} | {cells(row['off'])} | {cells(row['on'])} | {calls['overlapped']} | {seconds:.0f} |")
            for test, (before, after) in row["changed"].items():
                print(f"  {test}: {before} without the plugin, {after} with it")
            sys.stdout.flush()
            if options.json:
                _write(options, release, rows)
    lost = [test for row in rows for test, (before, _) in row["changed"].items() if before == "passed"]
    print(f"{sum(row['off'].get('passed', 0) for row in rows)} passed without, "
          f"{sum(row['on'].get('passed', 0) for row in rows)} with; {len(lost)} no longer pass")  # fmt: skip
    return int(bool(lost))


def _write(options: argparse.Namespace, release: str, rows: Sequence[dict[str, Any]]) -> None:
    versions = {"megatron_core": release, "torch": torch.__version__, "python": platform.python_version()}
    content = {"checkout": options.checkout.name, "ranks": options.ranks, "versions": versions, "files": rows}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
