"""Other programs beside ours, at the same prompts: who takes part, whose turn it is, who won.

A peer has a `system` ("draftwood", "llama.cpp", ...) and a way to decode. Each system has a plain
way, which the texts of its other ways are compared with: systems hold the weights in different
precisions, so that across systems texts differ and only speeds can be compared.

Everybody gets the same token ids, one prompt at a time, in an order that rotates from prompt to
prompt: a machine that slows down for a while treats all alike. This module starts no program and
knows none; `peer_llama`, `peer_transformers` and `peer_openvino` do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from draftwood.bench.compare import Skip, Watch, make_drafter
from draftwood.bench.contenders import PLAIN, Contender, EngineContender
from draftwood.bench.data import BenchPrompt
from draftwood.bench.difference import Difference, explain
from draftwood.bench.fingerprint import Neighbours
from draftwood.bench.records import Run, RunRecord
from draftwood.bench.summary import cpu_speed, decode_speed, ratios, summarise, total_speed
from draftwood.errors import DraftwoodError
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams

OURS = "draftwood"
LLAMA = "llama.cpp"

_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/'\":]+/)+")
_WARM_UP = "The"
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One way to decode that takes part.

    Attributes:
        contender: what decodes.
        system: the program it belongs to.
        outside: it works in another process, whose time is not ours.
        prompts: ids of the prompts it takes part in; None for all.
        facts: its version, weights and settings, ready for JSON; no paths.
    """

    contender: Contender
    system: str
    outside: bool = False
    prompts: frozenset[str] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What tables call it: a system's plain way has the system's name, ours is "plain"."""
        return self.contender.name

    @property
    def base(self) -> str:
        """The name of its system's plain way."""
        return PLAIN if self.system == OURS else self.system

    def takes(self, prompt: BenchPrompt) -> bool:
        """Whether it runs this prompt."""
        return self.prompts is None or prompt.id in self.prompts


