"""The base class of all sections, the value types of their keys, and validation with one-line errors."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from megatron_overlap.config.errors import ConfigError, did_you_mean
from megatron_overlap.config.merge import Composed

# File systems allow 255 bytes; a date, a rank and a suffix follow.
_LONGEST_NAME, _LONGEST_PATH = 200, 1000

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
PositiveFraction = Annotated[float, Field(gt=0, lt=1)]


def _not_blank(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("remedy", "write a non-empty text, or null")
    return text


def _is_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
        raise PydanticCustomError("remedy", "use letters, digits, dots, dashes and underscores: it names a folder")
    return _is_folder(text)


def _is_folder(text: str) -> str:
    if "\0" in text or len(text.encode()) > _LONGEST_PATH or max(map(len, text.encode().split(b"/"))) > _LONGEST_NAME:
        raise PydanticCustomError("remedy", f"use {_LONGEST_NAME} bytes at most, and no NUL: it names a folder")
    return _not_blank(text)


Text = Annotated[str, AfterValidator(_not_blank)]
Name = Annotated[str, AfterValidator(_is_name)]
Folder = Annotated[str, AfterValidator(_is_folder)]


class Section(BaseModel):
    """Base class of all sections: frozen, without unknown keys, and strict: `"8"` and `true` are not numbers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


Schema = Mapping[str, Any]

TYPES = {
    "string": "a text",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "array": "a list of texts",
    "object": "a mapping of keys",
    "null": "null",
}
LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def validate[Model: BaseModel](model: type[Model], composed: Composed, section: str = "") -> Model:
    """Validate a merged config, or one section of it.

    Raises ConfigError, which names the file, if a key or a value is wrong.
    """
    tree: Any = composed.tree.get(section) if section else composed.tree
    try:
        return model.model_validate({} if section and tree is None else tree)
    except ValidationError as error:
        # A misspelt key also causes the error of a missing key: report the unknown key.
        first = min(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
        raise _explain(model, first, composed, section) from error


def _explain(model: type[BaseModel], error: ErrorDetails, composed: Composed, section: str) -> ConfigError:
    """One ConfigError for one validation error of `section` (empty: the whole config), which `model` validated."""
    root = model.model_json_schema()
    path, schema = _follow(root, error["loc"])
    keys, value = [section, *path] if section else path, error["input"]
    if error["type"] == "problem":
        context = error["ctx"]
        keys, value, remedy = [*keys, str(context["key"])], context["value"], str(context["remedy"])
    elif error["type"] == "extra_forbidden":
        known = list(_follow(root, error["loc"][:-1])[1].get("properties", {}))
        remedy = did_you_mean(path[-1], known if keys[1:] else [*known, "base"])
    elif error["type"] == "remedy":
        remedy = error["msg"]
    elif error["type"] == "missing":
        hint = ", or name a model.preset" if path[0] == "model" and len(path) > 1 else ""
        value, remedy = None, f"missing; {expected(schema)}{hint}"
    else:
        remedy = expected(schema)
    key = ".".join(keys) or "(file)"
    return ConfigError(composed.source_of(key), key, value, remedy)


def expected(schema: Schema) -> str:
    """The accepted values of a key, as the remedy of an error."""
    if "properties" in schema:
        return f"give a section with keys such as {', '.join(list(schema['properties'])[:3])}"
    *others, last = [word for option in schema.get("anyOf", [schema]) for word in _choices(option)]
    return f"use {', '.join(others)} or {last}" if others else f"use {last}"


def _choices(option: Schema) -> list[str]:
    if "enum" in option or "const" in option:
        return [str(value) for value in option.get("enum", [option.get("const")])]
    kind = TYPES.get(str(option.get("type")), "a value of its type")
    limits = " and ".join(f"{sign} {option[name]:g}" for name, sign in LIMITS.items() if name in option)
    return [f"{kind} {limits}".strip()]


def _follow(root: Schema, loc: Sequence[str | int]) -> tuple[list[str], Schema]:
    """The key path of an error location without the union branches that pydantic adds, and its JSON Schema."""
    path: list[str] = []
    schema = _target(root, root)
    for part in loc:
        below = schema.get("items") if isinstance(part, int) else schema.get("properties", {}).get(part)
        if below is None and "properties" not in schema:
            break
        path.append(str(part))
        if below is None:  # an unknown key of a section
            return path, {}
        schema = _target(below, root)
    return path, schema


def _target(schema: Schema, root: Schema) -> Schema:
    """The schema with its reference resolved, also of `X | null`."""
    for option in [schema, *schema.get("anyOf", [])]:
        if "$ref" in option:
            found = root["$defs"][option["$ref"].rsplit("/", 1)[-1]]
            assert isinstance(found, dict)
            return found
    return schema
