"""What form a request wants its text to have, in vLLM's words."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from draftwood.errors import ConfigError

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of a text: exactly one of json, json_object, regex, choice and grammar.

    Attributes:
        json: a JSON schema, as a mapping, as text, or as a pydantic model (kept as text); True for
            any JSON object.
        json_object: True for any JSON object.
        regex: a regular expression that the whole text matches; no look-around, no back-references.
        choice: the text is one of these strings.
        grammar: a context-free grammar in Lark's notation; its start rule is `start`.
        disable_any_whitespace: JSON without white space between its parts.
        whitespace_pattern: JSON with white space that matches this regular expression.

    Raises:
        ConfigError: none or several kinds are given, or one cannot be right.
    """

    json: str | bool | Mapping[str, Any] | type | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ConfigError(
                f"structured has {' and '.join(given) or 'no kind of form'}: "
                f"give exactly one of {', '.join(_KINDS)}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ConfigError(f"structured {name} is {value!r}: it must be a non-empty string")
        self._check_whitespace()

    def _check_whitespace(self) -> None:
        pattern = self.whitespace_pattern
        if not (self.disable_any_whitespace or pattern is not None):
            return
        if self.schema is None:
            raise ConfigError("structured names white space: that is for json and json_object only")
        if self.disable_any_whitespace and pattern is not None:
            raise ConfigError(
                "structured has disable_any_whitespace and whitespace_pattern: give one of them"
            )
        if pattern is not None and not isinstance(pattern, str):
            raise ConfigError(f"structured whitespace_pattern is {pattern!r}: it must be a string")

    @property
    def schema(self) -> str | None:
        """The JSON schema as text; None for the other kinds."""
        if self.json_object or self.json is True:
            return _ANY_OBJECT
        return self.json if isinstance(self.json, str) else None

    @classmethod
    def of(cls, value: StructuredOutputsParams | Mapping[str, Any]) -> StructuredOutputsParams:
        """`value` itself, or made of a mapping; unknown keys are an error."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"structured is {value!r}: give StructuredOutputsParams or a mapping of its fields"
            )
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(map(str, value)) - set(known))
        if unknown:
            raise ConfigError(
                f"unknown field of structured: {unknown[0]!r}; known are {', '.join(known)}"
            )
        return cls(**value)


def _schema(value: object) -> str | bool:
    """A schema as JSON text, or True for any object."""
    if value is True:
        return True
    model_schema = getattr(value, "model_json_schema", None)
    if model_schema is not None:
        value = model_schema()
    if not isinstance(value, str | Mapping):
        raise ConfigError(
            f"structured json is {value!r}: give a JSON schema as a mapping, as text or as a "
            "pydantic model, or True"
        )
    try:
        text = value if isinstance(value, str) else jsonlib.dumps(dict(value))
        schema = jsonlib.loads(text)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"structured json is not valid JSON ({error})") from error
    if schema is False or not isinstance(schema, dict | bool):
        raise ConfigError(f"structured json is {text!r}: a schema that allows a text is an object")
    return "{}" if schema is True else text


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"structured choice is {value!r}: it must be a list of strings")
    choices = tuple(value)
    if not choices or not all(isinstance(one, str) and one for one in choices):
        raise ConfigError(
            f"structured choice is {list(choices)!r}: it must be a list of non-empty strings"
        )
    return choices
