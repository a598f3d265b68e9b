"""Options that commands of `draftwood bench` share, and what their values stand for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from draftwood.errors import ConfigError

if TYPE_CHECKING:
    from draftwood.config import EngineConfig
    from draftwood.llm import LLM

Model = Annotated[
    str, typer.Argument(help="Packaged alias, hub id, folder or .gguf file.", show_default=False)
]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default="one for each core")]
Quantization = Annotated[
    str | None,
    typer.Option(help="int8, int4 or none.", show_default="int8 for large models on a CPU"),
]
Draft = Annotated[str | None, typer.Option(help="A smaller model for the drafters auto and model.")]
DraftMatch = Annotated[
    Literal["auto", "tokens", "text"],
    typer.Option(help="Where its vocabulary is another: by common tokens, by text, or auto."),
]
DraftQuantization = Annotated[
    str | None,
    typer.Option(help="int8, int4 or none.", show_default="int4 or int8 on a CPU"),
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Prompts: JSON lines of ours, Spec-Bench or HumanEval, or a text a line.",
        show_default="30 packaged prompts",
    ),
]
Limit = Annotated[int | None, typer.Option(help="Prompts, spread over the kinds.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Seed = Annotated[int, typer.Option(help="Of the noise, when sampled.")]
Out = Annotated[Path | None, typer.Option(help="Write JSON lines to this file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]


def whole_numbers(option: str, text: str, least: int) -> list[int]:
    """A comma-separated list of whole numbers.

    Raises:
        ConfigError: it is none, or holds one below `least`.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}: give whole numbers, like 1,2,4") from error
    if min(numbers) < least:
        raise ConfigError(f"{option} holds {min(numbers)}: the least is {least}")
    return numbers


def numbers(option: str, text: str, least: float) -> list[float]:
    """A comma-separated list of numbers.

    Raises:
        ConfigError: it is none, or holds one below `least`.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}: give numbers, like 0,0.8") from error
    for number in found:
        if not least <= number < math.inf:
            raise ConfigError(f"{option} holds {number:g}: the least is {least:g}")
    return found


def use_threads(threads: int | None) -> None:
    """Sets how many CPU threads PyTorch takes; None leaves it.

    Raises:
        ConfigError: there are none.
    """
    import torch

    if threads is None:
        return
    if threads < 1:
        raise ConfigError(f"threads is {threads}: it must be at least 1")
    torch.set_num_threads(threads)


def drafter_list(drafters: str | None, draft: str | None) -> list[str]:
    """A comma-separated list of drafters; None takes those that there are.

    Args:
        drafters: names; "random" and "oracle" are drafters for measuring alone.
        draft: the draft model, if there is one.

    Raises:
        ConfigError: one is unknown, or needs a draft model.
    """
    from draftwood.draft.base import drafter_names

    if drafters is None:
        return ["none", "suffix", "recycling", "lookup", "auto", *(["model"] if draft else [])]
    names = [name.strip() for name in drafters.split(",") if name.strip()]
    known = {*drafter_names(), "random", "oracle"}
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown drafter {name!r}: known are {', '.join(sorted(known))}")
    if "model" in names and draft is None:
        raise ConfigError("drafter 'model' needs a draft model: give --draft")
    return names


def load_llm(
    model: str,
    *,
    draft: str | None = None,
    draft_match: Literal["auto", "tokens", "text"] = "auto",
    draft_quantization: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    quantization: str | None = None,
    config: EngineConfig | None = None,
) -> LLM:
    """The model to measure, with a bar while it is fetched; `draft` drafts where it is asked to.

    Without a `config` its drafters learn no past answers: here prompts come several times.

    Raises:
        DraftwoodError: it cannot be loaded.
    """
    from draftwood.config import EngineConfig
    from draftwood.llm import LLM
    from draftwood.models.progress import shown_progress

    with shown_progress() as progress:
        return LLM(
            model,
            draft=draft,
            drafter=None if draft else "none",
            draft_match=draft_match,
            draft_quantization=draft_quantization,
            dtype=dtype,
            device=device,
            quantization=quantization,
            config=config or EngineConfig(past_answers=False),
            progress=progress,
        )
