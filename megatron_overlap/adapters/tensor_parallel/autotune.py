"""`overlap.tensor.method: auto` in Megatron's layers: one `Autotuner` for each tensor-parallel group."""

import math
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random

from megatron_overlap.adapters.diagnostics.reference_check import Check
from megatron_overlap.adapters.tensor_parallel.call import LayerOutput, LinearCall
from megatron_overlap.adapters.tensor_parallel.eligibility import is_te_linear, linears_of
from megatron_overlap.adapters.tensor_parallel.forward_only import ForwardOnlyCalls
from megatron_overlap.adapters.wrapping import recomputed_by_torch, replaced
from megatron_overlap.autotune.candidates import SEPARATE_LAYERS, SEQUENCE_OVERLAP, STOCK, Call, Candidate
from megatron_overlap.autotune.search import Search, Step
from megatron_overlap.autotune.tuner import MAX_KINDS, Autotuner, Kind
from megatron_overlap.comm import Transport
from megatron_overlap.counters import AutotuneLine, Tally
from megatron_overlap.ops.call import gathered_rows
from megatron_overlap.schedules.heuristics import p2p_settings
from megatron_overlap.session import Session, installed_versions

_TIMEOUT_S = 600.0
_grad_enabled = torch.is_grad_enabled


@dataclass(slots=True)
class _StockCalls:
    """Calls of a layer in one kind of pass that run the stock path: those with `least` <= input elements < `below`."""

    least: float
    below: float
    tally: Tally
    search: Search[Candidate] | None = None  # of calls that are measured from time to time
    communicate: bool = True


class GroupAutotuners:
    """One `Autotuner` for each process group of a session, if the `method` of the feature is `auto`."""

    def __init__(self, session: Session, method: str) -> None:
        self._session = session
        # Which candidate is fastest differs from run to run, and candidates sum in different orders.
        self.enabled = method == "auto" and not session.config.deterministic
        folder = os.path.expanduser(session.config.tensor.autotune_cache or "")
        # The `~` stays for a user id without a home folder, as in some containers: no cache.
        self._folder = Path(folder) if folder and not folder.startswith("~") else None
        self._versions = {name: release for name, release in installed_versions().items() if release}
        self._autotuners: dict[dist.ProcessGroup, Autotuner] = {}
        if self.enabled:
            session.counters.autotune_lines.append(self.lines)

    def autotuner(self, group: dist.ProcessGroup) -> Autotuner:
        """The autotuner of a group, made at its first call."""
        found = self._autotuners.get(group)
        if found is None:
            timeout_s = self._session.config.timeout_s or _TIMEOUT_S
            found = self._autotuners[group] = Autotuner(group, self._folder, self._versions, timeout_s)
        return found

    def drop(self) -> None:
        """Forgets the autotuners of process groups that the job destroyed."""
        self._autotuners.clear()

    def lines(self) -> tuple[AutotuneLine, ...]:
        """The selections so far, for the report."""
        return tuple(self.line(kind) for each in self._autotuners.values() for kind in each.kinds.values())

    def line(self, kind: Kind) -> AutotuneLine:
        """The selection of one kind of call, for the report."""
        search, selected, call = kind.search, kind.search.selected, kind.call
        base, *others = search.tried
        tried = ", ".join(str(each) for each in others if each != selected.candidate)
        reason = {
            "reverted": f"reverted, as {'the stock path' if base == STOCK else base} became faster: {tried}",
            "cached": "cached by an earlier run",
            "modelled": "modelled from its rows, not measured yet",
            "not measured": "not measured: no backward pass followed",
            "measured": f"none is faster: {tried}" if selected.candidate == base else f"faster than {tried or base}",
        }[selected.reason]
        ms, stock_ms = (None if math.isnan(us) else us / 1e3 for us in (selected.us, selected.stock_us))
        module = {"ag_gemm": "column", "copy_gemm": "column", "gemm_rs": "row", "gemm_ar": "row"}.get(call.op, call.op)
        together = " and all layers without sequence parallelism" if call.all_reduces else ""
        name = " ".join(filter(None, (module, f"{call.in_features}->{call.out_features}{together}", call.variant)))
        passes, method = "forward, backward" if call.backward else "forward", str(selected.candidate)
        if search.measuring:
            reason = f"being measured: {', '.join(map(str, search.tried))}"
        return AutotuneLine(name, call.op, call.rows, call.dtype, passes, method, ms, stock_ms, reason)


