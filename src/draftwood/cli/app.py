"""The entry point: commands, and how every mistake ends in one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from draftwood.bench.cli import app as bench
from draftwood.cli.archive import archive
from draftwood.cli.chat import chat
from draftwood.cli.demo import demo
from draftwood.cli.doctor import doctor
from draftwood.cli.generate import generate
from draftwood.cli.kv import app as kv
from draftwood.cli.options import example
from draftwood.cli.pull import pull
from draftwood.cli.serve import serve
from draftwood.errors import DraftwoodError

USER_ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141

app = typer.Typer(
    name="draftwood",
    help="Lossless speculative decoding over token trees: the same text, sooner.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    epilog=example("draftwood generate smollm2-135m 'def quicksort('"),
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(
    epilog=example(
        "draftwood generate smollm2-135m 'def quicksort(' --stats",
        "draftwood generate smollm2-135m 'The capital of France' --beams 4",
        "draftwood generate smollm2-135m --prompt-file job.jsonl --checkpoint job.saved",
        "draftwood generate smollm2-135m 'Is fire cold?' --chat --choice yes --choice no",
    )
)(generate)
app.command(epilog=example("draftwood chat smollm2-135m --stats"))(chat)
app.command(
    epilog=example(
        "draftwood serve smollm2-135m", "draftwood serve smollm2-135m --port 0 --log-format json"
    )
)(serve)
app.command(epilog=example("draftwood archive ./my-model --out my-model.mar"))(archive)
app.command(epilog=example("draftwood pull smollm2-135m"))(pull)
app.command(epilog=example("draftwood doctor"))(doctor)
app.command(epilog=example("draftwood demo"))(demo)
app.add_typer(bench, name="bench")
app.add_typer(kv, name="kv")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and ends the process: 0, 2 for a mistake, 130 after Ctrl-C."""
    try:
        code = run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        code = BROKEN_PIPE
    if code == BROKEN_PIPE:
        # Whoever read us is gone (`| head`): let the flush at exit go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    command = typer.main.get_command(app)
    try:
        code = command.main(
            None if arguments is None else list(arguments),
            prog_name="draftwood",
            standalone_mode=False,
        )
    except DraftwoodError as error:
        return _mistake(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except SystemExit as end:
        # The framework ends the process itself only when a pipe breaks.
        return BROKEN_PIPE if end.code == 1 else int(end.code or 0)
    except Exception as error:
        message = _usage_message(error)
        if message is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message, end="")  # the help, unless it was shown already
            return 0
        return _mistake(message)
    return _interrupted() if code == INTERRUPTED else int(code or 0)


def _usage_message(error: Exception) -> str | None:
    """What is wrong with the arguments, if that is what the framework says.

    Its exception classes have moved between versions; their method has not.
    """
    message = getattr(error, "format_message", None)
    return None if message is None else str(message())


def _mistake(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return USER_ERROR


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return INTERRUPTED


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"draftwood {version('draftwood')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and leave."
        ),
    ] = False,
) -> None:
    """Lossless speculative decoding over token trees: the same text, sooner."""
