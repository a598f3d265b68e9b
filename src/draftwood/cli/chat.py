"""`draftwood chat`: a conversation, on a terminal or through a pipe."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from draftwood.cli import options as opt
from draftwood.cli.groups import Loading, Picking, flat
from draftwood.cli.loading import timed_load
from draftwood.cli.output import observe, write
from draftwood.cli.running import Request, Run, complete, with_room
from draftwood.cli.stats import output_record, stats_lines
from draftwood.errors import DraftwoodError, PromptError

if TYPE_CHECKING:
    from draftwood.llm import LLM
    from draftwood.sampling import SamplingParams

_DEFAULT_TOKENS = 1024
_HELP = "/reset forgets the conversation, /quit leaves, Ctrl-C stops an answer"


@flat
def chat(
    model: opt.ModelName,
    system: opt.System = None,
    *,
    loading: Loading,
    picking: Picking,
    stats: opt.Stats = False,
    show_tree: opt.ShowTree = False,
    as_json: opt.Json = False,
) -> None:
    """Talk with a model; what was said before is not computed again.

    A line is a turn. /reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an
    answer. Lines can also come through a pipe; with --json each answer is one line of JSON.
    """
    model_options = loading.of(model)
    params = picking.params()
    llm, _ = timed_load(model_options)
    if not llm.tokenizer.has_chat_template:
        raise PromptError(f"{model} has no chat template: use  draftwood generate {model}")
    view = _View(stats=stats, show_tree=show_tree, as_json=as_json)
    with llm:
        _Chat(llm, params, system, view).run()


@dataclass(frozen=True, slots=True)
class _View:
    """What is shown besides the answers."""

    stats: bool
    show_tree: bool
    as_json: bool


@dataclass(slots=True)
class _Chat:
    """A conversation and the loop that carries it on."""

    llm: LLM
    params: SamplingParams
    system: str | None
    view: _View
    messages: list[dict[str, Any]] = field(default_factory=list)
    interactive: bool = field(default_factory=lambda: sys.stdin.isatty())

    def run(self) -> None:
        self._reset()
        if self.interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  (line editing and history for input())
            _note(_HELP)
        while (line := self._read()) is not None:
            if line == "/quit":
                return
            if line == "/reset":
                self._reset()
                self._say("the conversation is forgotten")
            elif line in ("/help", "/?"):
                self._say(_HELP)
            elif line.strip():
                self._turn(line)

    def _reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def _read(self) -> str | None:
        """The next line; None at the end of the input."""
        if self.interactive and sys.stdout.isatty():
            try:
                return input("> ").strip()
            except EOFError:
                print()
                return None
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise PromptError("standard input is not valid UTF-8") from error
        return line.strip() if line else None

    def _turn(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        try:
            run = self._answer()
        except DraftwoodError as error:
            self.messages.pop()
            if not self.interactive:
                raise
            _note(f"error: {error} (/reset forgets the conversation)")
            return
        self.messages.append({"role": "assistant", "content": run.outputs[0].text})
        if run.interrupted:
            if not self.interactive:
                raise typer.Exit(130)
            _note("stopped")

    def _answer(self) -> Run:
        ids = self.llm.tokenizer.encode_chat(self.messages)
        params = with_room(self.llm.engine, len(ids), self.params, _DEFAULT_TOKENS)
        hidden = self.view.as_json or self.view.show_tree

        def show(index: int, text: str, ended: bool) -> None:
            if not hidden:
                write(text + ("\n" if ended else ""))

        with observe(self.llm, show_tree=self.view.show_tree) as timer:
            run = complete(self.llm.engine, [Request(ids, params)], show)
        [output] = run.outputs
        if self.view.as_json:
            record = output_record(output) | {"interrupted": run.interrupted}
            write(json.dumps(record, ensure_ascii=False) + "\n")
        elif hidden:
            write(output.text + "\n")
        if self.view.stats:
            for stat in stats_lines(run.outputs, self.llm, timer):
                _note(stat)
        return run

    def _say(self, text: str) -> None:
        """A note for a person; a pipe only gets answers."""
        if self.interactive:
            _note(text)


def _note(text: str) -> None:
    print(text, file=sys.stderr)
