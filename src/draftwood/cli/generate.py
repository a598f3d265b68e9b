"""`draftwood generate`: complete one prompt, or many in one batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood.cli import options as opt
from draftwood.cli.groups import Form, Loading, Picking, flat
from draftwood.cli.job import end_job
from draftwood.cli.loading import timed_load
from draftwood.cli.output import Transcript, observe
from draftwood.cli.prompts import Prompt, read_prompts
from draftwood.cli.running import Request, Run, complete, with_room
from draftwood.cli.stats import engine_record, model_record, output_record, stats_lines
from draftwood.errors import ConfigError

if TYPE_CHECKING:
    from draftwood.engine.observers import RoundTimer
    from draftwood.llm import LLM
    from draftwood.sampling import SamplingParams

_DEFAULT_TOKENS = 128

PromptText = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT",
        help="The text to go on from. Left out or -: standard input, as one prompt.",
        show_default=False,
    ),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        help="Many prompts, one a line, in one batch. In a .jsonl file a line is a JSON string, or "
        'an object with "prompt" or "messages" and, if wanted, "id" and "params".',
        show_default=False,
    ),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat/--raw",
        help="Put the prompt into the model's chat template as a user's message; or take it as "
        "it is.",
    ),
]


@flat
def generate(
    model: opt.ModelName,
    prompt: PromptText = None,
    prompt_file: PromptFile = None,
    chat: Chat = False,
    system: opt.System = None,
    *,
    loading: Loading,
    checkpoint: opt.Checkpoint = None,
    checkpoint_every: opt.CheckpointEvery = 5.0,
    picking: Picking,
    beams: opt.Beams = 1,
    length_penalty: opt.LengthPenalty = 1.0,
    early_stopping: opt.EarlyStopping = "false",
    ignore_eos: opt.IgnoreEOS = False,
    form: Form,
    stats: opt.Stats = False,
    show_tree: opt.ShowTree = False,
    as_json: opt.Json = False,
) -> None:
    """Complete a prompt, streaming the text to stdout.

    The prompt is taken as it is; --chat asks the model as a chat partner instead. With --beams
    the text comes when the search has ended. With --checkpoint the same command, run again after
    a crash, goes on where it was and prints everything.
    """
    model_options = loading.of(model, checkpoint=checkpoint, checkpoint_every=checkpoint_every)
    prompts = read_prompts(prompt, prompt_file)
    params = picking.params(
        num_beams=beams,
        length_penalty=length_penalty,
        early_stopping=opt.early_stopping(early_stopping),
        ignore_eos=ignore_eos,
        structured=form.structured,
    )
    all_params = [_own_params(params, one) for one in prompts]
    if show_tree and any(own.num_beams > 1 for own in all_params):
        raise ConfigError("--show-tree shows drafted trees, and beams draft none: leave one out")
    llm, load_s = timed_load(model_options)
    with llm, observe(llm, show_tree=show_tree) as timer:
        requests = [
            _request(llm, one, own, chat=chat, system=system)
            for one, own in zip(prompts, all_params, strict=True)
        ]
        transcript = Transcript(requests, hidden=as_json or show_tree)
        run = complete(llm.engine, requests, transcript.add, llm.checkpoints)
        if as_json:
            record = _record(llm, load_s, requests, run, timer)
            print(json.dumps(record, ensure_ascii=False), flush=True)
        else:
            transcript.finish()
        if llm.checkpoints is not None and not run.interrupted:
            end_job(llm.checkpoints, run.outputs)
    _after(run, stats_lines(run.outputs, llm, timer) if stats else [])


def _own_params(params: SamplingParams, prompt: Prompt) -> SamplingParams:
    """The parameters of one prompt: its own over the command's."""
    values = {f.name: getattr(params, f.name) for f in fields(params)}
    try:
        own = type(params).from_dict(values | prompt.params)
        for name in ("n", "num_return_sequences"):
            if (count := getattr(own, name)) > 1:
                raise ConfigError(
                    f"{name} is {count}: the command line gives one output per prompt"
                )
    except (ConfigError, TypeError) as error:
        if not prompt.params:
            raise
        raise ConfigError(f"{prompt.place}: params: {error}") from error
    return own


def _request(
    llm: LLM, prompt: Prompt, params: SamplingParams, *, chat: bool, system: str | None
) -> Request:
    ids = _encode(llm, prompt, chat=chat, system=system)
    return Request(ids, with_room(llm.engine, len(ids), params, _DEFAULT_TOKENS), prompt.id)


def _encode(llm: LLM, prompt: Prompt, *, chat: bool, system: str | None) -> list[int]:
    if prompt.token_ids is not None:
        return prompt.token_ids
    messages = prompt.messages
    if messages is None and (chat or system):
        messages = [{"role": "user", "content": prompt.text}]
    if messages is None:
        return llm.tokenizer.encode(prompt.text or "")
    before = [{"role": "system", "content": system}] if system else []
    return llm.tokenizer.encode_chat([*before, *messages])


def _record(
    llm: LLM, load_s: float, requests: Sequence[Request], run: Run, timer: RoundTimer
) -> dict[str, Any]:
    outputs = [
        output_record(output, request.id)
        for request, output in zip(requests, run.outputs, strict=True)
    ]
    return {
        **model_record(llm, load_s),
        "outputs": outputs,
        "interrupted": run.interrupted,
        **engine_record(llm, timer),
    }


def _after(run: Run, lines: Sequence[str]) -> None:
    """What comes after the text: on stderr, so that stdout holds the text alone."""
    for line in lines:
        print(line, file=sys.stderr)
    if run.interrupted:
        raise typer.Exit(130)
