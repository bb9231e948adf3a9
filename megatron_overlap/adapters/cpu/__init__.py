"""Lets Megatron-LM run on a machine with no GPU: CPU tensors, gloo, one process per rank.

``TORCH`` and ``MEGATRON`` are the whole list of what is replaced, each entry with its reason. Nothing here is
imported, and nothing replaced, on a machine that trains on CUDA.
"""

import logging
import sys

from megatron_overlap.adapters.cpu.megatron_patches import MEGATRON, RNG_LOGGER, QuietRngWarning
from megatron_overlap.adapters.cpu.patcher import Adaptation, Applied
from megatron_overlap.adapters.cpu.torch_patches import TORCH

__all__ = ["MEGATRON", "TORCH", "Adaptation", "CpuMegatron", "install"]


class CpuMegatron:
    """The adaptations in place; ``uninstall`` puts every original back."""

    def __init__(self) -> None:
        self._applied = Applied()
        self._filter = QuietRngWarning()

    def _install(self) -> None:
        try:
            self._applied.apply(TORCH)
            # Imported by resolving the targets, hence after torch is adapted: Megatron's modules keep
            # `torch.compile`, the tensor type names and `_lazy_call` by value.
            self._applied.apply(MEGATRON)
        except BaseException:
            self._applied.revert()
            raise
        logging.getLogger(RNG_LOGGER).addFilter(self._filter)

    def uninstall(self) -> None:
        """Puts every original back. Modules of Megatron imported meanwhile keep what they took by value."""
        logging.getLogger(RNG_LOGGER).removeFilter(self._filter)
        self._applied.revert()


def install() -> CpuMegatron:
    """Adapts torch, then Megatron, for a run without a GPU.

    Raises:
        RuntimeError: Megatron was imported before: some of its modules have already taken what must be replaced.
        ModuleNotFoundError: megatron-core is not installed.
    """
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core is imported already: adapters.cpu.install() must come before it")
    adapter = CpuMegatron()
    adapter._install()
    return adapter
