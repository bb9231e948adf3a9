"""TransformerEngine for tests: its Python runs on CPU ranks, with the kernels of `adapters/cpu/te_kernels.py`."""

import pytest

from megatron_overlap.config.resources import transformer_engine_folder

TE_FOLDER = transformer_engine_folder()

needs_te = pytest.mark.skipif(
    TE_FOLDER is None, reason="TransformerEngine is not in .transformer_engine: run scripts/setup.sh with a network"
)
