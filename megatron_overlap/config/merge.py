"""Merge YAML files and `key=value` overrides, with the source of every key.

OmegaConf reads the files with a safe loader, and interpolations are refused: reading a config runs no code and does not
read the environment.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_overlap.config.errors import ConfigError
from megatron_overlap.config.resources import shipped_config

Tree = dict[str, Any]
SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml, if present, as in OmegaConf: it accepts tabs, and is ten times faster."""

_OTHER_BASE = re.compile(r"[-+]?(0[0-7_]+|[1-9][\d_]*(:[0-5]?\d)+|\d[\d_]*(:[0-5]?\d)+\.[\d_]*)")
"""Numbers with a leading zero or a colon, which YAML reads in base 8 and 60."""

_QUOTE = "YAML reads this as a number in base 8 or 60; put it in quotes, or write it without the zero or the colon"
MAPPING = "a config is a mapping; start with a key such as `model:`"


@dataclass(frozen=True)
class Layer:
    """The keys and values of one file or of one override. `source` is the file name in errors."""

    source: str
    tree: Tree


@dataclass(frozen=True)
class Composed:
    """A merged config before validation: the requested file, the merged tree, and its layers, first to last."""

    file: str
    tree: Tree
    layers: tuple[Layer, ...]

    def source_of(self, key: str) -> str:
        """The last file or override that sets `key`; the requested file if none does."""
        for layer in reversed(self.layers):
            if _holds(layer.tree, key.split(".")):
                return layer.source
        return self.file


def _holds(node: object, parts: Sequence[str]) -> bool:
    for part in parts:
        if not isinstance(node, Mapping) or part not in node:
            return isinstance(node, list)
        node = node[part]
    return True


def compose(path: str | Path, overrides: Sequence[str] = (), sections: Sequence[str] = ()) -> Composed:
    """Read a file with all its bases and apply the overrides.

    Overrides are `key=value` texts; the value is YAML, and `*` in a key stands for each of `sections`. Raises
    ConfigError if a file is unreadable, is not a mapping or includes itself, or an override is wrong.
    """
    file = str(path)
    layers = list(_read_layers(Path(path), None, ()))
    for text in overrides:
        layers += _parse_override(f"{file} (override)", text, sections)
    tree: Tree = {}
    for layer in layers:
        for key, value in leaves(layer.tree):
            if isinstance(value, str) and ("${" in value or value == "???"):
                raise ConfigError(layer.source, key, value, "configs take no interpolations; write the value")
        tree = _merged(tree, layer.tree)
    return Composed(file, tree, tuple(layers))


def _merged(below: Any, above: Any) -> Any:
    """Mappings are merged key by key; any other value replaces the one below it."""
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}
    return above


def leaves(node: object, key: str = "") -> Iterator[tuple[str, object]]:
    """The values below `key` that are neither mappings nor lists, with their dotted keys."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from leaves(value, f"{key}.{index}")
    else:
        yield key, node


def _read_layers(path: Path, named_in: str | None, above: tuple[Path, ...]) -> Iterator[Layer]:
    """The layers of the bases of a file, then of the file, without `base` keys."""
    tree = _read(path, named_in)
    where = path.resolve()
    if where in above:
        chain = " -> ".join(item.name for item in (*above, where))
        raise ConfigError(named_in or str(path), "base", path.name, f"a file cannot include itself ({chain})")
    bases = tree.pop("base", None)
    listed = [] if bases is None else [bases] if isinstance(bases, str) else bases
    if not isinstance(listed, list) or not all(isinstance(item, str) and item for item in listed):
        raise ConfigError(str(path), "base", bases, "give one file name or a list of them")
    for item in listed:
        beside = path.parent / item
        shipped = None if beside.exists() else shipped_config(item)
        yield from _read_layers(shipped or beside, str(path), (*above, where))
    yield Layer(str(path), tree)


def _read(path: Path, named_in: str | None) -> Tree:
    file, key, value = (str(path), "(file)", str(path)) if named_in is None else (named_in, "base", str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(file, key, value, "no such file; give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(file, key, value, "is not UTF-8 text; give a YAML file") from error
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise ConfigError(file, key, value, f"cannot be read ({reason}); give a readable YAML file") from error
    except ValueError as error:  # a NUL in the path
        raise ConfigError(file, key, value, "is not a file name; give the path of a YAML file") from error
    return _parse(str(path), text)


def _parse(file: str, text: str) -> Tree:
    try:
        loaded, others = OmegaConf.load(StringIO(text)), _in_other_base(text)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or "cannot be parsed"
        if mark is None:
            raise ConfigError(file, "(file)", str(error), "is not valid YAML; correct it") from error
        shown = "".join(text.splitlines()[mark.line : mark.line + 1]).strip()
        remedy = f"is not valid YAML ({problem}); correct it, or the line above"
        raise ConfigError(file, f"line {mark.line + 1}", shown, remedy) from error
    except OSError as error:  # OmegaConf raises it for a file with one scalar
        raise ConfigError(file, "(file)", text, MAPPING) from error
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(file, "(file)", str(error), "write nested keys with plain values") from error
    for line, shown in others:
        raise ConfigError(file, f"line {line}", shown, _QUOTE)
    tree = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(tree, dict):
        raise ConfigError(file, "(file)", text, MAPPING)
    for key, value in tree.items():
        if not isinstance(key, str):
            raise ConfigError(file, str(key), value, "keys are names; quote or rename this key")
    return {str(key): value for key, value in tree.items()}


def _in_other_base(text: str) -> list[tuple[int, str]]:
    """The line and text of the plain values that YAML reads as numbers in another base than 10.

    Raises `yaml.YAMLError` if the parser of OmegaConf accepts more, as libyaml accepts tabs.
    """
    return [
        (event.start_mark.line + 1, event.value)
        for event in yaml.parse(text, SafeLoader)
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and _OTHER_BASE.fullmatch(event.value)
        if event.start_mark is not None
    ]


def _parse_override(source: str, text: str, sections: Sequence[str]) -> Iterator[Layer]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals:
        raise ConfigError(source, key or "(empty)", text, "write an override as key=value")
    if not key or any(not part for part in key.split(".")):
        raise ConfigError(source, key or "(empty)", text, "name the key with dots, as train.lr=0.001")
    if key == "base" or key.startswith("base."):
        raise ConfigError(source, key, value, "overrides cannot set base; set it in a file")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)
        others = _in_other_base(value)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(source, key, value, "is not a valid YAML value; quote it") from error
    for _, shown in others:
        raise ConfigError(source, key, shown, _QUOTE)
    assert isinstance(parsed, dict)
    for name in sections if ".*." in key else ("",):
        tree: Any = parsed.get("value")
        for part in reversed(key.replace("*", name).split(".")):
            tree = {part: tree}
        yield Layer(source, tree)
