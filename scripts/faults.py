"""Injects a fault into one of four processes that run the plugin's operations, and checks how the others end.

    python scripts/faults.py --cases 200 --json docs/results/faults.json

The processes of a case communicate over real connections. The fault occurs while an operation runs. Criteria: no
process exceeds the deadline, every wrong result is detected, no process or file remains, and the survivors name the
failed rank. Cases that cut or slow a link need network namespaces (docs/netlab.md); without the rights they are skipped
and listed. `--training N` adds faults in Megatron trainings, which take a minute each.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_overlap.tools.launch.netlab import Netlab, NetlabError  # noqa: E402
from megatron_overlap.tools.launch.processes import free_port  # noqa: E402
from scripts.trust import rank as ranks  # noqa: E402
from scripts.trust.rank import DIFFERS, DONE, FOUND, GENERATION, WAIT_FAILED, WRONG, Case, Outcome  # noqa: E402
from scripts.trust.training import run_trainings  # noqa: E402
from scripts.trust.work import CHECKED_LOADS, LOADS  # noqa: E402

EXPECTED = {
    "SIGKILL": WAIT_FAILED,
    "SIGSTOP": WAIT_FAILED,
    "stopped for a while": DONE,
    "link cut": WAIT_FAILED,
    "link at 1 %": None,  # slow and right, or given up by name: which depends on the size of a message
    "corruption": FOUND,
    "full disk": WAIT_FAILED,
    "clock jump": DONE,
    "other config": DIFFERS,
    "late within the deadline": DONE,
    "late beyond the deadline": WAIT_FAILED,
}
"""How ranks that the fault did not happen to have to end."""
_LINKS = ("link cut", "link at 1 %")
_GBPS = 0.5
_START_S = 90.0
_PAUSE_S = 1.0
_AGAIN = 5
_BEYOND_S = 25.0
"""Beyond the deadline: the grace of a wait, the questions for signs of life, and a machine that is busy."""


class Runner:
    """Runs cases one after the other."""

    def __init__(self, lab: Netlab | None) -> None:
        self._lab = lab
        if lab is not None:
            # `... PID FD USER_NAMESPACE`: what takes a program to a host.
            self._nets = [f"/proc/{argv[-3]}/fd/{argv[-2]}" for argv in (lab.wrap(host, []) for host in range(4))]

    def run(self, case: Case) -> Outcome:
        """Forks the ranks, waits for all of them, and looks at what they left."""
        before = _shared_memory()
        found = Outcome(case)
        folder = Path(tempfile.mkdtemp(prefix="faults-"))
        lab = self._lab if case.kind in _LINKS else None
        address, port = (lab.address(0), 29500) if lab is not None else ("127.0.0.1", free_port())
        if case.kind == "full disk":
            for rank in range(case.size):
                (folder / f"overlap-failure-rank{rank}.json").symlink_to("/dev/full")
        read, write = os.pipe()
        nets = self._nets if lab is not None else [None] * case.size
        pids = [_fork(lambda r=r: ranks.main(case, r, port, address, write, folder, nets[r])) for r in range(case.size)]
        keeper = _fork(lambda: _hold_store(port, case.size, nets[0])) if case.seed % 2 else None
        os.close(write)
        try:
            self._follow(case, found, pids, read, lab)
        finally:
            for pid in [*pids, *([keeper] if keeper else [])]:
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ProcessLookupError, ChildProcessError):
                    os.waitpid(pid, 0)
            os.close(read)
            if lab is not None:
                self._mend(lab, case.victim)
        self._judge(found, folder)
        shutil.rmtree(folder)
        found.left += sorted(_shared_memory() - before)
        return found

    def _follow(self, case: Case, found: Outcome, pids: list[int], read: int, lab: Netlab | None) -> None:
        """Until all have ended, or the time is up that they had."""
        found.codes, found.texts = [None] * case.size, [""] * case.size
        ends: dict[int, float] = {}
        fault_at: float | None = None
        resume_at = float("inf")
        started, buffer = time.monotonic(), b""
        now = started
        running = dict(enumerate(pids))
        while running:
            before, now = now, time.monotonic()
            if now - before > _PAUSE_S:
                # This very process did not run: the machine was busy or stopped, and no deadline means anything.
                found.disturbed = True
                return
            if fault_at is None and now - started > _START_S:
                found.unexpected.append("the case did not get as far as its fault: too busy a machine")
                return
            if fault_at is not None and now - fault_at > case.deadline_s * 4 + _BEYOND_S:
                stuck = [rank for rank in running if rank != case.victim or case.kind not in ("SIGSTOP", *_LINKS)]
                found.hangs = len(stuck)
                return
            if now > resume_at:
                os.kill(pids[case.victim], signal.SIGCONT)
                resume_at = float("inf")
            if select.select([read], [], [], 0.02)[0]:
                buffer += os.read(read, 1 << 16)
                *lines, buffer = buffer.split(b"\n")
                for message in map(json.loads, lines):
                    if "fault" in message:
                        fault_at = message["at"]
                        resume_at = now + 0.3 * case.deadline_s if case.kind == "stopped for a while" else resume_at
                        if lab is not None:
                            self._break(lab, case)
                    elif "end" in message:
                        self._note(found, message)
            for rank, pid in list(running.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    found.codes[rank] = os.waitstatus_to_exitcode(status)
                    ends[rank] = now
                    del running[rank]
            survivors = [rank for rank in running if rank != case.victim]
            if not survivors and case.kind == "SIGSTOP":
                break
        last = max((at for rank, at in ends.items()), default=0.0)
        found.took_s = last - fault_at if fault_at is not None else 0.0

    def _note(self, found: Outcome, message: dict[str, Any]) -> None:
        found.texts.append(message["text"])

    def _judge(self, found: Outcome, folder: Path) -> None:
        case, wanted = found.case, EXPECTED[found.case.kind]
        found.texts = [text for text in found.texts if text]
        for rank, code in enumerate(found.codes):
            if rank == case.victim and case.kind in ("SIGKILL", "SIGSTOP", "full disk", "late beyond the deadline"):
                continue
            found.wrong += code == WRONG
            allowed = (DONE, WAIT_FAILED) if wanted is None else (wanted,)
            if code not in allowed:
                found.unexpected.append(f"rank {rank} ended with {code}: {'; '.join(found.texts)[:600]}")
        all_done = all(code == DONE for code in found.codes)
        found.named = all_done or any(f"rank {case.victim}" in text for text in found.texts) or wanted == FOUND
        dumps = sorted(path.name for path in folder.iterdir())
        found.left += [name for name in dumps if not name.startswith("overlap-failure-rank")]
        if wanted == WAIT_FAILED and case.kind != "full disk" and not dumps:
            found.unexpected.append("no survivor wrote what it did last")
        if case.kind == "full disk" and not any("no file: " in text for text in found.texts):
            found.unexpected.append("nobody said that its file could not be written")

    def _break(self, lab: Netlab, case: Case) -> None:
        port = lab.host_name(case.victim)
        if case.kind == "link cut":
            _do(lab.wrap(None, ["ip", "link", "set", port, "down"]))
            return
        slow = f"root tbf rate {round(_GBPS * 1e7)}bit burst 4kb latency 400ms".split()
        _do(lab.wrap(None, ["tc", "qdisc", "replace", "dev", port, *slow]))
        _do(lab.wrap(case.victim, ["tc", "qdisc", "replace", "dev", "eth0", *slow]))

    def _mend(self, lab: Netlab, victim: int) -> None:
        port = lab.host_name(victim)
        _do(lab.wrap(None, ["ip", "link", "set", port, "up"]))
        for host, device in ((None, port), (victim, "eth0")):
            _do(lab.wrap(host, ["tc", "qdisc", "del", "dev", device, "root"]))


def cases(count: int, seed: int, deadline_s: float, kinds: list[str], wanted: list[str]) -> Iterator[Case]:
    """`count` cases over all kinds and the wanted loads in turn; moments, victims and choices from `seed`."""
    draw = random.Random(seed)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        loads = [load for load in CHECKED_LOADS if load in wanted] if kind == "corruption" else wanted
        load = loads[(number // len(kinds)) % len(loads)]
        yield Case(kind, load, draw.randrange(4), draw.randrange(1 << 30), deadline_s)


def main() -> int:
    """0: as asked for; 1: not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=220)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=3.0, help="deadline of a wait, in seconds")
    parser.add_argument("--kinds", default="", help="kinds of faults, separated by commas; default: all")
    parser.add_argument("--loads", default=",".join((*LOADS, GENERATION)), help="operations, separated by commas")
    parser.add_argument("--training", type=int, default=0, help="number of further faults, in Megatron trainings")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no case after this time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kinds = options.kinds.split(",") if options.kinds else list(EXPECTED)
    if unknown := [kind for kind in kinds if kind not in EXPECTED]:
        parser.error(f"--kinds: {', '.join(unknown)}: use {', '.join(EXPECTED)}")
    _preload_clock()
    skipped = {}
    if "LD_PRELOAD" not in os.environ and "clock jump" in kinds:
        kinds.remove("clock jump")
        skipped["clock jump"] = "no C compiler"
    loads = options.loads.split(",")
    if GENERATION in loads:
        from scripts.trust import generation

        generation.preload()
    if "corruption" in kinds and not {*CHECKED_LOADS} & {*loads}:
        kinds.remove("corruption")
        skipped["corruption"] = f"check mode compares the loads {', '.join(CHECKED_LOADS)}"
    with _lab(kinds, skipped) as lab:
        runner, found, until = Runner(lab), [], time.monotonic() + 60 * options.minutes
        for case in cases(options.cases if kinds else 0, options.seed, options.deadline, kinds, loads):
            if time.monotonic() > until:
                break
            outcome = runner.run(case)
            for _ in range(_AGAIN):
                if not outcome.disturbed:
                    break
                outcome = runner.run(case)
            if outcome.disturbed:
                print(f"{case.kind}, {case.load}: not judged: the machine stood still", flush=True)
                continue
            found.append(outcome)
            bad = outcome.hangs or outcome.wrong or outcome.left or outcome.unexpected
            state = f"NOT as asked for: {outcome.unexpected} {outcome.left}" if bad else "as asked for"
            print(f"{len(found)}: {case.kind}, {case.load}, {outcome.took_s:.1f} s: {state}", flush=True)
    if options.training:
        found += run_trainings(options.training, options.seed)
    rows = table(found)
    print("\n".join(f"| {' | '.join(map(str, row.values()))} |" for row in rows))
    for kind, why in skipped.items():
        print(f"left out: {kind}: {why}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"seed": options.seed, "kinds": rows, "left out": skipped}, indent=1) + "\n")
    return int(any(row["hangs"] or row["wrong"] or row["left behind"] or row["unexpected"] for row in rows))


def table(found: list[Outcome]) -> list[dict[str, Any]]:
    """One row a kind."""
    rows = []
    for kind in dict.fromkeys(outcome.case.kind for outcome in found):
        mine = [outcome for outcome in found if outcome.case.kind == kind]
        took = [outcome.took_s for outcome in mine if outcome.took_s]
        rows.append(
            {
                "fault": kind,
                "cases": len(mine),
                "loads": ", ".join(sorted({outcome.case.load for outcome in mine})),
                "over after s, median": round(median(took), 1) if took else 0,
                "largest": round(max(took), 1) if took else 0,
                "named": sum(outcome.named for outcome in mine),
                "hangs": sum(outcome.hangs for outcome in mine),
                "wrong": sum(outcome.wrong for outcome in mine),
                "left behind": sum(len(outcome.left) for outcome in mine),
                "unexpected": sum(bool(outcome.unexpected) for outcome in mine),
            }
        )
    return rows


@contextmanager
def _lab(kinds: list[str], skipped: dict[str, str]) -> Iterator[Netlab | None]:
    """Four hosts for the kinds that break links; without the rights for them these are left out."""
    if not set(kinds) & set(_LINKS):
        yield None
        return
    lab = Netlab(hosts=4, gbps=_GBPS)
    try:
        lab.open()
        why = "namespaces of an ordinary user cannot be entered from here" if lab.in_user_namespace else ""
    except NetlabError as error:
        why = str(error)
    for kind in _LINKS if why else ():
        if kind in kinds:
            kinds.remove(kind)
            skipped[kind] = why
    try:
        yield None if why else lab
    finally:
        lab.close()


def _fork(work: Any) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(9)
    return pid


def _hold_store(port: int, size: int, net: str | None) -> None:
    """The store of a case, in a process that is no rank."""
    import torch.distributed as dist

    if net is not None:
        os.setns(os.open(net, os.O_RDONLY), os.CLONE_NEWNET)
    store = dist.TCPStore("0.0.0.0", port, size, is_master=True, wait_for_workers=False)
    while os.getppid() != 1:
        time.sleep(0.2)
    del store


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _do(command: list[str]) -> None:
    subprocess.run(command, check=False, capture_output=True, timeout=60)


def _preload_clock() -> None:
    """Starts this program once more with a clock that a process can shift for itself; not without a C compiler."""
    if "LD_PRELOAD" in os.environ:
        assert ctypes.CDLL(None).set_clock_offset
        return
    compiler = shutil.which("cc")
    if compiler is None:
        return
    library = Path(tempfile.gettempdir()) / f"faults-clock-{os.getpid()}.so"
    source = ROOT / "scripts" / "trust" / "clock.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source)], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run([sys.executable, *sys.argv], env=environment, check=False)
    finally:
        library.unlink()
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    sys.exit(main())
