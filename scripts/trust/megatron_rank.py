"""One rank of a run of Megatron's own unit tests (`scripts/megatron_tests.py`)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

CONFIG = {"tensor": {"method": "p2p", "chunks_per_rank": 2}, "data": {"method": "p2p"}, "timeout_s": 60.0}


def prepare() -> str:
    """Imports Megatron under the CPU adapter, once, before processes are forked; returns its release."""
    from megatron_overlap.adapters import cpu
    from megatron_overlap.adapters.cpu import stand_ins, torch_side

    asked = stand_ins.asked_by_megatron

    def asked_by_megatron_or_its_tests(depth: int = 2) -> bool:
        name = str(sys._getframe(depth).f_globals.get("__name__", ""))
        return name.startswith("tests.") or asked(depth + 1)

    torch_side.asked_by_megatron = asked_by_megatron_or_its_tests  # type: ignore[attr-defined]
    cpu.install()

    import megatron.core
    import megatron.training.training

    return str(megatron.core.__version__)


class Recorder:
    """Writes down which test begins, and how it ended."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write({"begun": nodeid})

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "setup" or report.when == "call" or report.failed:
            self._outcome = report.outcome
        if report.when == "teardown":
            self.write({"test": report.nodeid, "outcome": self._outcome})


def run(
    rank: int, checkout: Path, name: str, done: Sequence[str], plugin: bool, size: int, port: int, folder: Path
) -> None:
    """The tests of one file that are not `done`, in this process."""
    log = (folder / f"rank{rank}.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.chdir(checkout)
    _no_download()
    recorder = Recorder(folder / f"rank{rank}.jsonl")
    session = None
    if plugin:
        import megatron_overlap as mo

        session = mo.enable(mo.OverlapConfig.model_validate(CONFIG))
    skipped = [argument for test in done for argument in ("--deselect", test)]
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:randomly", "--tb=short"]
    pytest.main([*options, *skipped, name], plugins=[recorder])
    if session is not None:
        totals = session.report().as_dict()["totals"]
        recorder.write({"calls": {"overlapped": totals["overlapped"], "fallbacks": totals["fallbacks"]}})
    log.flush()
    # At once: an interpreter that ends here waits for communicators that the tests left open.
    os._exit(0)


def _no_download() -> None:
    """Megatron's tests fetch data for tests that are not run here; they go on where that is not possible."""
    try:
        from tests.test_utils.python_scripts import download_unit_tests_dataset
    except ImportError:
        return

    def refuse(*_: Any, **__: Any) -> None:
        raise ImportError("not run here")

    download_unit_tests_dataset.download_and_extract_asset = refuse
