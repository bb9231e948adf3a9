"""Records the functions of the package that one forward of a linear layer calls until its first bytes are sent.

`python -m tests.adapters.tensor_parallel.call_path_workers` writes the list to docs/design/architecture.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

import megatron_overlap
from megatron_overlap import OverlapConfig, enable
from tests.adapters.tensor_parallel.linear_workers import make_data, make_layer, start
from tests.helpers.releases import ROOT

PACKAGE = Path(megatron_overlap.__file__).parent
PAGE = ROOT / "docs" / "design" / "architecture.md"
BEGIN, END = "<!-- call path: begin -->", "<!-- call path: end -->"
SEND_THREAD = "megatron_overlap_send"


class Recorder:
    """Profile function that lists the package's functions, in order of their first call.

    Recording ends in the calling thread when the transport has taken the messages (`begin` returns), and in the sending
    thread when it has posted the first message (`send_next` returns).
    """

    def __init__(self) -> None:
        self.caller: list[CodeType] = []
        self.sender: list[CodeType] = []
        self._ended: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code, thread = frame.f_code, threading.current_thread()
        sending = thread.name == SEND_THREAD
        if not (sending or thread is threading.main_thread()) or thread.name in self._ended:
            return
        # The CPU adaptation is not on the path of a GPU machine.
        if not code.co_filename.startswith(f"{PACKAGE}/") or code.co_filename.startswith(f"{PACKAGE}/adapters/cpu/"):
            return
        if event == "call":
            (self.sender if sending else self.caller).append(code)
        elif event == "return" and code.co_qualname == ("GlooP2PWork.send_next" if sending else "GlooTransport.begin"):
            self._ended.add(thread.name)

    def functions(self) -> list[tuple[str, str]]:
        """File and name of each function, the calling thread's first."""
        found = {}
        for code in (*self.caller, *self.sender):
            file = str(Path(code.co_filename).relative_to(PACKAGE))
            if not code.co_name.startswith("<gen"):
                found[file, code.co_qualname.rpartition("<locals>.")[2]] = None
        return list(found)


def record(group: dist.ProcessGroup, kind: str = "column") -> list[tuple[str, str]]:
    """Runs one layer twice with `method: p2p`; returns the functions of the second call.

    The first call opens the transport and builds the plan, which later calls reuse.
    """
    start(group)
    x, _ = make_data(kind, torch.float32, 4 * group.size(), group.size(), group.rank())
    with enable(OverlapConfig.model_validate({"tensor": {"method": "p2p"}}), strict=True):
        layer, recorder = make_layer(kind, torch.float32), Recorder()
        layer(x.clone())
        profiled(recorder, lambda: layer(x.clone()))
    return recorder.functions()


def profiled(recorder: Recorder, run: Callable[[], Any]) -> None:
    """Calls `run` with `recorder` as the profile function of all threads."""
    threading.setprofile_all_threads(recorder)
    try:
        run()
    finally:
        threading.setprofile_all_threads(None)  # type: ignore[arg-type]


def section(functions: list[tuple[str, str]]) -> str:
    """The table of a call path, as the page has it."""
    files: dict[str, list[str]] = {}
    for file, function in functions:
        files.setdefault(file, []).append(function)
    rows = [
        f"| {number} | `{file}` | {', '.join(f'`{name}`' for name in names)} |"
        for number, (file, names) in enumerate(files.items(), start=1)
    ]
    return "\n".join(["| | file | functions |", "|---|---|---|", *rows])


def section_of(page: str) -> str:
    """The table between the markers of the page."""
    return page.partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    """Writes the table to the page."""
    from tests.helpers.world import World

    world = World(2, answer_s=240, sizes=(2,), adapted=True)
    try:
        functions = world.run(2, record)[0]
    finally:
        world.close()
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{section(functions)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    from tests.adapters.tensor_parallel import call_path_workers

    call_path_workers.main()
