"""Flight recorder: records recent operations in memory, at the cost of two writes each, and explains a failed wait."""

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
from typing import Any, Protocol

import torch

from megatron_overlap.diagnostics.heartbeat import Heartbeat

_NUM_OPERATIONS = 2000  # most recent operations to record: some steps of a model
_OPS = "megatron_overlap.ops."


class Run(Protocol):
    """The number of the current training step, 0 before the first, and the folder of files that describe a failure."""

    step: int
    folder: Path


class FlightRecorder:
    """Records the most recent operations of this rank and writes them, with `facts`, to a file after a failure."""

    def __init__(self, rank: int, run: Run, facts: Mapping[str, str]) -> None:
        self._rank, self._run, self._facts = rank, run, facts
        self.heartbeat: Heartbeat | None = None
        self._operations: deque[list[Any]] = deque(maxlen=_NUM_OPERATIONS)
        self._file: str | None = None
        self._lock = threading.Lock()

    def began(self, op: str, number: int, channel: str, peers: list[int]) -> list[Any]:
        """Record the start of an operation and return its record for `ended`."""
        record = [self._run.step, op, channel, number, peers, time.time(), None]
        self._operations.append(record)
        return record

    def ended(self, record: list[Any]) -> None:
        """Record that all messages of an operation have completed."""
        record[-1] = time.time()

    def doing(self) -> str:
        """Return the step and the oldest operation in flight, in words."""
        open_ops = [record[1] for record in list(self._operations) if record[-1] is None]
        where = f"in {open_ops[0]}" if open_ops else "in no op of the plugin"
        return f"at step {self._run.step}, {where}"

    def explain(self, text: str, peer: int) -> str:
        """Return the message of a failed wait: layer, step, state of the peer and the path of the failure file.

        The computing thread calls it, so that the stack identifies the layer. Only the first failure of a rank writes a
        file; later failures refer to it.
        """
        with self._lock:
            if self._file is not None:
                return f"{text}; after an earlier failure, see {self._file}"
            whole = f"{text}; layer {layer_of(sys._getframe(1))}, step {self._run.step}"
            if self.heartbeat is not None:
                whole += f"; rank {peer}: {self.heartbeat.state_of(peer)}"
            return f"{whole}; the last steps are in {self._write(whole, traceback.format_stack())}"

    def post_mortem(self, error: BaseException) -> str | None:
        """Write the failure file for any other error; return its path, or None if a file exists."""
        with self._lock:
            if self._file is not None:
                return None
            text = f"{type(error).__name__}: {error}; {self.doing()}"
            return self._write(text, traceback.format_exception(error))

    def close(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat.close()
            self.heartbeat = None

    def _write(self, text: str, stack: list[str]) -> str:
        path = self._run.folder / f"overlap-failure-rank{self._rank}.json"
        names = ("step", "op", "channel", "number", "peers", "began", "ended")
        content = {
            "rank": self._rank,
            "message": text,
            "time": time.time(),
            **self._facts,
            "operations": [dict(zip(names, record, strict=True)) for record in list(self._operations)],
            "stack": stack,
        }
        try:
            path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
            self._file = str(path)
        except OSError as error:
            self._file = f"no file: {path}: {error.strerror or type(error).__name__}"
        if self.heartbeat is not None:
            self.heartbeat.publish_failure(text)
        return self._file


def layer_of(frame: FrameType | None) -> str:
    """Return the model name of the layer that runs in `frame` or a caller, such as `decoder.layers.3.mlp.linear_fc1`.

    The weight in a local variable of an operation identifies the layer; without one, the innermost calling module does.
    This searches all models in memory, which is slow; it runs once, in a process that is about to end.
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

    def matches(each: torch.nn.Module) -> bool:
        if weight is None:
            return each is module
        # Grouped experts of TransformerEngine have `weight0`, `weight1`, ...
        return any(own is not None and own.data_ptr() == weight.data_ptr() for own in each._parameters.values())

    roots = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    names = [name for root in roots for name, each in root.named_modules() if matches(each)]
    if best := max(names, key=len, default=""):
        return best
    return type(module).__name__ if weight is None else f"of a weight {tuple(weight.shape)}"
