"""Package resources: folders beside the package in a checkout and inside it in a wheel."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_overlap.config.errors import ConfigError, nearest

_PACKAGE = Path(__file__).resolve().parents[1]


def resource_folder(folder: str) -> Path:
    """Path of `patches`, `configs` or `scripts`: in the wheel, or else in the checkout."""
    inside = _PACKAGE / f"_{folder}"
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def transformer_engine_folder() -> Path | None:
    """Folder with TransformerEngine's Python for ranks without a GPU; None where it is not installed.

    `scripts/setup.sh` fills `.transformer_engine` of the checkout; MEGATRON_OVERLAP_TE names another folder. The
    package must not be in the environment itself: without a GPU it raises at import, and Megatron imports it there.
    """
    folder = Path(os.environ.get("MEGATRON_OVERLAP_TE") or _PACKAGE.parent / ".transformer_engine")
    return folder if (folder / "transformer_engine").is_dir() else None


def config_file(given: str | Path) -> Path:
    """The given file, or the shipped config of that name.

    Raises:
        ConfigError: there is neither a file nor a shipped config of this name.
    """
    path = Path(given)
    if path.exists() or path.suffix in (".yaml", ".yml") or path.name != str(given):
        return path
    shipped = resource_folder("configs") / f"{path.name}.yaml"
    if shipped.is_file():
        return shipped
    names = sorted(file.stem for file in resource_folder("configs").glob("*.yaml"))
    close = nearest(path.name, names)
    remedy = f"did you mean {close}?" if close is not None else f"or one of {', '.join(names)}"
    raise ConfigError(
        "command line", "CONFIG", path.name, f"no such file or shipped config; give a YAML file, {remedy}"
    )
