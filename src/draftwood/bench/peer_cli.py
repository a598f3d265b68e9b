"""`draftwood bench peers`: ours beside other programs, in one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood.bench.options import (
    AsJson,
    Data,
    Draft,
    Limit,
    Model,
    Out,
    drafter_list,
    load_llm,
    use_threads,
)
from draftwood.bench.output import print_json, progress_bar
from draftwood.errors import ConfigError

if TYPE_CHECKING:
    from draftwood.bench.peers import Absence, Peer, PeerRun, Task
    from draftwood.bench.records import Writer
    from draftwood.llm import LLM

_Threads = Annotated[
    int | None, typer.Option(help="CPU threads of each.", show_default="one for each core")
]
_Ways = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated: plain, draft-N, draft-N-P, ngram-TYPE, ngram-TYPE-N-M.",
        show_default="plain,draft-3,draft-8-0.75,ngram-simple,ngram-simple-4-8",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Others:
    """Which other programs take part, as the user said it."""

    model: str
    draft: str | None
    gguf: Path | None
    draft_gguf: Path | None
    llama_server: str | None
    llama_ways: str | None
    llama_env: Sequence[str]
    transformers: bool
    transformers_limit: int | None
    transformers_dtype: str
    openvino: bool
    openvino_model: Path | None
    openvino_draft: Path | None


def peers(
    model: Model,
    draft: Draft = None,
    drafters: Annotated[
        str | None, typer.Option(help="Comma-separated.", show_default="auto; model with --draft")
    ] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(help="For llama.cpp.", show_default="that of the packaged model"),
    ] = None,
    draft_gguf: Annotated[
        Path | None,
        typer.Option(help="Its draft model.", show_default="that of the packaged draft model"),
    ] = None,
    llama_server: Annotated[
        str | None, typer.Option(help="The program.", show_default="that on PATH")
    ] = None,
    llama_ways: _Ways = None,
    llama_env: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for its servers; can be repeated.")
    ] = None,
    transformers: Annotated[bool, typer.Option(help="transformers takes part.")] = True,
    transformers_limit: Annotated[
        int | None,
        typer.Option(help="Prompts it runs, as it is slow.", show_default="all", min=1),
    ] = None,
    transformers_dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    openvino: Annotated[bool, typer.Option(help="OpenVINO GenAI takes part.")] = True,
    openvino_model: Annotated[
        Path | None,
        typer.Option(help="A folder in its format, or a .gguf.", show_default="the .gguf"),
    ] = None,
    openvino_draft: Annotated[
        Path | None, typer.Option(help="A folder in OpenVINO's format: its draft model.")
    ] = None,
    data: Data = None,
    limit: Limit = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens per prompt.", min=1)] = 128,
    threads: _Threads = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Measure other programs beside this one: llama.cpp, transformers, OpenVINO GenAI.

    All take turns at the same prompts, given as the same token ids, greedily. Shown are speeds, ratios to our plain decoding and to llama.cpp's best way, and whether each one's texts are those of its own plain decoding. None is needed: who is missing is named. Ctrl-C ends early and shows what was measured until then.
    """  # noqa: E501
    from draftwood.bench.peer_llama_server import ended_by_signals
    from draftwood.bench.records import open_writer

    others = _Others(
        model=model,
        draft=draft,
        gguf=gguf or _gguf_of(model),
        draft_gguf=draft_gguf or (_gguf_of(draft) if draft else None),
        llama_server=llama_server,
        llama_ways=llama_ways,
        llama_env=llama_env or (),
        transformers=transformers,
        transformers_limit=transformers_limit,
        transformers_dtype=transformers_dtype,
        openvino=openvino,
        openvino_model=openvino_model,
        openvino_draft=openvino_draft,
    )
    names = _names(drafters, draft)
    use_threads(threads)
    with open_writer(out) as writer, ended_by_signals(), ExitStack() as stack:
        run, tasks = _prepare(others, names, data, limit, max_tokens, stack, writer)
        summary = _run(run, tasks, writer)
    _show(summary, as_json)
    if run.interrupted:
        raise typer.Exit(130)


def _names(drafters: str | None, draft: str | None) -> list[str]:
    names = drafter_list(drafters or ("auto,model" if draft else "auto"), draft)
    if "oracle" in names:
        raise ConfigError("drafter 'oracle' measures the engine alone: it is for bench compare")
    return names


def _prepare(
    others: _Others,
    names: Sequence[str],
    data: Path | None,
    limit: int | None,
    max_tokens: int,
    stack: ExitStack,
    writer: Writer,
) -> tuple[PeerRun, list[Task]]:
    """Loads our model and gathers everybody; `stack` lets them go."""
    from draftwood.bench.data import load_prompts
    from draftwood.bench.fingerprint import head_line
    from draftwood.bench.peers import Peer, PeerRun, make_tasks, our_peers
    from draftwood.sampling import SamplingParams

    prompts = load_prompts(data, limit)
    llm = load_llm(others.model, draft=others.draft)
    tasks, skipped = make_tasks(llm, prompts, max_tokens)
    run = PeerRun(llm, our_peers(llm, names), SamplingParams(max_tokens=max_tokens, temperature=0))
    run.skipped += skipped
    with _waiting():
        for one in _gather(others, llm, tasks, max_tokens, stack):
            if isinstance(one, Peer):
                run.peers.append(one)
            else:
                run.absent.append(one)
    facts = {
        "params": asdict(run.params),
        "prompts": {"source": data.name if data else "packaged", "count": len(prompts)},
        "peers": {peer.name: {"system": peer.system, **peer.facts} for peer in run.peers},
        "absent": [one.to_json() for one in run.absent],
    }
    writer.write(head_line(llm, "peers", **facts))
    return run, tasks


