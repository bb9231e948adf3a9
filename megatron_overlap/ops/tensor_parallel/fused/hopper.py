"""Which GEMMs of a fused op the Hopper kernels make: where they have proved themselves and operands suit them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron_overlap.comm.symmetric.transport import SymmetricTransport


class Hopper:
    """One transport's answer to whether Hopper kernels may run, and how often and why they did not.

    Args:
        objection: why they may not, on this rank's device; empty where they may.
    """

    def __init__(self, objection: str) -> None:
        self.objection = objection
        self.not_used: Counter[str] = Counter()
        """GEMMs that were to run a Hopper kernel and ran the portable one, by reason."""

    @classmethod
    def of(cls, transport: SymmetricTransport) -> Hopper:
        """The transport's own. The first call tries the kernels on its device, which may take minutes."""
        if "hopper" not in transport.tables:
            from megatron_overlap.kernels.hopper.self_test import hopper_objection

            device = transport.fabric.device
            transport.tables["hopper"] = cls(
                hopper_objection(device) if device.type == "cuda" else f"Hopper kernels need CUDA, not {device.type}"
            )
        found = transport.tables["hopper"]
        assert isinstance(found, cls)
        return found

    @staticmethod
    def reasons(transport: SymmetricTransport) -> dict[str, int]:
        """`not_used` of the transport's own; empty where the kernels were never asked for."""
        found = transport.tables.get("hopper")
        return {} if found is None else dict(found.not_used)

    def gathering(self, a: torch.Tensor, b: torch.Tensor, config: Any, out: torch.Tensor) -> tuple[Any, Any] | None:
        """`ag_gemm` and its tile shape; None where the portable one is to run. `config` is what that would have."""
        return self._chosen(a, b, config, out, _ag_gemm)

    def scattering(self, a: torch.Tensor, b: torch.Tensor, config: Any) -> tuple[Any, Any] | None:
        """`gemm_to_owners` and its tile shape; None where the portable one is to run."""
        return self._chosen(a, b, config, None, _gemm_to_owners)

    def _chosen(
        self, a: torch.Tensor, b: torch.Tensor, config: Any, out: torch.Tensor | None, launcher: Callable[[], Any]
    ) -> tuple[Any, Any] | None:
        reason = self.objection
        if not reason:
            from megatron_overlap.kernels.configs import HOPPER, HOPPER_SMALL
            from megatron_overlap.kernels.hopper.operands import objection

            # The same tiles of the product as the portable kernel's; depth of a step, ring and warps are its own.
            mine = HOPPER_SMALL if config.block_n <= HOPPER_SMALL.block_n else HOPPER
            mine = replace(mine, group=config.group)
            reason = objection(a, b, mine, out)
            if not reason:
                return launcher(), mine
        self.not_used[reason] += 1
        return None


def _ag_gemm() -> Any:
    from megatron_overlap.kernels.hopper.ag_gemm import ag_gemm

    return ag_gemm


def _gemm_to_owners() -> Any:
    from megatron_overlap.kernels.hopper.gemm_rs import gemm_to_owners

    return gemm_to_owners
