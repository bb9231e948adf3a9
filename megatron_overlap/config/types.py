"""Base class of all sections (frozen, strict, no unknown keys) and the value types of their keys."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

# File systems allow 255 bytes; a date, a rank and a suffix follow.
_LONGEST_NAME, _LONGEST_PATH = 200, 1000

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


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
    """Base class of all sections."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
