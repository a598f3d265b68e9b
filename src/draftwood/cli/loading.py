"""From options to a loaded model."""

from __future__ import annotations

import os
import sys
import warnings
from time import perf_counter
from typing import TYPE_CHECKING

from draftwood.cli.options import ModelOptions
from draftwood.cli.running import interruptible
from draftwood.models.progress import shown_progress

if TYPE_CHECKING:
    from draftwood.llm import LLM


def quiet() -> None:
    """Keeps libraries from writing between our lines. Call before transformers is imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def load(options: ModelOptions) -> LLM:
    """Downloads what is missing, with a bar on stderr, and loads it."""
    quiet()
    with interruptible(), shown_progress(sys.stderr) as progress:
        from draftwood.llm import LLM

        plain = options.no_speculation
        return LLM(
            options.model,
            draft=None if plain else options.draft,
            drafter="none" if plain else options.drafter,
            draft_match=options.draft_match,
            device=options.device,
            dtype=options.dtype,
            quantization=options.quantization,
            draft_quantization=options.draft_quantization,
            max_model_len=options.max_model_len,
            checkpoint=options.checkpoint,
            checkpoint_every_s=options.checkpoint_every,
            config=options.config,
            progress=progress,
        )


def timed_load(options: ModelOptions) -> tuple[LLM, float]:
    """`load`, and the seconds it took."""
    begin = perf_counter()
    return load(options), perf_counter() - begin
