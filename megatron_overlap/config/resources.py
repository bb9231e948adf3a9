"""Package resources: folders beside the package in a checkout and inside it in a wheel."""

import importlib.util
import os
from pathlib import Path

from megatron_overlap.config.errors import nearest, usage_error

_PACKAGE = Path(__file__).resolve().parents[1]

TE_MISSING = (
    "TransformerEngine is not installed: run `bash scripts/setup.sh te` in a checkout, or name a folder that has the "
    "package in MEGATRON_OVERLAP_TE; or use local layers"
)


def resource_folder(folder: str) -> Path:
    """Path of `patches`, `configs` or `scripts`: in the wheel, or else in the checkout."""
    inside = _PACKAGE / f"_{folder}"
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def transformer_engine_folder() -> Path | None:
    """Folder with TransformerEngine's Python for ranks without a GPU; None where it is not installed.

    `scripts/setup.sh` fills `.transformer_engine` of the checkout; MEGATRON_OVERLAP_TE names another folder. Megatron
    would import it from the environment itself, where it raises without a GPU.
    """
    folder = Path(os.environ.get("MEGATRON_OVERLAP_TE") or _PACKAGE.parent / ".transformer_engine")
    return folder if (folder / "transformer_engine").is_dir() else None


def shipped_config(name: str) -> Path | None:
    """File of a name such as `gpu/llama3_8b_tp8/overlap`, with or without `configs/` and `.yaml`; None: no file."""
    file = resource_folder("configs") / f"{name.removeprefix('configs/').removesuffix('.yaml')}.yaml"
    return file if file.is_file() else None


def transformer_engine_available() -> bool:
    """Whether ranks without a GPU find TransformerEngine: in the environment or in its folder."""
    return importlib.util.find_spec("transformer_engine") is not None or transformer_engine_folder() is not None


def config_file(given: str | Path) -> Path:
    """The given file, or the shipped config of that name. Raises ConfigError if neither exists."""
    path, shipped = Path(given), shipped_config(str(given))
    if path.exists() and not path.is_dir():
        return path
    if shipped is not None:
        return shipped
    folder = resource_folder("configs")
    files = (file for device in ("cpu", "gpu") for file in sorted((folder / device).rglob("*.yaml")))
    close = nearest(str(given), [str(file.relative_to(folder).with_suffix("")) for file in files])
    remedy = f"did you mean {close}?" if close is not None else "or a name such as gpu/llama3_8b_tp8/overlap"
    raise usage_error("CONFIG", str(given), f"no such file or shipped config; give a YAML file, {remedy}")
