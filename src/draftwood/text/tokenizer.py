"""Text to token ids and back, with transformers' tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from draftwood.errors import ModelError, PromptError, first_line


class Tokenizer:
    """A model's tokenizer.

    Args:
        backend: a transformers tokenizer.
        eos_token_ids: tokens that end a text; None takes the tokenizer's own.
    """

    def __init__(self, backend: Any, eos_token_ids: Sequence[int] | None = None) -> None:
        self._backend = backend
        own = () if backend.eos_token_id is None else (backend.eos_token_id,)
        self.eos_token_ids = frozenset(own if eos_token_ids is None else eos_token_ids)
        self.special_ids = frozenset(backend.all_special_ids)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Reads the tokenizer of a model folder.

        Raises:
            ModelError: the folder has none, or it cannot be read.
        """
        from transformers import AutoTokenizer

        try:
            backend = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise ModelError(
                f"{path}: no usable tokenizer in this folder ({first_line(error)})"
            ) from error
        return cls(backend, _eos_token_ids(path, backend))

    def __len__(self) -> int:
        return len(self._backend)

    @property
    def backend(self) -> Any:
        """The transformers tokenizer."""
        return self._backend

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised."""
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return [int(token) for token in ids]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `tokens`, never cleaned up: what was generated is what is shown."""
        text: str = self._backend.decode(
            list(tokens),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how a conversation is written."""
        return bool(self._backend.chat_template)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Args:
            messages: the turns.
            tools: functions that the model may call, for templates that know such.
            options: further variables of the template.

        Raises:
            PromptError: the model has no chat template, or the template refuses the messages.
        """
        import jinja2

        if not self.has_chat_template:
            raise PromptError(
                "this model has no chat template: use generate with a plain prompt instead"
            )
        try:
            text = self._backend.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=True,
                **options,
            )
        except (jinja2.TemplateError, KeyError, TypeError, ValueError) as error:
            raise PromptError(f"the chat template refuses these messages: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def definition(self) -> dict[str, Any] | None:
        """What a tokenizer.json says of it; None for a tokenizer that is a Python program."""
        inner = getattr(self._backend, "backend_tokenizer", None)
        read: dict[str, Any] | None = None if inner is None else json.loads(inner.to_str())
        return read

    @cached_property
    def token_strings(self) -> list[str | None]:
        """The vocabulary's own spelling of each id; None for ids without one."""
        return list(self._backend.convert_ids_to_tokens(range(len(self))))


def _eos_token_ids(path: Path, backend: Any) -> list[int] | None:
    """End tokens by generation_config.json, which may name several, then by the tokenizer."""
    try:
        config = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    ids = config.get("eos_token_id")
    if ids is None:
        return None
    ids = [ids] if isinstance(ids, int) else list(ids)
    own = backend.eos_token_id
    return ids if own is None or own in ids else [*ids, own]
