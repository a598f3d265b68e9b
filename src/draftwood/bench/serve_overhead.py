"""What serving over HTTP costs: the same texts from one engine, in process and over HTTP.

One request at a time, the two ways in turns, decoded plainly: a round is then as short as it can
be, and what HTTP adds to each is the largest share. A single `LLM` does both, in this process, on
its engine's thread, as two copies of a model in memory are rarely equally fast. The client is a
process of its own; where it shares the processors with the engine, what it takes counts.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

from draftwood.bench.data import BenchPrompt
from draftwood.bench.sse import Target, Timed, ask
from draftwood.errors import ConfigError
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams

if TYPE_CHECKING:
    from draftwood.serve.run import Server
    from draftwood.serve.worker import Worker

_PATH = "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadPair:
    """One `overhead_pair` line: a prompt, both ways.

    Attributes:
        prompt: its id.
        num_tokens: of the text.
        process_s, http_s: seconds from the request to the last token.
        process_cpu_s, http_cpu_s: seconds that this process's threads worked, the client's not.
        same_text: whether both texts are equal.
    """

    prompt: str
    num_tokens: int
    process_s: float
    http_s: float
    process_cpu_s: float
    http_cpu_s: float
    same_text: bool

    def to_json(self) -> dict[str, Any]:
        """The line's fields."""
        return {"type": "overhead_pair", **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """The `overhead` line.

    Attributes:
        process_s, http_s, process_cpu_s, http_cpu_s: seconds a token, medians over pairs.
        ratio, cpu_ratio: over HTTP against in process; medians of the pairs' ratios.
        num_pairs, num_same_texts: how many there were.
    """

    process_s: float
    http_s: float
    process_cpu_s: float
    http_cpu_s: float
    ratio: float
    cpu_ratio: float
    num_pairs: int
    num_same_texts: int

    def to_json(self) -> dict[str, Any]:
        """The line's fields."""
        return {"type": "overhead", **asdict(self)}


def measure(
    llm: LLM,
    prompts: Sequence[BenchPrompt],
    *,
    max_tokens: int,
    num_rounds: int,
    watch: Callable[[OverheadPair], None] = lambda pair: None,
) -> Overhead:
    """Generates every prompt so many times both ways.

    Args:
        llm: the model; its engine must be idle, and nobody else may use it meanwhile.
        prompts: their first turns, as plain texts.
        max_tokens: of each text, whatever the model would say.
        num_rounds: over all prompts; who goes first alternates.
        watch: told every pair.

    Raises:
        ConfigError: a text did not come.
    """
    pairs = []
    with _serving(llm) as (server, url), _client() as client:
        both = _Both(llm, server, Target.of(url), client, max_tokens)
        both.pair(prompts[0], http_first=True)  # warms both ways
        for turn in range(num_rounds):
            for place, prompt in enumerate(prompts):
                pairs.append(both.pair(prompt, http_first=(turn + place) % 2 == 1))
                watch(pairs[-1])
    return summarise(pairs)


def summarise(pairs: Sequence[OverheadPair]) -> Overhead:
    """The medians of pairs."""
    median = statistics.median
    return Overhead(
        process_s=median(pair.process_s / pair.num_tokens for pair in pairs),
        http_s=median(pair.http_s / pair.num_tokens for pair in pairs),
        process_cpu_s=median(pair.process_cpu_s / pair.num_tokens for pair in pairs),
        http_cpu_s=median(pair.http_cpu_s / pair.num_tokens for pair in pairs),
        ratio=median(pair.http_s / pair.process_s for pair in pairs),
        cpu_ratio=median(pair.http_cpu_s / pair.process_cpu_s for pair in pairs),
        num_pairs=len(pairs),
        num_same_texts=sum(pair.same_text for pair in pairs),
    )


@dataclass(frozen=True, slots=True)
class _Took:
    text: str
    num_tokens: int
    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class _Both:
    """Generates in process and over HTTP, with nothing kept from one time to the next."""

    llm: LLM
    server: Server
    target: Target
    client: ProcessPoolExecutor
    max_tokens: int

    def pair(self, prompt: BenchPrompt, *, http_first: bool) -> OverheadPair:
        """One prompt, both ways."""
        text = prompt.turns[0]
        if http_first:
            http, ours = self._over_http(text), self._in_process(text)
        else:
            ours, http = self._in_process(text), self._over_http(text)
        return OverheadPair(
            prompt=prompt.id,
            num_tokens=ours.num_tokens,
            process_s=ours.seconds,
            http_s=http.seconds,
            process_cpu_s=ours.cpu_s,
            http_cpu_s=http.cpu_s,
            same_text=ours.text == http.text,
        )

    def _in_process(self, text: str) -> _Took:
        return self._worker.call(lambda: self._generate(text)).result()

    @property
    def _worker(self) -> Worker:
        from draftwood.serve.worker import Worker

        assert isinstance(self.server.worker, Worker)
        return self.server.worker

    def _generate(self, text: str) -> _Took:
        """As a program that uses the library: nobody observes the engine."""
        engine = self.llm.engine
        engine.prefix.clear()
        observers, engine.observers[:] = list(engine.observers), []
        params = SamplingParams(max_tokens=self.max_tokens, ignore_eos=True, speculation=False)
        begin, cpu = perf_counter(), process_time()
        try:
            [output] = self.llm.generate(text, params)
            seconds, cpu = perf_counter() - begin, process_time() - cpu
        finally:
            engine.observers[:] = observers
        return _Took(output.text, len(output.token_ids), seconds, cpu)

    def _over_http(self, text: str) -> _Took:
        """As a client that streams."""
        self._worker.call(self.llm.engine.prefix.clear).result()
        body = {
            "prompt": text,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "speculation": False,
            "stream": True,
        }
        cpu = process_time()
        answer = self.client.submit(_ask, self.target, body).result()
        cpu = process_time() - cpu
        if answer.status != 200:
            raise ConfigError(f"the server gave no text: HTTP {answer.status}")
        pieces = [event["choices"][0]["text"] for _, event in answer.json()]
        return _Took("".join(pieces), 0, answer.events[-1][0] - answer.begin, cpu)


def _ask(target: Target, body: dict[str, Any]) -> Timed:
    """In the client's process."""
    return asyncio.run(ask(target, "POST", _PATH, body))


@contextmanager
def _client() -> Iterator[ProcessPoolExecutor]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as pool:
        yield pool


@contextmanager
def _serving(llm: LLM) -> Iterator[tuple[Server, str]]:
    """The model behind HTTP, by a thread of this process, and its address."""
    from draftwood.serve.access import ApiKeys
    from draftwood.serve.run import bind, url_of
    from draftwood.serve.start import ServeOptions, make_server

    ready = threading.Event()
    with bind("127.0.0.1", 0) as sock:
        options = ServeOptions(names=("bench",), keys=ApiKeys(()))
        server = make_server(llm, options, sock, ready.set)
        thread = threading.Thread(target=server.run, name="draftwood-http")
        thread.start()
        try:
            while not ready.wait(0.1):
                if not thread.is_alive():
                    raise ConfigError("the server did not start")
            yield server, url_of(sock)
        finally:
            server.ask_to_stop(0)
            thread.join()