class LinearAutotuner(GroupAutotuners):
    """The autotuners of one session: run a call with the candidate that its autotuner names.

    Steps of the reference check are not timed. While `paused`, linear layers run their selection untimed,
    because the block around them is compared.
    """

    def __init__(
        self,
        session: Session,
        run_candidate: Callable[[LinearCall, Candidate], LayerOutput],
        fused_candidates: Callable[[LinearCall], Sequence[Candidate]],
        transport: Callable[[dist.ProcessGroup], Transport],
    ) -> None:
        super().__init__(session, session.config.tensor.method)
        self._check, self._transport = session.adapter(Check), transport
        self._forward_only = ForwardOnlyCalls(transport)
        self._run_candidate, self._fused_candidates = run_candidate, fused_candidates
        self._stock_calls: dict[tuple[object, ...], _StockCalls] = {}
        self.paused = False
        # Calls of linear layers whose block runs in batch overlap.
        self._replaced: frozenset[Call] = frozenset()

    def runs_stock(self, layer: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor | None = None) -> bool:
        """Whether a call runs the stock path untimed; if so, counts it.

        `run` would take 5 % of the pass of a short layer. Other reasons against the plugin need no check here, because
        they lead to the stock path too.
        """
        if weight is None:
            # `layer.weight` goes through `nn.Module.__getattr__`, an extra Python call on every forward.
            weight = layer._parameters.get("weight")
            if weight is None:
                return False
        stock = self._stock_calls.get(_pass_of(layer, x, weight))
        if stock is None or not stock.least <= x.numel() < stock.below or recomputed_by_torch():
            return False
        if stock.search is not None:
            if stock.search.calls >= stock.search.free_until:
                return False
            stock.search.calls += 1
        if stock.communicate:
            stock.tally.stock_selected += 1
        else:
            stock.tally.not_communicating += 1
        return True

    def run(self, call: LinearCall) -> LayerOutput:
        """Runs a call with its candidate."""
        x, weight, group = call.x, call.weight, call.group
        kind = _kind_of(call)
        autotuner = self.autotuner(group)
        threshold = modelled = None
        if call.hooks.forward_only:
            threshold = self._forward_only.threshold(call, kind, autotuner.slowest)
            small = kind.rows < threshold.rows
            if small or _pass_of(call.layer, x, weight) not in self._stock_calls:
                self.add_small(call, threshold.rows)
            if small:
                return self._run_candidate(call, STOCK)
            shape = self._forward_only.shape(group, kind, lambda: self._p2p_candidates(call, kind)[0])
            modelled = shape.candidate
            if not shape.repeats:
                return self._run_candidate(call, modelled)

        def candidates() -> list[Candidate]:
            return [STOCK, *self._p2p_candidates(call, kind), *self._fused_candidates(call)]

        run = partial(self._run_candidate, call)
        timed = not self._check.due and not self.paused
        result, candidate = autotuner.run(kind, run, (x, weight), candidates, timed=timed, modelled=modelled)
        if len(autotuner.kinds) >= MAX_KINDS:
            text = f"the group has {MAX_KINDS} kinds of calls: calls with other rows are not measured"
            self._session.counters.exclude("autotuning", text)
        own = autotuner.kinds.get(kind)  # None for layers that are tuned together
        if own is not None and candidate == STOCK and own.search.calls < own.search.free_until:
            if threshold is not None:
                threshold.rows, threshold.measured = kind.rows + 1, True
                return result
            self._put(call, x.numel(), x.numel() + 1, search=own.search)
        return result

    def selected(self, call: LinearCall) -> Candidate:
        """The present selection for a call that is neither counted nor measured; the stock path if there is none."""
        autotuner = self._autotuners.get(call.group)
        known = None if autotuner is None else autotuner.kinds.get(_kind_of(call))
        return STOCK if known is None else known.search.selected.candidate

    @property
    def compares_blocks(self) -> bool:
        """Whether blocks may run in batch overlap. A pass without gradients needs a linear layer measured in one."""
        if not self.enabled or _grad_enabled():
            return self.enabled
        kinds = (kind for each in self._autotuners.values() for kind in each.kinds.values())
        return any(not kind.call.backward for kind in kinds)

    def run_block(
        self,
        layers: Sequence[Any],
        x: torch.Tensor,
        run: Callable[[Candidate], torch.Tensor],
        overlap: Candidate,
        leaf: torch.Tensor,
    ) -> Any:
        """Runs `layers`, with the input `x`, by `SEPARATE_LAYERS` or `overlap`; their backward pass ends at `leaf`.

        The comparison starts when the linear layers in the block have a first selection, and pauses their own
        comparison.
        """
        group, sharded = layers[0].self_attention.linear_proj.tp_group, layers[0].config.sequence_parallel
        autotuner = self._autotuners.get(group)
        rows, dtype = gathered_rows(x, group.size() if sharded else 1), str(x.dtype).removeprefix("torch.")
        backward = _grad_enabled() and x.requires_grad
        # The first pass of full recomputation has no gradients.
        passes = {True, False} if backward and layers[0].config.recompute_granularity == "full" else {backward}
        separate = [
            kind
            for kind in (() if autotuner is None else autotuner.kinds.values())
            if kind.call.op != "block"
            and (kind.call.rows, kind.call.dtype, kind.call.all_reduces) == (rows, dtype, not sharded)
            and kind.call.backward in passes
        ]
        waiting = [kind for kind in separate if not kind.search.has_selection]
        if autotuner is None or not separate or _inside(waiting, layers):
            return run(SEPARATE_LAYERS)

        def run_candidate(candidate: Candidate) -> torch.Tensor:
            # Layers outside the block, such as the output layer, keep their candidate; their calls begin no step.
            for kind in separate if not sharded else ():
                kind.step = Step(kind.search.selected.candidate)
            with replaced(vars(self), paused=autotuner.kinds[kind_of_block].search.measuring):
                return run(candidate)

        variant = f"of {len(layers)} layers" + (" by sequences" if overlap == SEQUENCE_OVERLAP else "")
        kind_of_block = Call("block", rows, x.shape[-1], x.shape[-1], dtype, backward, variant)
        candidates, timed = (SEPARATE_LAYERS, overlap), not self._check.due
        output, used = autotuner.run(kind_of_block, run_candidate, (leaf,), lambda: candidates, timed=timed)
        if used != overlap:
            self._replaced = frozenset()
        elif not self._replaced:
            self._replaced = frozenset(kind.call for kind in _inside(separate, layers))
        return output

    def drop(self) -> None:
        super().drop()
        self._forward_only = ForwardOnlyCalls(self._transport)
        self._stock_calls.clear()

    def unsupported_reason(self, call: LinearCall) -> str | None:
        if reason := recomputed_by_torch():
            return f"unmeasured p2p runs: {reason}"
        if call.main_grad is not None and not call.x.is_cuda and not is_te_linear(call.layer):
            return "unmeasured p2p runs: the stock path of local layers adds to main_grad on CUDA only"
        return None

    def lines(self) -> tuple[AutotuneLine, ...]:
        return *super().lines(), *self._forward_only.lines()

    def line(self, kind: Kind) -> AutotuneLine:
        line = super().line(kind)
        if kind.call in self._replaced and kind.search.measuring:
            return replace(line, reason="not measured to the end: its block runs in batch overlap")
        return line

    def add_small(self, call: LinearCall, rows: float) -> None:
        """Lets `runs_stock` recognize the forward-only calls of a layer that have fewer gathered rows than `rows`."""
        shared = call.group.size() if call.op == "ag_gemm" else 1
        self._put(call, 0, rows * call.weight.shape[1] / shared, communicate=call.op != "copy_gemm")

    def _put(self, call: LinearCall, least: float, below: float, **options: Any) -> None:
        """Stores a record for `runs_stock` until the layer is deleted, after which another one may get its id."""
        calls, key = self._stock_calls, _pass_of(call.layer, call.x, call.weight)
        if key not in calls:
            weakref.finalize(call.layer, calls.pop, key, None).atexit = False
        tally = self._session.counters.tally(*call.hooks.site, call.hooks.forward)
        calls[key] = _StockCalls(least, below, tally, **options)

    def _p2p_candidates(self, call: LinearCall, kind: Call) -> list[Candidate]:
        tensor, x = self._session.config.tensor, call.x
        settings = p2p_settings(
            call.group.size(),
            kind.rows,
            x.itemsize * (kind.in_features if call.op == "ag_gemm" else kind.out_features),
            x.device.type,
            all_reduces=kind.all_reduces,
            pattern=None if tensor.schedule == "auto" else tensor.schedule,
            chunks=None if tensor.chunks_per_rank == "auto" else tensor.chunks_per_rank,
            copy_engines=self._transport(call.group).copy_engines,
        )
        return [Candidate("p2p", *each) for each in settings]