@dataclass(frozen=True, slots=True)
class Absence:
    """Somebody who does not take part, or no longer.

    Attributes:
        name: a peer or a system.
        reason: why, and what to do about it; one line.
    """

    name: str
    reason: str

    def to_json(self) -> dict[str, str]:
        """The fields; files are named without their folders, which are nobody's business."""
        return {"name": self.name, "reason": _FOLDERS.sub("", self.reason)}


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt as everybody gets it."""

    prompt: BenchPrompt
    token_ids: tuple[int, ...]


def our_peers(llm: LLM, drafters: Iterable[str]) -> list[Peer]:
    """Our engine, plain and with each drafter, on the same weights.

    Args:
        llm: with a draft model if "model" is among the drafters.
        drafters: names; "none" is plain decoding, which always takes part.
    """
    peers: list[Peer] = []
    for name in dict.fromkeys(["none", *drafters]):
        engine = llm.make_engine(make_drafter(name, llm, {}))
        contender = EngineContender(PLAIN if name == "none" else name, engine)
        peers.append(Peer(contender=contender, system=OURS))
    return peers


def make_tasks(
    llm: LLM, prompts: Iterable[BenchPrompt], max_tokens: int
) -> tuple[list[Task], list[Skip]]:
    """Encodes prompts once for all; those that our context cannot hold are skipped."""
    tasks: list[Task] = []
    skipped: list[Skip] = []
    limit = llm.engine.max_length
    for prompt in prompts:
        ids = tuple(prompt.encode(llm.tokenizer))
        if len(ids) + max_tokens > limit:
            reason = f"{len(ids)} prompt tokens and {max_tokens} new ones exceed {limit}"
            skipped.append(Skip(prompt.id, reason))
        else:
            tasks.append(Task(prompt, ids))
    return tasks, skipped


@dataclass(slots=True)
class PeerRun:
    """A run in progress, and what has come of it.

    Attributes:
        llm: our model, which judges differences between our own texts.
        peers: who takes part; who fails leaves.
        params: for every prompt; greedy.
        absent: who is missing.
        records, skipped: results so far.
        interrupted: the user stopped it.
    """

    llm: LLM
    peers: list[Peer]
    params: SamplingParams
    absent: list[Absence] = field(default_factory=list)
    records: list[RunRecord] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    interrupted: bool = False

    def start(
        self, tasks: Sequence[Task], on_record: Callable[[RunRecord], None], watch: Watch
    ) -> None:
        """Warms up and runs all prompts; an interrupt ends it with what is done so far.

        Args:
            tasks: in this order.
            on_record: told the results of a prompt as soon as all have run it.
            watch: told (prompt id, peer) before each run.
        """
        try:
            self._warm_up()
            for turn, task in enumerate(tasks):
                for record in self._run_task(turn, task, watch):
                    on_record(record)
                if self.interrupted:
                    return
        except KeyboardInterrupt:
            self.interrupted = True

    def _warm_up(self) -> None:
        """Lets everybody pay for the first run."""
        ids = self.llm.tokenizer.encode(_WARM_UP)
        params = self.params.but(max_tokens=_WARM_UP_TOKENS)
        for peer in list(self.peers):
            self._measure(peer, ids, params)

    def _run_task(self, turn: int, task: Task, watch: Watch) -> list[RunRecord]:
        """The records of one prompt, in the order of their turns."""
        start = turn % len(self.peers)
        runs: dict[str, tuple[Peer, Run, float | None]] = {}
        try:
            for peer in [*self.peers[start:], *self.peers[:start]]:
                watch(task.prompt.id, peer.name)
                if peer.takes(task.prompt):
                    measured = self._measure(peer, task.token_ids, self.params)
                    if measured is not None:
                        runs[peer.name] = (peer, *measured)
        except KeyboardInterrupt:
            self.interrupted = True
        plain = {name: run for name, (_, run, _) in runs.items()}
        records = [
            replace(
                self._record(task, peer, run, plain.get(peer.base)),
                order=order,
                neighbours=neighbours,
            )
            for order, (peer, run, neighbours) in enumerate(runs.values())
        ]
        self.records.extend(records)
        return records

    def _measure(
        self, peer: Peer, ids: Sequence[int], params: SamplingParams
    ) -> tuple[Run, float | None] | None:
        """A run, and how many cores others kept busy meanwhile; None if the peer failed."""
        others = Neighbours()
        try:
            run = peer.contender.run(ids, params)
        except DraftwoodError as error:
            if peer.system == OURS:
                raise
            self.peers.remove(peer)
            self.absent.append(Absence(peer.name, str(error)))
            return None
        busy = others.cores()
        if busy is not None and peer.outside:
            busy = max(busy - run.cpu_s / run.total_s, 0.0) if run.cpu_s else None
        return run, busy

    def _record(self, task: Task, peer: Peer, run: Run, plain: Run | None) -> RunRecord:
        compared = plain is not None and plain is not run
        return RunRecord(
            prompt=task.prompt.id,
            kind=task.prompt.kind,
            contender=peer.name,
            order=0,
            num_prompt_tokens=len(task.token_ids),
            num_tokens=len(run.token_ids),
            first_token_s=run.first_token_s,
            total_s=run.total_s,
            cpu_s=run.cpu_s,
            rounds=run.rounds,
            identical=plain is not None and run.token_ids == plain.token_ids if compared else None,
            difference=self._difference(task, peer, run, plain),
        )

    def _difference(self, task: Task, peer: Peer, run: Run, plain: Run | None) -> Difference | None:
        """Where one of our texts leaves plain decoding: the only ones our model can judge."""
        if plain is None or plain is run or peer.system != OURS:
            return None
        return explain(
            self.llm.model,
            self.llm.pool,
            task.token_ids,
            plain.token_ids,
            run.token_ids,
            self.params,
        )

    def summary(self) -> dict[str, Any]:
        """The `summary` line: like that of a comparison, and ratios to llama.cpp's best way."""
        best = best_of(LLAMA, self.records, self.peers)
        base = [record for record in self.records if record.contender == best]
        contenders = summarise(self.records)
        for name, one in contenders.items():
            own = [record for record in self.records if record.contender == name]
            one["to_llama"] = {
                "decode": ratios(own, base, decode_speed),
                "total": ratios(own, base, total_speed),
                "cpu": ratios(own, base, cpu_speed),
            }
        for peer in self.peers:
            if peer.name in contenders:
                contenders[peer.name] |= {"system": peer.system, "view": peer.contender.view()}
        return {
            "type": "summary",
            "interrupted": self.interrupted,
            "skipped": [{"prompt": one.prompt, "reason": one.reason} for one in self.skipped],
            "absent": [one.to_json() for one in self.absent],
            "best_llama": best,
            "contenders": contenders,
        }


def best_of(system: str, records: Iterable[RunRecord], peers: Iterable[Peer]) -> str | None:
    """The way of a system that decodes fastest (median over prompts); None without records."""
    speeds: dict[str, list[float]] = {peer.name: [] for peer in peers if peer.system == system}
    for record in records:
        speed = decode_speed(record)
        if record.contender in speeds and speed is not None:
            speeds[record.contender].append(speed)
    known = {name: median(values) for name, values in speeds.items() if values}
    return max(known, key=lambda name: known[name]) if known else None


def short(error: BaseException) -> str:
    """An error of another program in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
