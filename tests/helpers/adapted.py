"""What every worker of `World(adapted=True)` has imported: Megatron, after the CPU adapter, as in a run."""

from megatron_overlap.adapters import cpu

cpu.install()

import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402
import megatron.training.arguments  # noqa: E402, F401

from megatron_overlap.patching.engine import Engine  # noqa: E402
from megatron_overlap.patching.manifest import load_manifests  # noqa: E402

# The sources that the patches rely on, read and digested: they do not change between workers.
Engine(load_manifests()).plan()
