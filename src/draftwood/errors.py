"""Every error a user of Draftwood can cause.

    DraftwoodError
    ├── ConfigError          a setting or parameter is wrong (also a ValueError)
    ├── PromptError          a prompt cannot be served: empty, too long (also a ValueError)
    ├── ModelError           a model cannot be found, read or used
    │   ├── DownloadError    fetching failed or the bytes are not the expected ones
    │   ├── UnsupportedModelError  the architecture cannot be rewound along a tree
    │   └── VocabularyError  two models do not speak the same tokens
    ├── CapacityError        memory, disk or the KV pool is too small for the request
    ├── StoreError           a store of KV blocks cannot be reached, read or written
    ├── CheckpointError      a checkpoint is damaged, or of another model or version
    └── MissingExtraError    an optional package is not installed (also an ImportError)

A message says what was wrong and what to do about it, in one line. The command line prints it
after "error: " and exits with 2; nothing else is ever shown for a user's mistake.
"""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """The first line of another library's error, or its type: our messages have one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class DraftwoodError(Exception):
    """Base of all errors that are a user's to mend."""


class ConfigError(DraftwoodError, ValueError):
    """A setting or parameter is out of its range, unknown, or contradicts another."""


class PromptError(DraftwoodError, ValueError):
    """A prompt that cannot be served: empty, or longer than the context."""


class ModelError(DraftwoodError):
    """A model that cannot be found, read or used."""


class DownloadError(ModelError):
    """A download failed, or what arrived is not what was expected. Nothing was cached."""


class UnsupportedModelError(ModelError):
    """An architecture whose state cannot be rewound along a token tree."""


class VocabularyError(ModelError):
    """Two models whose token ids do not mean the same strings."""


class CapacityError(DraftwoodError):
    """Memory, disk or the KV pool is too small for what was asked."""


class StoreError(DraftwoodError):
    """A store of KV blocks that does not work now. An engine goes on without it."""


class CheckpointError(DraftwoodError):
    """A checkpoint that cannot be used: damaged, or made by another model or version."""


class MissingExtraError(DraftwoodError, ImportError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: run  pip install 'draftwood[{extra}]'")
