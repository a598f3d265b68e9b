"""Groups of options that several commands share, each written once.

A command names a group as a parameter, and `flat` gives it the group's options on the command line:

    @flat
    def chat(model: opt.ModelName, loading: Loading, picking: Picking) -> None: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from draftwood.cli import options as opt
from draftwood.errors import ConfigError

if TYPE_CHECKING:
    from draftwood.sampling import SamplingParams


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that are dataclasses are replaced by their fields.

    Typer then makes an option of each field, and the command gets the dataclasses made of them.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for own in inspect.signature(command).parameters.values():
        parameters += (
            _parameters(groups[own.name]) if own.name in groups else [_keyword(own, hints)]
        )

    @wraps(command)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})  # type: ignore[operator]
        command(**values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    return call


def _keyword(own: inspect.Parameter, hints: dict[str, Any]) -> inspect.Parameter:
    return own.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[own.name])


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(f.name, kind, default=_default(f), annotation=hints[f.name])
        for f in fields(group)
    ]


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What goes into `options.ModelOptions` besides the model's name."""

    draft: opt.Draft = None
    draft_match: opt.DraftMatch = "auto"
    draft_quantization: opt.DraftQuantization = None
    drafter: opt.Drafter = None
    no_speculation: opt.NoSpeculation = False
    tree_nodes: opt.TreeNodes = 32
    device: opt.Device = None
    dtype: opt.DType = None
    quantization: opt.Quantization = None
    max_model_len: opt.MaxModelLen = None
    kv_memory: opt.KVMemory = None
    kv_disk: opt.KVDisk = None
    kv_redis: opt.KVRedis = None
    kv_compression: opt.KVCompression = "none"

    def of(self, model: str, **more: Any) -> opt.ModelOptions:
        """With the model's name and what else a command has.

        Raises:
            ModelError, ConfigError: see `ModelOptions`.
        """
        return opt.ModelOptions(model=model, **asdict(self), **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picking:
    """How tokens are picked, and where the text ends."""

    max_tokens: opt.MaxTokens = None
    temperature: opt.Temperature = 0.0
    top_k: opt.TopK = 0
    top_p: opt.TopP = 1.0
    min_p: opt.MinP = 0.0
    repetition_penalty: opt.RepetitionPenalty = 1.0
    presence_penalty: opt.PresencePenalty = 0.0
    frequency_penalty: opt.FrequencyPenalty = 0.0
    seed: opt.Seed = None
    stop: opt.Stop = None
    max_draft_depth: opt.DraftDepth = None

    def params(self, **more: object) -> SamplingParams:
        """With what else a command has, as sampling parameters.

        Raises:
            ConfigError: a value is out of its range.
        """
        return opt.sampling_params(**{f.name: getattr(self, f.name) for f in fields(self)}, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form that the text must have."""

    json_schema: opt.JsonSchema = None
    regex: opt.Regex = None
    choice: opt.Choice = None
    grammar: opt.GrammarFile = None

    @property
    def structured(self) -> dict[str, object] | None:
        """`SamplingParams.structured`; None where no form is asked for.

        Raises:
            ConfigError: a file cannot be read.
        """
        given = {
            "json": None if self.json_schema is None else _schema_text(self.json_schema),
            "regex": self.regex,
            "choice": self.choice or None,
            "grammar": None if self.grammar is None else _text_of(self.grammar, "--grammar"),
        }
        found: dict[str, object] = {k: value for k, value in given.items() if value is not None}
        return found or None


def _schema_text(value: str) -> str:
    """What is written on the command line, if it looks like a schema, else a file's content."""
    is_json = value.lstrip().startswith("{") or value.strip() in ("true", "false")
    return value if is_json else _text_of(Path(value), "--json-schema")


def _text_of(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}: {path} is not valid UTF-8") from error
