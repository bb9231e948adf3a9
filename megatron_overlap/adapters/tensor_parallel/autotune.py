"""`overlap.tensor.method: auto` in Megatron's linears: a `Autotuner` for each tensor parallel group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_overlap.autotune.cache import Entry, kept
from megatron_overlap.autotune.candidates import STOCK, Call, Candidate
from megatron_overlap.autotune.predict import candidates
from megatron_overlap.autotune.search import Decider
from megatron_overlap.autotune.tuner import Autotuner, Verdict
from megatron_overlap.comm import Transport
from megatron_overlap.counters import AutotuneLine, Tally
from megatron_overlap.ops.call import gathered_rows
from megatron_overlap.session import Session, installed_versions

_TIMEOUT_S = 600.0
_COLUMN = ("ag_gemm", "copy_gemm")
_learns = torch.is_grad_enabled


class _Served(NamedTuple):
    """The last column-parallel call: its layer and input, and what served it."""

    layer: weakref.ref[torch.nn.Module]
    group: dist.ProcessGroup
    tensor: weakref.ref[torch.Tensor]
    version: int
    candidate: Candidate

    def fed_by(self, group: dist.ProcessGroup, x: torch.Tensor) -> bool:
        """Whether `x` is the same tensor, and nobody has written into it in between."""
        return self.group is group and self.tensor() is x and self.version == _version(x)


@dataclass(slots=True)
class _Shortcut:
    """A layer's calls of one size, once their choice is Megatron's own path: all that has to be looked at.

    `shares` is the group of a layer whose input other layers take too.
    """

    numel: int
    learns: bool
    input_learns: bool
    weight_learns: bool
    decider: Decider
    tally: Tally
    shares: dist.ProcessGroup | None


class TensorChoice:
    """The choosers of one session."""

    def __init__(self, session: Session, transport: Callable[[dist.ProcessGroup], Transport]) -> None:
        self._session, self._transport = session, transport
        tensor = session.config.tensor
        # What is fastest differs from run to run, and another path sums in another order.
        self.wanted = tensor.method == "auto" and not session.config.deterministic
        self._pattern = None if tensor.schedule == "auto" else tensor.schedule
        self._chunks = None if tensor.chunks_per_rank == "auto" else tensor.chunks_per_rank
        self._folder = None if tensor.autotune_cache is None else Path(tensor.autotune_cache).expanduser()
        self._versions = {name: release for name, release in installed_versions().items() if release}
        self._choosers: dict[dist.ProcessGroup, Autotuner] = {}
        self._last: _Served | None = None
        self._shortcuts: dict[int, _Shortcut] = {}
        self._sharing: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        if self.wanted:
            session.counters.autotune_lines = self.lines

    def runs_stock(self, layer: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether a call runs Megatron's own path with nothing else to do; it is counted then.

        On short layers the way through `serve` is 5 % of the pass. Nothing but the choice has to be looked at: whatever
        else keeps a call from the plugin ends on Megatron's own path too. Between two layers the caches are lost: what
        is touched here counts, not what is computed.
        """
        shortcut = self._shortcuts.get(id(layer))
        if (
            shortcut is None
            or not shortcut.decider.free
            or shortcut.numel != x.numel()
            or shortcut.learns != _learns()
            or shortcut.input_learns != x.requires_grad
            or shortcut.weight_learns != weight.requires_grad
        ):
            return False
        if shortcut.shares is not None:
            if self._last is not None and self._last.fed_by(shortcut.shares, x):
                return False
            self._last = _Served(weakref.ref(layer), shortcut.shares, weakref.ref(x), _version(x), STOCK)
        shortcut.decider.free -= 1
        shortcut.tally.stock_selected += 1
        return True

    def serve(
        self,
        layer: torch.nn.Module,
        kind: str,
        op: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        group: dist.ProcessGroup,
        into: bool,
        run: Callable[[Candidate], Any],
        fused: Callable[[], Sequence[Candidate]],
        *,
        measured: bool,
    ) -> Any:
        """Runs a call as it is chosen; see `Autotuner.serve`. Not `measured`: as it is chosen now.

        A column-parallel call with the input of the one before it is served like that one and not measured: it shares
        the other's gather, or would have nobody to share with.
        """
        if op == "ag_gemm" and self._last is not None and self._last.fed_by(group, x):
            first = self._last.layer()
            if first is not None:
                self._sharing.add(first)
            return run(self._last.candidate)
        call = self._call(op, x, weight, group, into)

        def possible() -> list[Candidate]:
            return [
                *fused(),
                *candidates(call, self._pattern, self._chunks, device_type=x.device.type, item_bytes=x.itemsize),
            ]

        result, candidate = self._chooser(group).serve(call, run, (x, weight), possible, measured=measured)
        if op == "ag_gemm":
            self._last = _Served(weakref.ref(layer), group, weakref.ref(x), _version(x), candidate)
        decider = self._chooser(group).decider(call)
        if candidate == STOCK and decider is not None and decider.free:
            self._shortcuts[self._number(layer)] = _Shortcut(
                x.numel(),
                _learns(),
                x.requires_grad,
                weight.requires_grad,
                decider,
                self._session.counters.tally(kind, f"{weight.shape[1]}->{weight.shape[0]}", op, "forward"),
                group if layer in self._sharing else None,
            )
        return result

    def _number(self, layer: torch.nn.Module) -> int:
        """What a layer's shortcut is found by; another layer may get the number when this one is gone."""
        number = id(layer)
        if number not in self._shortcuts:
            weakref.finalize(layer, self._shortcuts.pop, number, None).atexit = False
        return number

    def unsupported_reason(self, x: torch.Tensor, into: bool) -> str | None:
        """What keeps a call from being chosen for; None if nothing does."""
        if into and not x.is_cuda:
            return "Megatron's own fused weight gradient needs CUDA: there is nothing to choose from"
        return None

    def lines(self) -> tuple[AutotuneLine, ...]:
        """What stands now, for the report; before the first call what earlier runs of these releases have kept."""
        if not self._choosers and self._folder is not None:
            found = kept(self._folder)
            return tuple(_kept_line(*each) for each in found if self._versions.items() <= each[0].items())
        return tuple(_line(verdict) for chooser in self._choosers.values() for verdict in chooser.verdicts())

    def _call(self, op: str, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, into: bool) -> Call:
        learns = torch.is_grad_enabled()
        return Call(
            op,
            gathered_rows(x, group.size() if op == "ag_gemm" else 1),
            weight.shape[1],
            weight.shape[0],
            str(x.dtype).removeprefix("torch."),
            group.size(),
            backward=learns and (x.requires_grad or weight.requires_grad),
            weight=weight.requires_grad,
            into_main_grad=into and weight.requires_grad,
        )

    def _chooser(self, group: dist.ProcessGroup) -> Autotuner:
        chooser = self._choosers.get(group)
        if chooser is None:
            chooser = self._choosers[group] = Autotuner(
                group,
                self._transport(group),
                folder=self._folder,
                versions=self._versions,
                timeout_s=self._session.config.timeout_s or _TIMEOUT_S,
            )
        return chooser


