"""The imports of every worker of `World(interpreted=True)`: Triton, which reads the switch at its import."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import tests.helpers.world  # noqa: F401