def _pass_of(layer: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor) -> tuple[object, ...]:
    """A layer and what distinguishes its passes: training, forward only, and both passes of recomputation."""
    return id(layer), _grad_enabled(), x.requires_grad, weight.requires_grad, megatron_random.IS_CHECKPOINTING


def _kind_of(call: LinearCall) -> Call:
    x, weight = call.x, call.weight
    rows = gathered_rows(x, call.group.size() if call.op == "ag_gemm" else 1)
    dtype = str(x.dtype).removeprefix("torch.")
    backward = _grad_enabled() and (x.requires_grad or weight.requires_grad)
    variant = "frozen" if not weight.requires_grad else "main_grad" if call.main_grad is not None else ""
    return Call(call.op, rows, weight.shape[1], weight.shape[0], dtype, backward, variant)


def _inside(kinds: Sequence[Kind], layers: Sequence[Any]) -> Sequence[Kind]:
    """The kinds of linear layers in `layers`.

    Under sequence parallelism each shape has its own search. A layer outside the block, such as the output layer, is
    called less often, so its search takes many more steps.
    """
    if not kinds or not layers[0].config.sequence_parallel:
        return kinds
    shapes = {(linear.weight.shape[1], linear.weight.shape[0]) for each in layers for linear in linears_of(each)}
    return [kind for kind in kinds if (kind.call.in_features, kind.call.out_features) in shapes]
