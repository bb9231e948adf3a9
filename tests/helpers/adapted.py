"""The imports of every worker of `World(adapted=True)`: Megatron, after the CPU patches, as in a run."""

import sys

from megatron_overlap.adapters import cpu

cpu.install()

import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402
import megatron.training.arguments  # noqa: E402, F401

from megatron_overlap.patching import engine, planning  # noqa: E402
from megatron_overlap.patching.manifest import load_manifests  # noqa: E402
from megatron_overlap.patching.planning import Binding, bindings_of  # noqa: E402


class _Searches:
    """The searches of the process for attributes that hold an object, each repeated only after an import.

    A search reads 50,000 attributes, and each of hundreds of sessions in a worker needs three. An attribute that is not
    listed gets an original or a replacement by value when its module is imported. `tests/patching` searches always.
    """

    def __init__(self) -> None:
        self._num_modules: int | None = None
        """At the first plan after the last revert."""
        self._known: dict[tuple[int, ...], tuple[tuple[object, ...], list[list[Binding]]]] = {}

    def of_originals(self, *objects: object) -> list[list[Binding]]:
        if self._num_modules is None:
            self._num_modules = len(sys.modules)
        key = (len(sys.modules), *map(id, objects))
        if key not in self._known:
            self._known[key] = objects, bindings_of(*objects)  # holds the objects, so that no id is used again
        return self._known[key][1]

    def of_replacements(self, *objects: object) -> list[list[Binding]]:
        imported = self._num_modules != len(sys.modules)
        self._num_modules = None
        return bindings_of(*objects) if imported else [[] for _ in objects]


_searches = _Searches()
planning.bindings_of, engine.bindings_of = _searches.of_originals, _searches.of_replacements

# Reads and digests the sources that the patches of a session rely on, once for all workers.
engine.Engine(load_manifests()).plan(
    {"tensor", "attention", "split", "data", "ulysses", "expert", "consistency", "bucket_order"}
)
