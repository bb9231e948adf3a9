"""scripts/gpu/node.py on a machine without GPUs: the dry run, the reasons, and what is left after a failure."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.forked_python import ForkedPython

SCRIPT = Path(__file__).parents[2] / "scripts/gpu/node.py"
PASSES = {(op, name) for op in ("ag", "rs") for name in ("forward", "backward")}


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("node", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(ranks: int, *arguments: str, python: str = sys.executable) -> list[str]:
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*torchrun, str(SCRIPT), "--dry-run", *arguments]


def timed(figures: dict[str, Any]) -> dict[str, set[tuple[str, str]]]:
    """Layers and passes by method."""
    found: dict[str, set[tuple[str, str]]] = {}
    for row in figures["dry"]["rows"]:
        if "ms" in row:
            found.setdefault(row["method"], set()).add((row["op"], row["pass"]))
    return found


def test_a_wrong_method_is_noticed_and_not_timed(forked_python: ForkedPython, tmp_path: Path) -> None:
    file = tmp_path / "node.json"
    arguments = "--json", str(file), "--methods", "stock,userbuffers,p2p", "--break", "p2p"
    run = subprocess.run(
        command(2, *arguments, python=forked_python.executable),
        env={"OMP_NUM_THREADS": "1", **os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1, run.stderr
    figures = json.loads(file.read_text())
    gate = {(row["method"], row.get("op")): row for row in figures["gate"]["rows"]}
    assert [gate["stock", op]["right"] for op in ("ag", "rs")] == [True, True]
    assert [gate["p2p", op]["right"] for op in ("ag", "rs")] == [False, False]
    assert set(gate["p2p", "ag"]["shares"]) == {"y", "dx", "dw"}
    assert gate["userbuffers", None]["left_out"] == "transformer_engine needs CUDA"
    assert timed(figures) == {"stock": PASSES}
    for row in figures["dry"]["rows"]:
        if "roof_ms" in row:
            assert row["roof_ms"] == max(row["gemm_ms"], row["comm_ms"])
    assert {row["sms"] for row in figures["sms"]["rows"]} == {"unknown"}
    assert figures["methods"]["stock"] == ""
    assert figures["methods"]["p2p"].startswith("wrong")
    assert figures["dry_run"]
    assert "not timed: p2p: wrong" in run.stdout
    assert "the times have no meaning" in run.stdout


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "left_out"), [(2, set()), (4, {"fused pull", "fused ring", "fused staged"})])
def test_every_method_runs_on_the_cpu(script: Any, ranks: int, left_out: set[str], tmp_path: Path) -> None:
    """On 4 ranks the interpreter is slow: fused with one plan."""
    file, picture = tmp_path / "node.json", tmp_path / "node.png"
    methods = [method for method in script.METHODS if method not in left_out]
    arguments = "--json", str(file), "--plot", str(picture), "--methods", ",".join(methods)
    run = subprocess.run(command(ranks, *arguments), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    figures = json.loads(file.read_text())
    no_cpu_form = {"userbuffers", "nccl copies", "fused hopper"}
    assert {method for method, reason in figures["methods"].items() if reason} == no_cpu_form
    assert timed(figures) == dict.fromkeys(set(methods) - no_cpu_form, PASSES)
    assert picture.stat().st_size > 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_interrupted_run_leaves_its_finished_parts(tmp_path: Path) -> None:
    file = tmp_path / "node.json"
    run = subprocess.Popen(command(2, "--json", str(file), "--methods", "stock"), stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("gate:"):
            break
    time.sleep(1)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=60)
    assert run.returncode != 0
    figures = json.loads(file.read_text())
    assert [row["right"] for row in figures["gate"]["rows"]] == [True, True]
    assert figures["dry"]["how"] == "interrupted"
    assert "sms" not in figures


class Ranks:
    """Answers each plan with the next of `answers`, as the ranks of a node do."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self.answers, self.plans, self.size = answers, list[dict[str, Any]](), 2

    def run(self, plan: dict[str, Any]) -> dict[str, Any]:
        self.plans.append(plan)
        return {"seconds": 0.0, **self.answers[len(self.plans) - 1]}


def right(method: str) -> list[dict[str, Any]]:
    return [{"method": method, "op": op, "shape": "gate", "right": True} for op in ("ag", "rs")]


def options(file: Path, methods: list[str], budget: float = 100.0) -> argparse.Namespace:
    return argparse.Namespace(json=file, plot=None, methods=methods, budget=budget, dry_run=True)


def test_a_part_goes_on_without_the_method_that_hangs(script: Any, tmp_path: Path) -> None:
    begins: list[dict[str, Any]] = [
        {"begin": index, "method": method} for index, method in enumerate(("stock", "p2p", "fused"))
    ]
    ranks = Ranks(
        [
            {"rows": [begins[0], *right("stock"), begins[1]], "how": "killed after 3 s", "stderr": "text"},
            {"rows": [{"begin": 1, "method": "fused"}, *right("fused")], "how": "ended"},
            {"rows": [{"begin": 0, "shape": "dry fc1"}], "how": "killed after 3 s"},
            {"rows": [{"begin": 1, "shape": "dry fc2"}], "how": "ended"},
            {"rows": [{"begin": 1, "method": "fused"}], "how": "exit code -6"},
        ]
    )
    file = tmp_path / "node.json"
    assert script.rank_zero(ranks, options(file, ["stock", "p2p", "fused"])) == 1
    assert [(plan["part"], plan["methods"], plan["skip"]) for plan in ranks.plans] == [
        ("gate", ["stock", "p2p", "fused"], 0),
        ("gate", ["stock", "fused"], 1),
        ("dry", ["stock", "fused"], 0),
        ("dry", ["stock", "fused"], 1),
        ("sms", ["stock", "fused"], 0),
    ]
    figures = json.loads(file.read_text())
    assert figures["methods"] == {"stock": "", "p2p": "killed after 3 s", "fused": ""}
    assert {"method": "p2p", "failed": "killed after 3 s", "stderr": "text"} in figures["gate"]["rows"]
    assert {"shape": "dry fc1", "failed": "killed after 3 s", "stderr": ""} in figures["dry"]["rows"]


