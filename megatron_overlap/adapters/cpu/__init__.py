"""Runs Megatron-LM on a machine without a GPU: CPU tensors, gloo, one process per rank.

The patches are in `patches/cpu/`, each with its reason. Nothing is replaced on a machine that trains on CUDA. Where
TransformerEngine is installed, `te_module` takes the place of its native module.
"""

import importlib.util
import logging
import sys
from collections.abc import Collection
from pathlib import Path

from megatron_overlap.adapters.cpu import paged_attention, te_module
from megatron_overlap.adapters.cpu.patches import RNG_LOGGER, QuietRngWarning
from megatron_overlap.config.resources import TE_MISSING, transformer_engine_folder
from megatron_overlap.patching import PatchRefusedError
from megatron_overlap.patching.engine import Engine
from megatron_overlap.patching.manifest import Permit, load_manifests, load_permits

TORCH, MEGATRON, TRAINING = "cpu_torch", "cpu_megatron", "cpu_training"
"""The features of the patches."""

TE_KERNELS, GENERATION = "te_kernels", "generation"
"""The entries of `load_permits` for `te_module` and `paged_attention`, which stand in for missing modules."""


class CpuMegatron:
    """The patches that adapt torch and Megatron to the CPU.

    Args:
        left_out: entries of `load_permits` that are not installed.
    """

    def __init__(self, left_out: Collection[Permit] = ()) -> None:
        targets = {target for permit in left_out for target in permit.targets}
        ours = [each for each in load_manifests() if each.feature.startswith("cpu_") and each.target not in targets]
        self.engine = Engine(ours)
        names = {permit.name for permit in left_out}
        self._te_kernels, self._generation = TE_KERNELS not in names, GENERATION not in names
        self._filter = QuietRngWarning()

    def install(self) -> None:
        """Applies the patches.

        Raises:
            PatchRefusedError: a patch is refused; nothing is changed then.
        """
        try:
            self._apply(TORCH)
            if self._te_kernels and importlib.util.find_spec("transformer_engine") is not None:
                te_module.install()  # Megatron imports TransformerEngine where it is installed.
            if self._generation and importlib.util.find_spec(paged_attention.MODULE) is None:
                paged_attention.install()
            # Planning imports Megatron. Its modules store `torch.compile`, the tensor types and `_lazy_call` by value,
            # so torch is patched before.
            self._apply(MEGATRON)
            if _has_training_loop():
                self._apply(TRAINING)
        except BaseException:
            self.engine.revert()
            raise
        logging.getLogger(RNG_LOGGER).addFilter(self._filter)

    def uninstall(self) -> None:
        """Restores every original. Modules of Megatron that were imported meanwhile keep what they stored by value.

        TransformerEngine, if it was imported, keeps the CPU kernels.
        """
        logging.getLogger(RNG_LOGGER).removeFilter(self._filter)
        self.engine.revert()

    def _apply(self, feature: str) -> None:
        plan = self.engine.plan({feature})
        if plan.refused:
            raise PatchRefusedError("; ".join(f"{each.manifest.target}: {each.reason}" for each in plan.refused))
        self.engine.apply(plan, None)


def _has_training_loop() -> bool:
    """Whether the release of megatron-core has `megatron.training`, which the wheel of 0.16 lacks.

    `megatron` is a namespace package: a `megatron.training` in another folder belongs to another release.
    """
    core, loop = (importlib.util.find_spec(f"megatron.{name}") for name in ("core", "training"))
    if core is None or loop is None or core.origin is None or loop.origin is None:
        return False
    return Path(core.origin).parents[1] == Path(loop.origin).parents[1]


def install(*, te_layers: bool = False, rehearsal: bool = False) -> CpuMegatron:
    """Adapts torch, then Megatron, to a machine without a GPU.

    Args:
        te_layers: the run builds TransformerEngine layers: TransformerEngine is taken from its folder where it is not
            installed.
        rehearsal: refuse what a GPU machine refuses: leave out the entries of `load_permits` with a remedy.

    Raises:
        ModuleNotFoundError: `te_layers`, and TransformerEngine is neither installed nor in its folder.
        RuntimeError: Megatron or TransformerEngine was imported before: they store originals of torch by value.
        PatchRefusedError: a patch is refused, or megatron-core is not installed.
    """
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core is imported already: adapters.cpu.install() must come before it")
    if te_layers and importlib.util.find_spec("transformer_engine") is None:
        folder = transformer_engine_folder()
        if folder is None:
            raise ModuleNotFoundError(f"--transformer-impl transformer_engine: {TE_MISSING}", name="transformer_engine")
        sys.path.append(str(folder))
    adapter = CpuMegatron([permit for permit in load_permits() if permit.remedy] if rehearsal else ())
    adapter.install()
    return adapter
