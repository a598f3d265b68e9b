"""Spec-Bench (arXiv 2401.07851): its six groups, its conversations and its definitions.

A question is a conversation of one turn or more. Every turn is a run of each contender; a later
turn's prompt holds what plain decoding answered before, so that all get the same prompts even where
rounding let their texts part.

What it defines, and how we take it:

- speed of a question: new tokens of all its turns over their seconds, the prompts included;
- speed-up of a group: mean speed of its questions over the mean speed of plain decoding at them;
  "overall" is the same over all questions;
- mean accepted tokens: tokens a verification gave, the target's own among them, averaged over all
  verifications.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from draftwood.bench.compare import Comparison, Skip, Watch
from draftwood.bench.contenders import PLAIN
from draftwood.bench.data import BenchPrompt
from draftwood.bench.records import RunRecord
from draftwood.errors import ConfigError
from draftwood.text import Tokenizer

# Group to its name in the leaderboard.
GROUPS = {
    "mt_bench": "Multi-turn Conversation",
    "translation": "Translation",
    "summarization": "Summarization",
    "qa": "Question Answering",
    "math_reasoning": "Mathematical Reasoning",
    "rag": "Retrieval-aug. Generation",
}
MT_BENCH = (
    *("writing", "roleplay", "reasoning", "math"),
    *("coding", "extraction", "stem", "humanities"),
)
_TURN = "#"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a question, with what was said before it.

    Attributes:
        id: the question's id, "#" and the number of the turn, from 1.
        kind: its group.
        said: user, assistant, user, ...; the last one is the user's.
        chat: written with the model's chat template, where it has one.
    """

    id: str
    kind: str
    said: tuple[str, ...]
    chat: bool = True

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids of the conversation; without a template its parts stand below each other."""
        if not (self.chat and tokenizer.has_chat_template):
            return tokenizer.encode("\n\n".join(self.said))
        roles = ("user", "assistant")
        return tokenizer.encode_chat(
            [{"role": roles[i % 2], "content": text} for i, text in enumerate(self.said)]
        )


def in_groups(prompts: Iterable[BenchPrompt]) -> list[BenchPrompt]:
    """Questions with their group in the place of their category.

    Raises:
        ConfigError: a category is none of Spec-Bench's.
    """
    return [replace(prompt, kind=_group(prompt)) for prompt in prompts]


def _group(prompt: BenchPrompt) -> str:
    group = "mt_bench" if prompt.kind in MT_BENCH else prompt.kind
    if group not in GROUPS:
        raise ConfigError(
            f"question {prompt.id} has the category {prompt.kind!r}, which Spec-Bench does not"
            f" know: use one of {', '.join((*MT_BENCH, *list(GROUPS)[1:]))}"
        )
    return group


def run_questions(
    comparison: Comparison,
    questions: Sequence[BenchPrompt],
    done: frozenset[str],
    on_question: Callable[[Sequence[RunRecord | Skip]], None],
    watch: Watch,
) -> None:
    """Runs all questions that are not done; an interrupt ends it before the next one.

    Args:
        comparison: its contenders; it collects the records.
        questions: in groups; who goes first depends on the place in this list alone.
        done: ids of questions to leave out.
        on_question: told the results of a question when all its turns are done, and not before:
            what was interrupted is run again as a whole.
        watch: told (turn id, contender) before each run.
    """
    if all(question.id in done for question in questions):
        return
    try:
        comparison.warm_up()
        for number, question in enumerate(questions):
            if question.id not in done:
                results = list(_run_question(comparison, number, question, watch))
                if comparison.interrupted:
                    return
                on_question(results)
    except KeyboardInterrupt:
        comparison.interrupted = True


def _run_question(
    comparison: Comparison, number: int, question: BenchPrompt, watch: Watch
) -> Iterator[RunRecord | Skip]:
    """The results of every turn; after a turn that does not fit the context, no other does."""
    said: tuple[str, ...] = ()
    tokenizer = comparison.llm.tokenizer
    for i, text in enumerate(question.turns, start=1):
        said = (*said, text)
        turn = Turn(f"{question.id}{_TURN}{i}", question.kind, said, question.chat)
        results = comparison.run_prompt(number, turn, watch)
        yield from results
        if comparison.interrupted or any(isinstance(result, Skip) for result in results):
            return
        ids = turn.encode(tokenizer)
        said = (*said, tokenizer.decode(comparison.answers[tuple(ids)][len(ids) :]))


def question_of(prompt: str) -> str:
    """The question that a turn belongs to, by its id."""
    return prompt.rpartition(_TURN)[0]


def summarise_spec(records: Sequence[RunRecord]) -> dict[str, Any]:
    """The leaderboard's numbers, ready for JSON.

    Returns:
        Contender to `speedup` and `mean_accepted_tokens` by group and, as "overall", over all;
        `tokens_per_s`, the mean over questions; `num_questions`; `num_compared` and
        `num_identical` texts. `mean_accepted_tokens` holds None where nothing was verified.
    """
    names = dict.fromkeys([PLAIN, *(record.contender for record in records)])
    plain = _speeds(record for record in records if record.contender == PLAIN)
    return {name: _line([r for r in records if r.contender == name], plain) for name in names}


def _line(own: Sequence[RunRecord], plain: Mapping[str, float]) -> dict[str, Any]:
    speeds = _speeds(own)
    groups = {question_of(record.prompt): record.kind for record in own}
    members = {group: [q for q in speeds if groups[q] == group] for group in GROUPS}
    members = {group: questions for group, questions in members.items() if questions}
    compared = [record for record in own if record.identical is not None]
    everything = {**members, "overall": list(speeds)}
    return {
        "num_questions": {group: len(questions) for group, questions in everything.items()},
        "tokens_per_s": fmean(speeds.values()) if speeds else None,
        "speedup": {
            group: _speedup(questions, speeds, plain) for group, questions in everything.items()
        },
        "mean_accepted_tokens": {
            group: _accepted(r for r in own if group in ("overall", r.kind)) for group in everything
        },
        "num_compared": len(compared),
        "num_identical": sum(bool(record.identical) for record in compared),
    }


def _speeds(records: Iterable[RunRecord]) -> dict[str, float]:
    """Tokens a second by question, all its turns together."""
    tokens: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for record in records:
        question = question_of(record.prompt)
        tokens[question] = tokens.get(question, 0) + record.num_tokens
        seconds[question] = seconds.get(question, 0.0) + record.total_s
    return {question: tokens[question] / seconds[question] for question in tokens}


def _speedup(
    questions: Iterable[str], speeds: Mapping[str, float], plain: Mapping[str, float]
) -> float | None:
    both = [question for question in questions if question in plain]
    if not both:
        return None
    return fmean(speeds[q] for q in both) / fmean(plain[q] for q in both)


def _accepted(records: Iterable[RunRecord]) -> float | None:
    rounds = [record.rounds for record in records if record.rounds]
    num_rounds = sum(one.num_rounds for one in rounds)
    if not num_rounds:
        return None
    return 1 + sum(one.num_accepted_tokens for one in rounds) / num_rounds
