"""Versions of what is made from downloads and kept in the cache.

Raise one when the content it stands for changes: what is in the cache is then made anew.
"""

CONVERTER_VERSION = 1
"""Of the folder made from a GGUF file."""

INT8_VERSION = 2
"""Of the file of 8-bit weights."""
