"""Selects Hopper kernels for the GEMMs of a fused operation: the self-test passes and the operands fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron_overlap.comm.symmetric.transport import SymmetricTransport


class Hopper:
    """Selects Hopper kernels on one transport and counts the GEMMs that did not use them.

    Args:
        unsupported_reason: why they cannot run on the device of this rank; empty if they can.
    """

    def __init__(self, unsupported_reason: str) -> None:
        self.unsupported_reason = unsupported_reason
        self.not_used: Counter[str] = Counter()
        """Number of GEMMs that ran the portable kernel instead of a Hopper kernel, by reason."""

    @classmethod
    def of(cls, transport: SymmetricTransport) -> Hopper:
        """Return the object of `transport`. The first call runs the self-test on its device, which can take minutes."""
        if "hopper" not in transport.tables:
            from megatron_overlap.kernels.hopper.self_test import hopper_unsupported_reason

            device = transport.backend.device
            transport.tables["hopper"] = cls(
                hopper_unsupported_reason(device)
                if device.type == "cuda"
                else f"Hopper kernels need CUDA, not {device.type}"
            )
        found = transport.tables["hopper"]
        assert isinstance(found, cls)
        return found

    @staticmethod
    def reasons(transport: SymmetricTransport) -> dict[str, int]:
        """Return `not_used` of `transport`; empty if no plan requested Hopper kernels."""
        found = transport.tables.get("hopper")
        return {} if found is None else dict(found.not_used)

    def gathering(self, a: torch.Tensor, b: torch.Tensor, config: Any, out: torch.Tensor) -> tuple[Any, Any] | None:
        """Return `ag_gemm` and its tile shape; None selects the portable kernel, whose tile shape is `config`."""
        return self._chosen(a, b, config, out, _ag_gemm)

    def scattering(self, a: torch.Tensor, b: torch.Tensor, config: Any) -> tuple[Any, Any] | None:
        """Return `gemm_to_owners` and its tile shape; None selects the portable kernel."""
        return self._chosen(a, b, config, None, _gemm_to_owners)

    def _chosen(
        self, a: torch.Tensor, b: torch.Tensor, config: Any, out: torch.Tensor | None, launcher: Callable[[], Any]
    ) -> tuple[Any, Any] | None:
        reason = self.unsupported_reason
        if not reason:
            from megatron_overlap.kernels.configs import HOPPER, HOPPER_SMALL
            from megatron_overlap.kernels.hopper.operands import unsupported_reason

            # The output tiles of the portable kernel with another depth, number of stages and number of warps.
            hopper_config = HOPPER_SMALL if config.block_n <= HOPPER_SMALL.block_n else HOPPER
            hopper_config = replace(hopper_config, group=config.group)
            reason = unsupported_reason(a, b, hopper_config, out)
            if not reason:
                return launcher(), hopper_config
        self.not_used[reason] += 1
        return None


def _ag_gemm() -> Any:
    from megatron_overlap.kernels.hopper.ag_gemm import ag_gemm

    return ag_gemm


def _gemm_to_owners() -> Any:
    from megatron_overlap.kernels.hopper.gemm_rs import gemm_to_owners

    return gemm_to_owners