def _version(x: torch.Tensor) -> int:
    return -1 if x.is_inference() else x._version


def _line(verdict: Verdict) -> AutotuneLine:
    call = verdict.call
    kind = "column" if call.op in _COLUMN else "row"
    others = " and all without sequence parallelism" if call.sums else ""
    return AutotuneLine(
        module=f"{kind} {call.in_features}->{call.out_features}{others}",
        op=call.op,
        rows=call.rows,
        dtype=call.dtype,
        passes="forward, backward" if call.backward else "forward",
        method=str(verdict.candidate),
        ms=_ms(verdict.us),
        stock_ms=_ms(verdict.stock_us),
        reason=_why(verdict, verdict.candidate),
    )


def _kept_line(environment: dict[str, str], key: str, entry: Entry) -> AutotuneLine:
    op, shape, dtype, *marks = key.split()
    rows, in_features, out_features = shape.split("x")
    where = f"kept from an earlier run: {environment.get('device')}, {environment.get('ranks')} ranks"
    return AutotuneLine(
        module=f"{'column' if op in _COLUMN else 'row'} {in_features}->{out_features}",
        op=op,
        rows=int(rows),
        dtype=dtype,
        passes="forward, backward" if "backward" in marks else "forward",
        method=str(entry.candidate),
        ms=_ms(entry.us),
        stock_ms=_ms(entry.stock_us),
        reason=where,
    )


def _ms(us: float) -> float | None:
    return us / 1e3 if us == us else None


def _why(verdict: Verdict, candidate: Candidate) -> str:
    tried = _listed([each for each in verdict.tried if each not in (STOCK, candidate)])
    if verdict.stage in ("first", "second", "third"):
        return f"being measured: {_listed(verdict.tried)}"
    if verdict.withdrawals and candidate == STOCK:
        return f"withdrawn, as Megatron's own became faster: {tried}"
    if verdict.why == "cached":
        return "kept from an earlier run" + (", checked now" if verdict.stage == "recheck" else "")
    if verdict.why == "model":
        return "predicted: no backward pass came that could be measured"
    return f"none is faster: {tried}" if candidate == STOCK else f"faster than {tried or STOCK}"


def _listed(tried: Sequence[Candidate]) -> str:
    return ", ".join(map(str, tried))