def test_parts_without_time_or_methods_are_reported(script: Any, tmp_path: Path) -> None:
    file = tmp_path / "node.json"
    assert script.rank_zero(Ranks([]), options(file, ["stock"], budget=1.0)) == 1
    figures = json.loads(file.read_text())
    assert figures["gate"]["how"] == "no time left"
    assert figures["dry"]["rows"] == [{"left_out": "no method has passed the comparison"}]
    assert script.skipped_reason("70b m8192", 3, ["stock"]) == "8192 rows are not divisible by 3 ranks"
    assert script.skipped_reason("70b m8192", 4, ["stock"]) == ""


def test_how_a_process_has_ended(script: Any) -> None:
    """Bad rows do not hide an exception, and another rank can stop the process."""
    part_process = importlib.import_module("part_process")

    def ended(shell: str, stop: str = "") -> dict[str, Any]:
        found: dict[str, Any] = part_process.run_process(["sh", "-c", shell], os.environ, 20.0, lambda: stop)
        return found

    found = ended(f"echo '{{\"right\": false}}'; exit {part_process.BAD_ROWS}")
    assert (found["how"], found["wrong_rows"]) == ("ended", 1)
    found = ended("echo '{\"right\": false}'; echo text >&2; exit 1")
    assert (found["how"], found["rows"], found["stderr"]) == ("exit code 1", [{"right": False}], "text\n")
    assert ended("true")["how"] == "failed: it printed nothing"
    assert ended("sleep 20", stop="another rank")["how"] == "another rank"


class OneRank:
    """`Node` of one rank on a GPU. `others` are the reasons of its peers."""

    dry, rank, size, group, device = False, 0, 1, None, torch.device("cpu")

    def __init__(self, others: list[str] | None = None) -> None:
        self.host, self.others = self, others or []

    def all_gather_text(self, text: str) -> list[str]:
        return [text, *self.others]


def test_a_method_that_a_rank_cannot_run_has_a_reason_on_all_ranks(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = importlib.import_module("one_node.methods")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    assert methods.open_method("nccl copies", OneRank()) == "NCCL 2.27.5: copy-engine collectives need 2.28"
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert methods.open_method("userbuffers", OneRank()).startswith("transformer_engine cannot be imported: ")
    monkeypatch.setitem(methods.METHODS, "here", lambda node: lambda op, x, w: x)
    assert methods.open_method("here", OneRank(["", "not there"])) == "not there"
    assert callable(methods.open_method("here", OneRank([""])))


def test_a_module_is_a_function_of_input_and_weight(script: Any) -> None:
    apply = importlib.import_module("one_node.methods").ModuleLinear.apply
    module = torch.nn.Linear(4, 3, bias=False)
    for _ in range(2):
        x, w = torch.randn(5, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        dy = torch.randn(5, 3)
        y = apply(x, w, module)
        assert torch.equal(y, x @ w.t())
        y.backward(dy)
        assert x.grad is not None
        assert w.grad is not None
        torch.testing.assert_close(x.grad, dy @ w)
        torch.testing.assert_close(w.grad, dy.t() @ x)


def test_devices_start_together_and_the_host_is_ahead(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class Event:
        def __init__(self, **_: object) -> None:
            done.append("event")

        def record(self) -> None:
            done.append("record")

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, _: object) -> float:
            return 1.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append(cycles))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: done.append("together"))
    timer = importlib.import_module("one_node.parts").Timer(OneRank())

    def prepare() -> Callable[[], None]:
        done.append("prepared")
        return partial(time.sleep, 0.002)

    ms, host_us = timer("p2p", prepare)
    assert ms == 1.5
    assert host_us >= 2000
    assert done == ["prepared", "event", "event", "synchronize", "together", 0, "record", "record", "wait"]
    timer("p2p", prepare)
    assert done[-4] >= 2 * 2000 * 2000  # cycles of twice the host's time


def test_sms_are_the_blocks_of_kernels_that_communicate(script: Any) -> None:
    comm_sms = importlib.import_module("one_node.parts").comm_sms
    gemm = {"cat": "kernel", "name": "nvjet_tst_128x256", "args": {"grid": [132, 1, 1]}}
    nccl = {"cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL", "args": {"grid": [24, 1, 1]}}
    copy = {"cat": "gpu_memcpy", "name": "Memcpy PtoP", "args": {}}
    assert comm_sms([gemm, nccl, copy]) == 24
    assert comm_sms([gemm, copy]) == 0
    assert comm_sms([copy]) == "unknown"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpus_it_says_so(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["node.py"])
    assert script.main() == 2
    assert capsys.readouterr().err == (
        "0 CUDA devices for 2 ranks: it needs one for each rank; with one, try --share-gpu; without GPUs, try "
        "--dry-run\n"
    )
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert script.main() == 2
    assert capsys.readouterr().err.startswith("start it with torchrun")
