"""The imports of every worker of `World(adapted=True)`: Megatron, after the CPU patches, as in a run."""

from megatron_overlap.adapters import cpu

cpu.install()

import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402
import megatron.training.arguments  # noqa: E402, F401

from megatron_overlap.patching.engine import Engine  # noqa: E402
from megatron_overlap.patching.manifest import load_manifests  # noqa: E402

# Reads and digests the sources that the patches of a session rely on, once for all workers.
Engine(load_manifests()).plan(
    {"tensor", "attention", "split", "data", "ulysses", "expert", "consistency", "bucket_order"}
)
