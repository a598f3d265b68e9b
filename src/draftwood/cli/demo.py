"""`draftwood demo`: the same three texts, plain and speculative, and how long they took."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood.cli import options as opt
from draftwood.cli.loading import timed_load
from draftwood.cli.output import write
from draftwood.cli.running import OnText, Request, complete
from draftwood.cli.stats import output_record, tokens_per_s

if TYPE_CHECKING:
    from draftwood.engine.engine import Engine
    from draftwood.llm import LLM
    from draftwood.outputs import RequestOutput
    from draftwood.sampling import SamplingParams

_DEFAULT_TOKENS = 128
_CODE = """\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def peek(self):
        return self.items[-1]

    def is_empty(self):
        return len(self.items) == 0
"""
_LIST = """\
Chemical elements and their symbols:

1. Hydrogen: H
2. Helium: He
3. Lithium: Li
4. Beryllium: Be
5. Boron: B
6. Carbon: C
7. Nitrogen: N
8. Oxygen: O
"""


@dataclass(frozen=True, slots=True)
class _Case:
    """A prompt of the demo: what kind it is, what the user says, and whether it is a chat."""

    kind: str
    prompt: str
    is_chat: bool


_CASES = (
    _Case("chat", "Why is the sky blue? Explain it to a child in a few sentences.", True),
    _Case(
        "rewrite code",
        f"Rename the class Stack to Pile in this code and repeat the rest unchanged:\n\n{_CODE}",
        True,
    ),
    _Case("continue a list", _LIST, False),
)

ModelName = Annotated[
    str, typer.Option(help="A packaged alias, a hub id, a folder or a .gguf file.")
]


def demo(
    model: ModelName = "smollm2-135m",
    draft: opt.Draft = None,
    device: opt.Device = None,
    dtype: opt.DType = None,
    quantization: opt.Quantization = None,
    max_tokens: opt.MaxTokens = None,
    as_json: opt.Json = False,
) -> None:
    """Generate three texts twice, plain and speculative, and compare.

    The first run downloads a small model (93 MB). Speeds are of decoding, measured one after the
    other on this machine as it is; what else runs on it shows in them.
    """
    begin = perf_counter()
    options = opt.ModelOptions(
        model=model, draft=draft, device=device, dtype=dtype, quantization=quantization
    )
    params = opt.sampling_params(max_tokens=max_tokens or _DEFAULT_TOKENS)
    llm, _ = timed_load(options)
    screen = _Screen(hidden=as_json, begin=begin)
    with llm:
        stage = _Stage(llm, params, screen)
        results = [stage.play(case) for case in _CASES]
        stage.close()
    if as_json:
        print(json.dumps([result.record() for result in results], ensure_ascii=False))
    else:
        _print_table(results, screen.first_text_s or 0.0)


@dataclass(frozen=True, slots=True)
class _Result:
    """What came of one prompt, both ways."""

    kind: str
    plain: RequestOutput
    speculative: RequestOutput

    @property
    def identical(self) -> bool:
        return self.plain.token_ids == self.speculative.token_ids

    @property
    def verdict(self) -> str:
        if self.identical:
            return "yes"
        pairs = zip(self.plain.token_ids, self.speculative.token_ids, strict=False)
        same = 0
        for ours, theirs in pairs:
            if ours != theirs:
                break
            same += 1
        return f"no, from token {same + 1}"

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "kind": self.kind,
            "identical": self.identical,
            "plain": output_record(self.plain),
            "speculative": output_record(self.speculative),
        }


class _Screen:
    """What the demo shows while it runs.

    Args:
        hidden: show nothing.
        begin: when the command started, by `perf_counter`.

    Attributes:
        first_text_s: seconds from there to the first piece of text.
    """

    def __init__(self, *, hidden: bool, begin: float) -> None:
        from rich.console import Console

        self._hidden = hidden
        self._begin = begin
        self.first_text_s: float | None = None
        self._console = Console(highlight=False)

    def prompt(self, case: _Case) -> None:
        """A new prompt begins."""
        self._print(f"\n{case.kind}", "bold")
        self._print(case.prompt.rstrip(), "dim")

    def run(self, title: str) -> None:
        """One of its two runs begins."""
        self._print(f"\n{title}:", "bold cyan")

    def text(self, index: int, text: str, ended: bool) -> None:
        """A piece of the text has come."""
        if self.first_text_s is None:
            self.first_text_s = perf_counter() - self._begin
        if not self._hidden:
            write(text)

    def speed(self, output: RequestOutput) -> None:
        """A run is over."""
        length = output.metrics.mean_acceptance_length
        note = f", {length:.2f} tokens a round" if output.metrics.num_draft_tokens else ""
        self._print(f"\n({tokens_per_s(output):.1f} tokens/s{note})", "cyan")

    def _print(self, text: str, style: str) -> None:
        if not self._hidden:
            self._console.print(text, style=style, markup=False, soft_wrap=True)


class _Stage:
    """Runs each prompt on two engines that share the weights.

    The engines share neither the prefix cache nor what a drafter has learned, so neither run helps
    the other. What the drafter learned from earlier prompts it keeps, as in any use.
    """

    def __init__(self, llm: LLM, params: SamplingParams, screen: _Screen) -> None:
        from draftwood.draft.base import NoDrafter

        self._tokenizer = llm.tokenizer
        self._params = params
        self._screen = screen
        self._speculative = llm.engine
        self._plain = llm.make_engine(NoDrafter())
        for engine in (self._plain, self._speculative):  # the first rounds pay for lazy set-up
            _run(engine, self._tokenizer.encode("Hello"), params.but(max_tokens=4))

    def play(self, case: _Case) -> _Result:
        """One prompt, both ways."""
        message = {"role": "user", "content": case.prompt}
        ids = (
            self._tokenizer.encode_chat([message])
            if case.is_chat
            else self._tokenizer.encode(case.prompt)
        )
        self._screen.prompt(case)
        return _Result(
            case.kind,
            plain=self._run("plain", self._plain, ids),
            speculative=self._run("speculative", self._speculative, ids),
        )

    def close(self) -> None:
        """Gives back the KV of the engine that was made for this."""
        self._plain.close()

    def _run(self, title: str, engine: Engine, ids: Sequence[int]) -> RequestOutput:
        self._screen.run(title)
        output = _run(engine, ids, self._params, self._screen.text)
        self._screen.speed(output)
        return output


def _run(
    engine: Engine, ids: Sequence[int], params: SamplingParams, on_text: OnText | None = None
) -> RequestOutput:
    run = complete(engine, [Request(ids, params)], on_text)
    if run.interrupted:
        raise KeyboardInterrupt
    return run.outputs[0]


def _print_table(results: Sequence[_Result], first_text_s: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("prompt", box=None, pad_edge=False)
    for title in ("plain", "speculative", "ratio", "acceptance length", "identical"):
        table.add_column(title, justify="right")
    for result in results:
        outputs = [result.plain], [result.speculative]
        table.add_row(result.kind, *_numbers(*outputs), result.verdict)
    identical = sum(result.identical for result in results)
    table.add_section()
    table.add_row(
        "all",
        *_numbers([r.plain for r in results], [r.speculative for r in results]),
        "yes" if identical == len(results) else f"{identical} of {len(results)}",
        style="bold",
    )
    console = Console(highlight=False)
    console.print()
    console.print(table)
    console.print(
        f"""
plain, speculative: tokens per second while decoding, the prompt's time left out
acceptance length: tokens per round of the target, 1 without speculation
The first text came {first_text_s:.1f} s after the start.""",
        style="dim",
        markup=False,
    )


def _numbers(plain: Sequence[RequestOutput], speculative: Sequence[RequestOutput]) -> list[str]:
    slow, fast = _rate(plain), _rate(speculative)
    rounds = sum(output.metrics.num_rounds for output in speculative)
    accepted = sum(output.metrics.num_accepted_tokens for output in speculative)
    ratio = f"{fast / slow:.2f}x" if slow else "-"
    length = f"{1 + accepted / rounds:.2f}" if rounds else "-"
    return [f"{slow:.1f}", f"{fast:.1f}", ratio, length]


def _rate(outputs: Sequence[RequestOutput]) -> float:
    """Tokens per second over all; each one's first token, the prompt's doing, left out."""
    seconds = sum(output.metrics.decode_s for output in outputs)
    return sum(len(output.token_ids) - 1 for output in outputs) / seconds if seconds else 0.0