def _gather(
    others: _Others, llm: LLM, tasks: Sequence[Task], max_tokens: int, stack: ExitStack
) -> Iterator[Peer | Absence]:
    """The other programs, each started when it is asked for."""
    longest = max((len(task.token_ids) for task in tasks), default=0)
    yield from _llama(others, llm, longest + max_tokens, stack)
    if others.openvino:
        yield from _openvino(others)
    if others.transformers:
        yield from _transformers(others, llm, tasks)


def _llama(others: _Others, llm: LLM, context: int, stack: ExitStack) -> Iterator[Peer | Absence]:
    import torch

    from draftwood.bench import peer_llama
    from draftwood.bench.peers import LLAMA, Absence

    program = peer_llama.find_server(others.llama_server)
    if program is None:
        yield Absence(LLAMA, peer_llama.HOW_TO_GET)
        return
    if others.gguf is None:
        yield Absence(LLAMA, "no .gguf of this model: give --gguf")
        return
    if others.llama_ways is None:
        ways = [w for w in peer_llama.WAYS if others.draft_gguf or not w.startswith("draft")]
    else:
        ways = [way.strip() for way in others.llama_ways.split(",") if way.strip()]
    settings = peer_llama.LlamaSettings(
        program=program,
        weights=_existing("--gguf", others.gguf),
        draft=_existing("--draft-gguf", others.draft_gguf) if others.draft_gguf else None,
        ways=ways,
        context=context,
        threads=torch.get_num_threads(),
        device=llm.model.spec.device,
        environment=_environment(others.llama_env),
    )
    yield from peer_llama.llama_peers(settings, llm.tokenizer, stack)


def _environment(assignments: Sequence[str]) -> dict[str, str]:
    pairs = [assignment.partition("=") for assignment in assignments]
    for name, sign, _ in pairs:
        if not name or not sign:
            raise ConfigError(f"llama-env is {name!r}: give NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _openvino(others: _Others) -> Iterator[Peer | Absence]:
    import torch

    from draftwood.bench.peer_openvino import OPENVINO, OpenVinoSettings, openvino_peers
    from draftwood.bench.peers import Absence

    weights, draft = others.openvino_model or others.gguf, others.openvino_draft
    if weights is None:
        yield Absence(OPENVINO, "no model that it reads: give --openvino-model")
        return
    settings = OpenVinoSettings(
        weights=_existing("--openvino-model", weights),
        draft=_existing("--openvino-draft", draft) if draft else None,
        threads=torch.get_num_threads(),
        prompts=None,
    )
    yield from openvino_peers(settings)


def _transformers(others: _Others, llm: LLM, tasks: Sequence[Task]) -> Iterator[Peer | Absence]:
    import torch

    from draftwood.bench.data import spread
    from draftwood.bench.peer_transformers import TransformersSettings, transformers_peers

    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if others.transformers_dtype not in kinds:
        raise ConfigError(
            f"transformers-dtype is {others.transformers_dtype!r}: use one of {', '.join(kinds)}"
        )
    prompts, limit = [task.prompt for task in tasks], others.transformers_limit
    taken = prompts if limit is None or not prompts else spread(prompts, limit)
    settings = TransformersSettings(
        model=others.model,
        draft=others.draft,
        dtype=kinds[others.transformers_dtype],
        device=llm.model.spec.device,
        eos_token_ids=llm.tokenizer.eos_token_ids,
        prompts=frozenset(prompt.id for prompt in taken),
    )
    yield from transformers_peers(settings)


def _gguf_of(model: str) -> Path | None:
    """The `.gguf` that a name stands for, where there is one."""
    from draftwood.models.packaged import PACKAGED

    path = PACKAGED[model].gguf_path if model in PACKAGED else Path(model).expanduser()
    return path if path.suffix.lower() == ".gguf" and path.is_file() else None


def _existing(option: str, path: Path) -> Path:
    if not path.exists():
        raise ConfigError(f"{path} does not exist: {option} takes a model")
    return path.absolute()


def _run(run: PeerRun, tasks: Sequence[Task], writer: Writer) -> dict[str, Any]:
    for skip in run.skipped:
        writer.write({"type": "skip", **asdict(skip)})
    with progress_bar(len(tasks) * len(run.peers)) as watch:
        run.start(tasks, lambda record: writer.write(record.to_json()), watch)
    summary = run.summary()
    writer.write(summary)
    return summary


def _waiting() -> Any:
    """A note on stderr while it is a terminal: servers take seconds to load."""
    from rich.console import Console

    return Console(stderr=True).status("starting the other programs")


def _show(summary: dict[str, Any], as_json: bool) -> None:
    from draftwood.bench.peer_table import peer_tables
    from draftwood.bench.tables import console

    if as_json:
        print_json(summary)
    else:
        console().print(peer_tables(summary))
