"""`overlap.tensor.method: auto` in Megatron's linear layers: one `Autotuner` for each tensor-parallel group."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_overlap.autotune.candidates import STOCK, Call, Candidate, p2p_candidates
from megatron_overlap.autotune.search import Search
from megatron_overlap.autotune.tuner import Autotuner, Kind
from megatron_overlap.counters import AutotuneLine, Tally
from megatron_overlap.ops.call import gathered_rows
from megatron_overlap.session import Session, installed_versions

_TIMEOUT_S = 600.0
_grad_enabled = torch.is_grad_enabled


class _ColumnCall(NamedTuple):
    """The last column-parallel call: its layer, its input and its candidate."""

    layer: weakref.ref[torch.nn.Module]
    group: dist.ProcessGroup
    tensor: weakref.ref[torch.Tensor]
    version: int
    candidate: Candidate

    def has_input(self, group: dist.ProcessGroup, x: torch.Tensor) -> bool:
        """Whether `x` is the input of this call, unchanged since."""
        return self.group is group and self.tensor() is x and self.version == _version(x)


@dataclass(slots=True)
class _StockCall:
    """What `runs_stock` compares a call with. `group` is that of a layer whose input other layers take too."""

    numel: int
    grad_enabled: bool
    input_grad: bool
    weight_grad: bool
    search: Search[Candidate]
    tally: Tally
    group: dist.ProcessGroup | None


class LinearAutotuner:
    """The autotuners of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        tensor = session.config.tensor
        # Which candidate is fastest differs from run to run, and candidates sum in different orders.
        self.enabled = tensor.method == "auto" and not session.config.deterministic
        self._pattern = None if tensor.schedule == "auto" else tensor.schedule
        self._chunks = None if tensor.chunks_per_rank == "auto" else tensor.chunks_per_rank
        self._folder = None if tensor.autotune_cache is None else Path(tensor.autotune_cache).expanduser()
        self._versions = {name: release for name, release in installed_versions().items() if release}
        self._autotuners: dict[dist.ProcessGroup, Autotuner] = {}
        self._last: _ColumnCall | None = None
        self._stock_calls: dict[int, _StockCall] = {}
        self._sharing: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        if self.enabled:
            session.counters.autotune_lines = self.lines

    def runs_stock(self, layer: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether a call runs the stock path, untimed; if so, counts it.

        `run` would take 5 % of the pass of a short layer. Other reasons against the plugin need no check here, because
        they lead to the stock path too.
        """
        stock = self._stock_calls.get(id(layer))
        if (
            stock is None
            or stock.search.calls >= stock.search.free_until
            or stock.numel != x.numel()
            or stock.grad_enabled != _grad_enabled()
            or stock.input_grad != x.requires_grad
            or stock.weight_grad != weight.requires_grad
        ):
            return False
        if stock.group is not None:
            if self._last is not None and self._last.has_input(stock.group, x):
                return False
            self._last = _ColumnCall(weakref.ref(layer), stock.group, weakref.ref(x), _version(x), STOCK)
        stock.search.calls += 1
        stock.tally.stock_selected += 1
        return True

    def run(
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
        timed: bool,
    ) -> Any:
        """Runs a call with its candidate; see `Autotuner.run`.

        A column-parallel call with the input of the call before it takes that call's candidate, untimed, because it
        shares the gathered input.
        """
        if op == "ag_gemm" and self._last is not None and self._last.has_input(group, x):
            first = self._last.layer()
            if first is not None:
                self._sharing.add(first)
            return run(self._last.candidate)
        call = _call(op, x, weight, group, into)

        def candidates() -> list[Candidate]:
            found = p2p_candidates(call, self._pattern, self._chunks, device_type=x.device.type, item_bytes=x.itemsize)
            return [*found, *fused()]

        autotuner = self._autotuners.get(group)
        if autotuner is None:
            timeout_s = self._session.config.timeout_s or _TIMEOUT_S
            autotuner = Autotuner(group, folder=self._folder, versions=self._versions, timeout_s=timeout_s)
            self._autotuners[group] = autotuner
        result, candidate = autotuner.run(call, run, (x, weight), candidates, timed=timed)
        if op == "ag_gemm":
            self._last = _ColumnCall(weakref.ref(layer), group, weakref.ref(x), _version(x), candidate)
        own_kind = autotuner.kinds.get(call)  # None for layers that are tuned together
        if own_kind is not None and own_kind.search.calls < own_kind.search.free_until:
            if id(layer) not in self._stock_calls:  # another layer may get the id after this one is deleted
                weakref.finalize(layer, self._stock_calls.pop, id(layer), None).atexit = False
            self._stock_calls[id(layer)] = _StockCall(
                x.numel(),
                _grad_enabled(),
                x.requires_grad,
                weight.requires_grad,
                own_kind.search,
                self._session.counters.tally(kind, f"{weight.shape[1]}->{weight.shape[0]}", op, "forward"),
                group if layer in self._sharing else None,
            )
        return result

    def unsupported_reason(self, x: torch.Tensor, into: bool) -> str | None:
        """The reason that a call cannot be autotuned; None if it can."""
        if into and not x.is_cuda:
            return "the stock path with gradient accumulation fusion needs CUDA, so it cannot be measured"
        return None

    def lines(self) -> tuple[AutotuneLine, ...]:
        """The selections so far, for the report."""
        return tuple(_line(kind) for autotuner in self._autotuners.values() for kind in autotuner.kinds.values())


def _version(x: torch.Tensor) -> int:
    return -1 if x.is_inference() else x._version


def _call(op: str, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, into: bool) -> Call:
    return Call(
        op,
        gathered_rows(x, group.size() if op == "ag_gemm" else 1),
        weight.shape[1],
        weight.shape[0],
        str(x.dtype).removeprefix("torch."),
        group.size(),
        backward=_grad_enabled() and (x.requires_grad or weight.requires_grad),
        weight=weight.requires_grad,
        into_main_grad=into and weight.requires_grad,
    )


def _line(kind: Kind) -> AutotuneLine:
    search, selected = kind.search, kind.search.selected
    tried = ", ".join(str(each) for each in search.tried if each not in (STOCK, selected.candidate))
    if search.measuring:
        reason = f"being measured: {', '.join(map(str, search.tried))}"
    elif selected.reason == "reverted":
        reason = f"reverted, as the stock path became faster: {tried}"
    elif selected.reason == "cached":
        reason = "cached by an earlier run"
    elif selected.reason == "not measured":
        reason = "not measured: no backward pass followed"
    else:
        reason = f"none is faster: {tried}" if selected.candidate == STOCK else f"faster than {tried or STOCK}"
    call, ms, stock_ms = kind.call, selected.us / 1e3, selected.stock_us / 1e3
    together = " and all layers without sequence parallelism" if call.all_reduces else ""
    return AutotuneLine(
        module=f"{'column' if call.op in ('ag_gemm', 'copy_gemm') else 'row'} "
        f"{call.in_features}->{call.out_features}{together}",
        op=call.op,
        rows=call.rows,
        dtype=call.dtype,
        passes="forward, backward" if call.backward else "forward",
        method=str(selected.candidate),
        ms=None if math.isnan(ms) else ms,
        stock_ms=None if math.isnan(stock_ms) else stock_ms,
        reason=reason,
    )
