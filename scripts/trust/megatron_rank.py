"""One rank of a run of Megatron's own unit tests (`scripts/megatron_tests.py`)."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

CONFIG = {"tensor": {"method": "p2p", "chunks_per_rank": 2}, "data": {"method": "auto"}, "timeout_s": 60.0}

KEPT_BY = ("backend", "group_desc", "timeout")


def prepare() -> str:
    """Imports Megatron under the CPU adapter, once, before processes are forked; returns its release."""
    from megatron_overlap.adapters import cpu
    from megatron_overlap.adapters.cpu import cuda_stubs

    cuda_stubs.CALLERS.add("tests")
    cpu.install()

    import megatron.core
    import megatron.training.training

    _local_layers()
    _keep_groups()
    return str(megatron.core.__version__)


def _local_layers() -> None:
    """Where tests ask for TransformerEngine's layers, they get Megatron's local ones: this run does not install it."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    def instead(local: Callable[..., Any], asked: Callable[..., Any]) -> Callable[..., Any]:
        known = inspect.signature(specs.get_gpt_layer_local_submodules).parameters
        order = list(inspect.signature(specs.get_gpt_layer_with_transformer_engine_submodules).parameters)

        @functools.wraps(asked)
        def layer(*args: Any, **kwargs: Any) -> Any:
            named = dict(zip(order, args, strict=False)) | kwargs
            if unknown := [name for name, value in named.items() if value and name not in known]:
                raise RuntimeError(f"needs TransformerEngine: {', '.join(unknown)}")
            return local(**{name: value for name, value in named.items() if name in known})

        return layer

    pairs = {
        "get_gpt_layer_with_transformer_engine_spec": "get_gpt_layer_local_spec",
        "get_gpt_layer_with_transformer_engine_submodules": "get_gpt_layer_local_submodules",
    }
    changed = {te: instead(getattr(specs, local), getattr(specs, te)) for te, local in pairs.items()}
    for te, layer in changed.items():
        setattr(specs, te, layer)
    specs.TENorm = specs.LNImpl


def _keep_groups() -> None:
    """Megatron makes its groups anew for every test and never ends them: on gloo each costs threads, sockets and time.

    Those of the same ranks and the same purpose are made once.
    """
    from torch.distributed import distributed_c10d as c10d

    make = torch.distributed.new_group
    kept: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(make)
    def new_group(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        named = inspect.signature(make).bind(ranks, *args, **kwargs).arguments
        key = (id(c10d.GroupMember.WORLD), None if ranks is None else tuple(ranks), *map(named.get, KEPT_BY))
        if named.get("group_desc") is None or named.get("use_local_synchronization"):
            return make(ranks, *args, **kwargs)
        if key not in kept:
            kept[key] = make(ranks, *args, **kwargs)
        return kept[key]

    torch.distributed.new_group = new_group


def _no_fp8(test_file: Path) -> None:
    """Some files ask TransformerEngine for fp8 when they are imported: they hear that there is none."""
    if "\nfrom transformer_engine.pytorch.fp8 import" not in test_file.read_text():
        return
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.fp8")
    engine, side, fp8 = (sys.modules.setdefault(name, ModuleType(name)) for name in names)
    engine.pytorch, side.fp8 = side, fp8  # type: ignore[attr-defined]
    fp8.check_fp8_support = lambda: (False, "no GPU")  # type: ignore[attr-defined]
    fp8.fp8_autocast = None  # type: ignore[attr-defined]


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
        if report.when == "setup":
            self._reason = ""
        if report.when == "setup" or report.when == "call" or report.failed:
            self._outcome = report.outcome
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._reason = str(crash.message if crash else report.longrepr).strip().splitlines()[0][:160]
        if report.when == "teardown":
            self.write({"test": report.nodeid, "outcome": self._outcome, "reason": self._reason})


def run(
    rank: int, checkout: Path, name: str, done: Sequence[str], plugin: bool, size: int, port: int, folder: Path
) -> None:
    """The tests of one file that are not `done`, in this process."""
    os.setsid()  # what Megatron starts ends with this process
    log = (folder / f"rank{rank}.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.chdir(checkout)
    _no_download()
    _no_fp8(checkout / name)
    _seed()
    recorder = Recorder(folder / f"rank{rank}.jsonl")
    session = None
    if plugin:
        import megatron_overlap as mo

        session = mo.enable(mo.OverlapConfig.model_validate(CONFIG))
    skipped = [argument for test in done for argument in ("--deselect", test)]
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:randomly", "--tb=native"]
    pytest.main([*options, *skipped, name], plugins=[recorder])
    if session is not None:
        totals = session.report().as_dict()["totals"]
        recorder.write({"calls": {"overlapped": totals["overlapped"], "fallbacks": totals["fallbacks"]}})
    log.flush()
    # At once: an interpreter that ends here waits for communicators that the tests left open.
    os._exit(0)


def _seed() -> None:
    """Some tests use random states that others have left behind in Megatron's own run of all files in one process."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(123, tp_rank=0, ep_rank=0, etp_rank=0)


def _no_download() -> None:
    """Megatron's tests fetch data for tests that are not run here; they go on where that is not possible."""
    try:
        from tests.test_utils.python_scripts import download_unit_tests_dataset
    except ImportError:
        return

    def refuse(*_: Any, **__: Any) -> None:
        raise ImportError("not run here")

    download_unit_tests_dataset.download_and_extract_asset = refuse
