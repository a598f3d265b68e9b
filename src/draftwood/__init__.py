"""Draftwood: lossless speculative decoding over token trees.

from draftwood import LLM, SamplingParams

llm = LLM("smollm2-135m")
print(llm.generate("def quicksort(", SamplingParams(max_tokens=64))[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftwood.config import EngineConfig
from draftwood.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DownloadError,
    DraftwoodError,
    MissingExtraError,
    ModelError,
    PromptError,
    UnsupportedModelError,
    VocabularyError,
)

if TYPE_CHECKING:
    from draftwood.draft.base import Drafter, Outcome
    from draftwood.llm import LLM
    from draftwood.outputs import Delta, RequestOutput
    from draftwood.sampling import SamplingParams, StructuredOutputsParams
    from draftwood.tree import TokenTree

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "Delta",
    "DownloadError",
    "Drafter",
    "DraftwoodError",
    "EngineConfig",
    "MissingExtraError",
    "ModelError",
    "Outcome",
    "PromptError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TokenTree",
    "UnsupportedModelError",
    "VocabularyError",
]

# torch takes a second or two to import: only what needs it pays.
_LAZY = {
    "LLM": "draftwood.llm",
    "Delta": "draftwood.outputs",
    "RequestOutput": "draftwood.outputs",
    "SamplingParams": "draftwood.sampling",
    "StructuredOutputsParams": "draftwood.sampling",
    "Drafter": "draftwood.draft.base",
    "Outcome": "draftwood.draft.base",
    "TokenTree": "draftwood.tree",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'draftwood' has no attribute {name!r}")
