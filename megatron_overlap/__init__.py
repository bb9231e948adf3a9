"""Hides Megatron-LM's communication behind its computation.

    import megatron_overlap as mo

    with mo.enable(mo.OverlapConfig.from_yaml("overlap.yaml")) as session:
        ...  # build the model and train, unmodified
        print(session.report().render())

Importing this package imports neither torch nor megatron; `enable` does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_overlap.config import ConfigError as ConfigError
    from megatron_overlap.config import OverlapConfig as OverlapConfig
    from megatron_overlap.counters import FallbackError as FallbackError
    from megatron_overlap.patching import PatchError as PatchError
    from megatron_overlap.session import Session as Session
    from megatron_overlap.session import disable as disable
    from megatron_overlap.session import enable as enable
    from megatron_overlap.session import report as report
    from megatron_overlap.session_report import Report as Report
    from megatron_overlap.version import __version__ as __version__

_MODULES = {
    **dict.fromkeys(("ConfigError", "OverlapConfig"), "config"),
    **dict.fromkeys(("Session", "disable", "enable", "report"), "session"),
    "FallbackError": "counters",
    "PatchError": "patching",
    "Report": "session_report",
    "__version__": "version",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
