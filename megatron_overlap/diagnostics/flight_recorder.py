"""What a rank was doing: kept in memory, and told with everything else that is known when a wait has failed.

Nothing is looked up before something fails: a flight costs two appends to a list.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from megatron_overlap.diagnostics.heartbeat import Heartbeat

_FLIGHTS = 2000
"""Last messages' ops that are kept: some steps of a model."""
_OPS = "megatron_overlap.ops."


class FlightRecorder:
    """The last flights of this rank, and how to tell what happened.

    Args:
        rank: global rank.
        folder: where a failure is written to.
        facts: versions and config, for the file.

    Attributes:
        step: the training step that runs; 0 before the first, or where nobody counts.
        heartbeat: signs of life of all ranks; None where there are none.
    """

    def __init__(self, rank: int, folder: Path, facts: Mapping[str, str]) -> None:
        self.rank, self.folder = rank, folder
        self.step = 0
        self.heartbeat: Heartbeat | None = None
        self._facts = facts
        self._flights: deque[list[Any]] = deque(maxlen=_FLIGHTS)
        self._told: str | None = None
        self._lock = threading.Lock()

    def began(self, op: str, number: int, channel: str, peers: list[int]) -> list[Any]:
        """Notes that a flight begins; `ended` takes what is returned."""
        record = [self.step, op, channel, number, peers, time.time(), None]
        self._flights.append(record)
        return record

    def ended(self, record: list[Any]) -> None:
        """Notes that all of a flight has landed and left."""
        record[-1] = time.time()

    def doing(self) -> str:
        """The step and the oldest op that is not over, in words."""
        open_ops = [record[1] for record in list(self._flights) if record[-1] is None]
        where = f"in {open_ops[0]}" if open_ops else "in no op of the plugin"
        return f"at step {self.step}, {where}"

    def explain(self, text: str, peer: int) -> str:
        """What is told of a wait that failed: which layer, which step, how the peer was, and where more is written.

        Called where the computing thread waits, so that its stack says for which layer. The first failure of a rank is
        the one that is written; those that follow from it repeat where.

        Args:
            text: peer, op, chunk and cause.
            peer: global rank that was waited for.
        """
        with self._lock:
            if self._told is not None:
                return f"{text}; after an earlier failure, see {self._told}"
            layer = layer_of(sys._getframe(1))
            whole = f"{text}; layer {layer}, step {self.step}"
            if self.heartbeat is not None:
                whole += f"; rank {peer}: {self.heartbeat.of(peer)}"
            self._told = self._write(whole, traceback.format_stack())
            if self.heartbeat is not None:
                self.heartbeat.say(whole)
            return f"{whole}; the last steps are in {self._told}"

    def post_mortem(self, error: BaseException) -> str | None:
        """Writes the file for any other error; where it is, or None where there is one already or it cannot be."""
        with self._lock:
            if self._told is not None:
                return None
            lines = traceback.format_exception(error)
            text = f"{type(error).__name__}: {error}; {self.doing()}"
            self._told = self._write(text, lines)
            if self.heartbeat is not None:
                self.heartbeat.say(text)
            return self._told

    def close(self) -> None:
        """Ends the signs of life."""
        if self.heartbeat is not None:
            self.heartbeat.close()
            self.heartbeat = None

    def _write(self, text: str, stack: list[str]) -> str:
        path = self.folder / f"overlap-failure-rank{self.rank}.json"
        names = ("step", "op", "channel", "number", "peers", "began", "ended")
        content = {
            "rank": self.rank,
            "message": text,
            "time": time.time(),
            **self._facts,
            "operations": [dict(zip(names, record, strict=True)) for record in list(self._flights)],
            "stack": stack,
        }
        try:
            path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
        except OSError as error:
            return f"no file: {path}: {error.strerror or type(error).__name__}"
        return str(path)


def layer_of(frame: FrameType | None) -> str:
    """The name in the model of the layer that runs in `frame` or above it, as `decoder.layers.3.mlp.linear_fc1`.

    An op has its weight in a variable; of a forward without one the innermost module that is called is taken.
    """
    weight: torch.Tensor | None = None
    module: torch.nn.Module | None = None
    while frame is not None:
        found = frame.f_locals
        if weight is None and frame.f_globals.get("__name__", "").startswith(_OPS):
            named = found.get("w", found.get("w_shard"))
            weight = named if isinstance(named, torch.Tensor) else None
        if module is None and isinstance(found.get("self"), torch.nn.Module):
            module = found["self"]
        frame = frame.f_back
    if weight is None and module is None:
        return "unknown"
    return _name(weight, module)


def _name(weight: torch.Tensor | None, module: torch.nn.Module | None) -> str:
    """Looks through all models in memory: slow, and done once, by a process that is about to end."""
    best = ""
    address = None if weight is None else weight.data_ptr()
    for root in [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]:
        for name, each in root.named_modules():
            own = each._parameters.get("weight") if address is not None else None
            matches = own is not None and own.data_ptr() == address if address is not None else each is module
            if matches and len(name) > len(best):
                best = name
    kind = type(module).__name__ if module is not None else "weight"
    return best or (kind if weight is None else f"of a weight {tuple(weight.shape)}")
