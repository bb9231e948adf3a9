"""`overlap.expert.method: auto`: the stock path or p2p for each mixture-of-experts layer, measured in the training.

The routing of a layer changes in every call, so a kind of call is a layer, whatever its rows. The autotuner compares
trimmed means over many calls of the layer, and replaces the stock path only beyond its margin (hysteresis).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_overlap.adapters.tensor_parallel.autotune import GroupAutotuners
from megatron_overlap.autotune.candidates import EXPERTS, STOCK, Call, Candidate
from megatron_overlap.session import Session

_CANDIDATES = STOCK, Candidate("p2p")


class _Kind(NamedTuple):
    """Calls of layers that are measured together. Layers of multi-token prediction have numbers of their own."""

    group: dist.ProcessGroup
    layer: int | None
    predicts: bool
    backward: bool
    dtype: torch.dtype


class ExpertAutotuner(GroupAutotuners):
    """The autotuners of one session, one for each expert-parallel group."""

    def __init__(self, session: Session) -> None:
        super().__init__(session, session.config.expert.method)
        self._calls: dict[_Kind, Call] = {}

    def run(
        self, layer: Any, hidden_states: torch.Tensor, probs: torch.Tensor, run: Callable[[Candidate], torch.Tensor]
    ) -> torch.Tensor:
        """Runs one call of a layer with the candidate that its autotuner names, the same on every rank."""
        group = layer.token_dispatcher.ep_group
        autotuner = self.autotuner(group)
        backward = torch.is_grad_enabled() and hidden_states.requires_grad
        predicts = bool(getattr(layer, "is_mtp_layer", False))
        kind = _Kind(group, layer.layer_number, predicts, backward, hidden_states.dtype)
        call = self._calls.get(kind)
        if call is None:
            # The ranks may have different numbers of rows.
            rows = int(autotuner.slowest([float(hidden_states.shape[0])])[0])
            call = self._calls[kind] = Call(
                EXPERTS,
                rows,
                layer.config.hidden_size,
                layer.config.moe_ffn_hidden_size,
                str(hidden_states.dtype).removeprefix("torch."),
                backward,
                f"{layer.num_local_experts} experts of {'prediction ' * predicts}layer {layer.layer_number}",
            )
        result: torch.Tensor = autotuner.run(call, run, (hidden_states, probs), partial(tuple, _CANDIDATES))[0]
        return result

    def drop(self) -> None:
        """Forgets the autotuners of process groups that the job destroyed."""
        self._autotuners.clear()
        self._calls.clear()
