"""The forms a model is kept in, and the versions of what is made from downloads.

Raise a version when the content it stands for changes: what is in the cache is then made anew.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

Bits: TypeAlias = Literal["int8", "int4"]
Form: TypeAlias = Literal["float32", "int8", "int4"]

CONVERTER_VERSION = 1
"""Of the folder made from a GGUF file."""

QUANTISED_VERSION: dict[Bits, int] = {"int8": 2, "int4": 1}
"""Of the files of quantised weights."""


def file_name(bits: Bits) -> str:
    """The file in a model's folder that holds its weights in this form."""
    return f"{bits}.safetensors"
