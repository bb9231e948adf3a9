"""Runs Megatron-LM on a machine without a GPU: CPU tensors, gloo, one process per rank.

The patches are in `patches/cpu/`, each with its reason. Where TransformerEngine is installed, `te_module` takes the
place of its native module.
"""

import importlib.util
import logging
import sys
from collections.abc import Collection
from pathlib import Path

from megatron_overlap.adapters.cpu import paged_attention, te_module
from megatron_overlap.config.errors import usage_error
from megatron_overlap.config.resources import TE_MISSING, transformer_engine_folder
from megatron_overlap.patching import PatchRefusedError
from megatron_overlap.patching.engine import Engine
from megatron_overlap.patching.manifest import Permit, load_manifests, load_permits

TORCH = "cpu_torch"
"""The feature of the patches of torch."""


def adapt(left_out: Collection[Permit] = ()) -> Engine:
    """Adapts torch, then Megatron, to the CPU, without `left_out`; returns the engine that can revert the patches.

    After a revert, modules of Megatron that were imported keep what they stored by value, and TransformerEngine keeps
    the CPU kernels. Raises PatchRefusedError if a patch is refused; nothing is changed then.
    """
    targets = {target for permit in left_out for target in permit.targets}
    names = {permit.name for permit in left_out}
    engine = Engine(each for each in load_manifests() if each.feature.startswith("cpu_") and each.target not in targets)
    try:
        _apply(engine, TORCH)
        if "te_kernels" not in names and importlib.util.find_spec("transformer_engine") is not None:
            te_module.install()  # Megatron imports TransformerEngine where it is installed.
        if "generation" not in names and importlib.util.find_spec(paged_attention.MODULE) is None:
            paged_attention.install()
        # Planning imports Megatron. Its modules store `torch.compile`, the tensor types and `_lazy_call` by value,
        # so torch is patched before.
        _apply(engine, "cpu_megatron")
        # The wheel of 0.16 lacks `megatron.training`. A `megatron.training` in another folder of the namespace package
        # `megatron` belongs to another release.
        specs = (importlib.util.find_spec(f"megatron.{name}") for name in ("core", "training"))
        folders = [Path(spec.origin).parents[1] for spec in specs if spec is not None and spec.origin is not None]
        if len(folders) == 2 and folders[0] == folders[1]:
            _apply(engine, "cpu_training")
    except BaseException:
        engine.revert()
        raise
    # Megatron's RNG tracker warns when the state of the CPU generator changes while a CUDA generator is in use. Here
    # they are the same generator, so that its state always changes.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed within GPU RNG context" not in record.getMessage()
    )
    return engine


def _apply(engine: Engine, feature: str) -> None:
    plan = engine.plan({feature})
    if plan.refused:
        raise PatchRefusedError("; ".join(f"{each.manifest.target}: {each.reason}" for each in plan.refused))
    engine.apply(plan, None)


def install(*, te_layers: bool = False, rehearsal: bool = False) -> Engine:
    """Finds TransformerEngine for `te_layers`, installed or in its folder, and calls `adapt`.

    A rehearsal refuses what a GPU machine refuses: it leaves out the entries of `load_permits` with a remedy.

    Raises ConfigError if there is no TransformerEngine, and RuntimeError if Megatron or TransformerEngine was imported
    before: they store originals of torch by value.
    """
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core is imported already: adapters.cpu.install() must come before it")
    if te_layers and importlib.util.find_spec("transformer_engine") is None:
        folder = transformer_engine_folder()
        if folder is None:
            raise usage_error("--transformer-impl", "transformer_engine", TE_MISSING)
        sys.path.append(str(folder))
    return adapt([permit for permit in load_permits() if permit.remedy] if rehearsal else ())
