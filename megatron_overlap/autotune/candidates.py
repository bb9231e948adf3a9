"""Candidates that run a linear layer or a block, the kind of call that they are compared for, and stored selections."""

import hashlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_overlap.autotune.search import Selection
from megatron_overlap.schedules.heuristics import Knob
from megatron_overlap.schedules.plan import Pattern


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a linear layer or a block of transformer layers, forward and backward.

    Attributes:
        method: of a linear layer the first three; of a block its linear layers with their own candidates, or batch
            overlap, with parts of the batch or of each sequence.
        pattern: of p2p; None takes that of the device.
        chunks_per_rank: of p2p; None takes a number from the rows and their bytes.
        knobs: options of fused that differ from their defaults, in the order of `schedules.heuristics.KNOBS`.
    """

    method: Literal["stock", "p2p", "fused", "separate layers", "batch overlap", "sequence overlap"]
    pattern: Pattern | None = None
    chunks_per_rank: int | None = None
    knobs: tuple[Knob, ...] = ()

    def __str__(self) -> str:
        chunks = None if self.chunks_per_rank is None else f"x {self.chunks_per_rank}"
        return " ".join(filter(None, (self.method, self.pattern, chunks, *(f"{name}={v}" for name, v in self.knobs))))


STOCK, SEPARATE_LAYERS = Candidate("stock"), Candidate("separate layers")
"""The bases of a linear layer and of a block, which every other candidate has to beat."""

BATCH_OVERLAP, SEQUENCE_OVERLAP = Candidate("batch overlap"), Candidate("sequence overlap")
"""The other candidate of a block: `overlap.tensor.split` is batch, or sequence."""

EXPERTS = "experts"
"""The op of a mixture-of-experts layer: dispatch, experts and combine."""

FUSED, HOPPER = Candidate("fused"), Candidate("fused", knobs=(("kernel", "hopper"),))
"""The portable fused kernels, and those for sm_90."""


@dataclass(frozen=True, slots=True)
class Call:
    """The kind of a call: calls of a group that agree in every attribute run the same candidate.

    Attributes:
        op: `ag_gemm`, `gemm_rs`, `copy_gemm` or `gemm_ar`; `block` for the layers of a transformer block; or `EXPERTS`.
        rows: gathered rows; of experts the most rows that a rank sends in the first call.
        in_features, out_features: columns of this rank's input and output.
        dtype: of input and weight: `bfloat16`.
        backward: a backward pass follows: not in evaluation, nor in the first pass of activation recomputation.
        variant: further properties that change its time, such as `main_grad`: the op adds the weight gradient to it.
    """

    op: str
    rows: int
    in_features: int
    out_features: int
    dtype: str
    backward: bool = True
    variant: str = ""

    @property
    def all_reduces(self) -> bool:
        """Whether the layer has no sequence parallelism, so that it communicates by all-reduce."""
        return self.op in ("copy_gemm", "gemm_ar")

    @property
    def key(self) -> str:
        """The key in the cache."""
        shape = f"{self.rows}x{self.in_features}x{self.out_features}"
        return f"{self.op} {shape} {self.dtype} {'backward ' * self.backward}{self.variant}".rstrip()


class AutotuneCache:
    """Selections of one environment (releases, hardware, topology) in `folder`, by the names of their candidates.

    The next run in the environment starts with them. Each kind of call has one JSON file, private to its user, written
    beside its place and renamed. Files that cannot be read are ignored with one warning.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._environment, self._warned = folder, dict(environment), False

    def get(self, key: str) -> Selection[str] | None:
        """The selection for the kind of call `key`, with the reason `cached`."""
        path = self._path(key)
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            found = Selection(str(tree["candidate"]), float(tree["us"]), float(tree["stock_us"]), "cached")
            if not all(math.isfinite(us) and us > 0 for us in (found.us, found.stock_us)):
                raise ValueError("us and stock_us must be positive numbers")
            return found
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._warn(path, "read", error)
            return None

    def put(self, key: str, selection: Selection[str]) -> None:
        """Writes a selection; other processes may write at the same time."""
        tree = {"environment": self._environment, "call": key, **selection._asdict()}
        path = self._path(key)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, prefix=path.stem, delete_on_close=False) as file:
                json.dump(tree, file, indent=1)
                file.close()
                os.replace(file.name, path)
        except OSError as error:
            self._warn(path, "written", error)

    def _path(self, key: str) -> Path:
        text = json.dumps([self._environment, key], sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def _warn(self, path: Path, verb: str, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            text = f"{path}: cannot be {verb}: {error!r}; its layers are measured again"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
