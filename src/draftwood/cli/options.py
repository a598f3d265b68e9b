"""Options that several commands share."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from draftwood.config import EngineConfig
from draftwood.errors import ConfigError
from draftwood.models.packaged import PACKAGED
from draftwood.models.sources import resolve

if TYPE_CHECKING:
    from draftwood.sampling import SamplingParams

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)

_MODEL = "Model"
_SAMPLING = "Sampling"
_FORM = "Form of the text (one of these)"
_OUTPUT = "Output"
_KV = "KV cache"
_CHECKPOINTS = "Checkpoints"

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A packaged alias (see `draftwood pull`), a hub id, a folder or a .gguf file.",
        show_default=False,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(help="A second, smaller model that drafts.", rich_help_panel=_MODEL),
]
DraftMatch = Annotated[
    Literal["auto", "tokens", "text"],
    typer.Option(
        help="How a draft model of another vocabulary is understood: by the tokens that both have, "
        "by text, or auto: text, unless nearly all tokens are shared.",
        rich_help_panel=_MODEL,
    ),
]
DraftQuantization = Annotated[
    str | None,
    typer.Option(
        help="int8, int4 or none, for the draft model. Default on a CPU: int4, or int8 for models "
        "below 300 M parameters.",
        rich_help_panel=_MODEL,
    ),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="Who drafts: auto, lookup, suffix, recycling, model or none. "
        "Default: auto, which uses the draft model where it pays.",
        rich_help_panel=_MODEL,
    ),
]
NoSpeculation = Annotated[
    bool,
    typer.Option("--no-speculation", help="Decode plainly: the same text.", rich_help_panel=_MODEL),
]
TreeNodes = Annotated[
    int,
    typer.Option(help="Most draft tokens a round; 0 decodes plainly.", rich_help_panel=_MODEL),
]
DraftDepth = Annotated[
    int | None,
    typer.Option(
        "--draft-depth",
        min=0,
        help="Most draft tokens in a row, from the last token of the text on.",
        show_default=False,
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda or cuda:1. Default: CUDA if any.", rich_help_panel=_MODEL),
]
DType = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16 or float16. Default: float32 on CPU, elsewhere the model's own.",
        rich_help_panel=_MODEL,
    ),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="int8, int4 or none. Default: int8 on a CPU for models above 300 M parameters.",
        rich_help_panel=_MODEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=1, help="Cap on the context, in tokens.", show_default=False, rich_help_panel=_MODEL
    ),
]
KVMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory for KV: 512M, 2G (powers of 1024). Default: one full context, within a "
        "quarter of what is free.",
        rich_help_panel=_KV,
    ),
]
KVDisk = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="A folder that keeps KV: a prompt that begins like an earlier one starts sooner.",
        rich_help_panel=_KV,
    ),
]
KVRedis = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="A Redis server that shares KV: redis://host:6379/0, rediss://... or unix:///socket.",
        rich_help_panel=_KV,
    ),
]
KVCompression = Annotated[
    Literal["none", "zstd", "fp16", "int8"],
    typer.Option(
        help="Of KV on disk and in Redis. zstd gives the same bits back. fp16 and int8 are lossy: "
        "what is restored from them may change a text.",
        rich_help_panel=_KV,
    ),
]
KVNamespace = Annotated[
    str,
    typer.Option(metavar="NAME", help="Begins every key in Redis.", rich_help_panel=_KV),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="A folder in which running requests are saved: after a crash or Ctrl-C the same "
        "command goes on where it was.",
        show_default=False,
        rich_help_panel=_CHECKPOINTS,
    ),
]
CheckpointEvery = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", help="Seconds between two checkpoints.", rich_help_panel=_CHECKPOINTS
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Most tokens to generate. Default: 128 (chat: 1024), or what the context has "
        "room for.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)]
TopK = Annotated[
    int, typer.Option(help="Keep the k most likely; 0 keeps all.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float,
    typer.Option(help="Keep the likeliest up to this probability.", rich_help_panel=_SAMPLING),
]
MinP = Annotated[
    float,
    typer.Option(help="Drop below this share of the likeliest.", rich_help_panel=_SAMPLING),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        help="Above 1: tokens of prompt and text become less likely.", rich_help_panel=_SAMPLING
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        help="Taken from each token that the text has, -2 to 2.", rich_help_panel=_SAMPLING
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        help="The same, for each time that it has it, -2 to 2.", rich_help_panel=_SAMPLING
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Of the noise: the same seed, the same text. Default: a new one each time.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
Beams = Annotated[
    int,
    typer.Option(
        help="Above 1: search for the likeliest text with so many beams.", rich_help_panel=_SAMPLING
    ),
]
LengthPenalty = Annotated[
    float,
    typer.Option(
        help="With --beams: above 0 favours long texts, below it short ones.",
        rich_help_panel=_SAMPLING,
    ),
]
EarlyStopping = Annotated[
    str,
    typer.Option(
        help="With --beams, when to end: true (as soon as so many texts have ended), false (also "
        "when no beam is likely to get better) or never (when none can).",
        rich_help_panel=_SAMPLING,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        help="End before this string; may be repeated.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
IgnoreEOS = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Go on past the model's own end.", rich_help_panel=_SAMPLING),
]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|JSON",
        help="The text is JSON that fits this schema, a file or the schema itself; "
        '\'{"type": "object"}\' takes any object.',
        show_default=False,
        rich_help_panel=_FORM,
    ),
]
Regex = Annotated[
    str | None,
    typer.Option(
        help="The whole text matches this regular expression.",
        show_default=False,
        rich_help_panel=_FORM,
    ),
]
Choice = Annotated[
    list[str] | None,
    typer.Option(
        help="The text is one of these; repeated for each.",
        show_default=False,
        rich_help_panel=_FORM,
    ),
]
GrammarFile = Annotated[
    Path | None,
    typer.Option(
        "--grammar",
        metavar="FILE",
        help="The text is of this context-free grammar, in Lark's notation.",
        show_default=False,
        rich_help_panel=_FORM,
    ),
]
System = Annotated[
    str | None,
    typer.Option(help="What the model is told before the conversation.", show_default=False),
]
Stats = Annotated[
    bool,
    typer.Option("--stats", help="Show acceptance and times.", rich_help_panel=_OUTPUT),
]
ShowTree = Annotated[
    bool,
    typer.Option(
        "--show-tree",
        help="Show each round's tree on stderr: who proposed what, and what was right.",
        rich_help_panel=_OUTPUT,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="For machines: JSON on stdout.", rich_help_panel=_OUTPUT)
]


def example(*lines: str) -> str:
    """The end of a command's help."""
    return "[bold]Example:[/bold] " + "\n\n".join(line.replace("[", r"\[") for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What to load and how.

    Raises:
        ModelError: there is no such model.
        ConfigError: a value is out of its range.
    """

    model: str
    draft: str | None = None
    draft_match: Literal["auto", "tokens", "text"] = "auto"
    draft_quantization: str | None = None
    drafter: str | None = None
    no_speculation: bool = False
    tree_nodes: int = 32
    device: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    max_model_len: int | None = None
    kv_memory: str | None = None
    kv_disk: str | None = None
    kv_redis: str | None = None
    kv_compression: str = "none"
    max_num_seqs: int = 16
    max_batch_tokens: int = 512
    checkpoint: Path | None = None
    checkpoint_every: float = 5.0
    config: EngineConfig = field(init=False)

    def __post_init__(self) -> None:
        for name in (self.model, self.draft):
            if name is not None and is_nothing(name):
                resolve(name)  # says so, before the seconds that torch takes to import
        if not self.checkpoint_every > 0:
            raise ConfigError(f"checkpoint-every is {self.checkpoint_every}: it must be above 0")
        memory = None if self.kv_memory is None else parse_bytes("kv-memory", self.kv_memory)
        config = EngineConfig(
            kv_memory=memory,
            kv_disk=self.kv_disk,
            kv_redis=self.kv_redis,
            kv_compression=self.kv_compression,
            max_tree_nodes=self.tree_nodes,
            max_num_seqs=self.max_num_seqs,
            max_batch_tokens=self.max_batch_tokens,
        )
        object.__setattr__(self, "config", config)


def early_stopping(text: str) -> bool | str:
    """The value of --early-stopping as the library takes it."""
    return {"true": True, "false": False}.get(text.lower(), text)


def is_nothing(name: str) -> bool:
    """Whether a name is no packaged model, nothing on the disk, and cannot be on the hub."""
    return "/" not in name and name not in PACKAGED and not os.path.exists(name)


def parse_bytes(name: str, text: str) -> int:
    """Bytes of "512M", "2G", "1.5GiB", "100000"; units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{name} is {text!r}: write it as 512M or 2G")
    number, unit = match.groups()
    size = int(float(number) * _UNITS[unit.upper()])
    if size <= 0:
        raise ConfigError(f"{name} is {text!r}: it must be above 0")
    return size


def sampling_params(**values: object) -> SamplingParams:
    """Sampling parameters from options; those that are None keep their defaults.

    `max_tokens` stays None: the default depends on the prompt (`running.with_room`).

    Raises:
        ConfigError: a value is out of its range.
    """
    from draftwood.sampling.params import SamplingParams

    given = {name: value for name, value in values.items() if value is not None}
    return SamplingParams.from_dict({"max_tokens": None} | given)
