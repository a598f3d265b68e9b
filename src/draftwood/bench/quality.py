"""What 8 bits cost in quality: perplexity and divergence against float32, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftwood.attention import Work, pack
from draftwood.bench.data import load_prompts
from draftwood.errors import ConfigError
from draftwood.kv import BlockPool, Lease
from draftwood.models.base import Model
from draftwood.text import Tokenizer

_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Quality:
    """One text, read by both forms of a model.

    Attributes:
        text: its name.
        num_tokens: predictions compared.
        perplexity, reference_perplexity: of the form under test and of the reference.
        divergence: mean KL in nats from the reference's distribution to the tested one.
        same_choice: share of tokens where both have the same likeliest one.
    """

    text: str
    num_tokens: int
    perplexity: float
    reference_perplexity: float
    divergence: float
    same_choice: float

    @property
    def perplexity_change(self) -> float:
        """Relative; 0.01 is one per cent worse."""
        return self.perplexity / self.reference_perplexity - 1


def texts(paths: Sequence[Path], limit: int) -> list[tuple[str, str]]:
    """Named texts: the files given, or Python source, a licence and the packaged prompts."""
    if paths:
        return [(path.name, _read(path)) for path in paths]
    import textwrap

    source = Path(str(textwrap.__file__))
    prompts = "\n\n".join(prompt.turns[0] for prompt in load_prompts(None, limit))
    found = [(source.name, _read(source)), ("prompts", prompts)]
    licence = Path("/usr/share/common-licenses/GPL-3")
    if licence.is_file():
        found.insert(1, (licence.name, _read(licence)[2000:]))
    return found


def compare(
    tested: Model,
    reference: Model,
    tokenizer: Tokenizer,
    named: Sequence[tuple[str, str]],
    max_tokens: int,
    watch: Callable[[int], None] = lambda done: None,
) -> list[Quality]:
    """Reads every text with both models.

    Args:
        tested, reference: two forms of the same model.
        tokenizer: of both.
        named: names and texts.
        max_tokens: tokens read of each.
        watch: told the number of texts that are done.
    """
    results = []
    for name, text in named:
        tokens = tokenizer.encode(text)[:max_tokens]
        if len(tokens) < 2:
            raise ConfigError(f"{name} has {len(tokens)} tokens: two are needed to compare")
        results.append(_compare_one(name, tokens, tested, reference))
        watch(len(results))
    return results


def _compare_one(name: str, tokens: list[int], tested: Model, reference: Model) -> Quality:
    losses = [0.0, 0.0]
    divergence = 0.0
    same = 0
    next_tokens = torch.tensor(tokens[1:])
    start = 0
    for ours, theirs in zip(_log_probs(tested, tokens), _log_probs(reference, tokens), strict=True):
        wanted = next_tokens[start : start + len(ours), None]
        ours, theirs = ours[: len(wanted)], theirs[: len(wanted)]
        losses[0] -= float(ours.gather(1, wanted).sum())
        losses[1] -= float(theirs.gather(1, wanted).sum())
        divergence += float((theirs.exp() * (theirs - ours)).sum())
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        start += len(ours)
    count = len(tokens) - 1
    tested_perplexity, perplexity = (math.exp(loss / count) for loss in losses)
    return Quality(name, count, tested_perplexity, perplexity, divergence / count, same / count)


def _log_probs(model: Model, tokens: Sequence[int]) -> Iterator[Tensor]:
    """Float64 log-probabilities behind every token, chunk by chunk."""
    pool = BlockPool(model.spec.kv, num_blocks=-(-len(tokens) // 16) + 1)
    lease = Lease.open(pool)
    vocab_size = model.spec.vocab_size
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        lease.reserve(len(chunk))
        batch = pack([Work(lease, start, chunk, None, range(len(chunk)))], pool.device)
        logits = model.forward(batch, pool.target)
        lease.commit(range(len(chunk)))
        yield torch.log_softmax(logits[:, :vocab_size].double(), dim=-1)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from error
