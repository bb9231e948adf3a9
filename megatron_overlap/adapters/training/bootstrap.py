"""What a Megatron-Core wheel lacks of a source checkout."""

import importlib.util
from pathlib import Path
from typing import Any


def missing_module() -> str | None:
    """The module of Megatron's training loop that is not installed; None where all of it is there.

    Raises:
        ModuleNotFoundError: something that is not Megatron's is missing.
    """
    try:
        import megatron.training  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "megatron":
            raise
        return error.name
    return None


def use_compiled_helpers() -> None:
    """Keeps Megatron from running `make` where the wheel has the compiled helpers and no Makefile.

    Megatron compiles its dataset helpers at every start. A wheel carries them compiled, without the Makefile, and
    `make` failing ends the run. In a source checkout nothing is changed.
    """
    from megatron.core.datasets import utils

    compiled = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    makefile = Path(utils.__file__).with_name("Makefile")
    if compiled and not makefile.exists():
        utils.compile_helpers = _already_compiled


def _already_compiled(*_: Any, **__: Any) -> None:
    pass
