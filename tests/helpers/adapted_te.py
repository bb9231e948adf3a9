"""The imports of every worker of `World(te=True)`: as `adapted`, with TransformerEngine."""

import sys

from megatron_overlap.config.resources import transformer_engine_folder

sys.path.append(str(transformer_engine_folder()))

from tests.helpers import adapted  # noqa: F401
