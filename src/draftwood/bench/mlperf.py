"""MLPerf Inference's LoadGen over our engine: its scenarios, its settings, its log files.

LoadGen decides which samples come when, and what counts; we answer. What comes of it are results of
the LoadGen harness, not MLPerf results: those need the benchmark's own model, data, run lengths and
a review.

Two things are done so that nothing is gained from a sample that comes twice: cached prefixes are
forgotten before each request, and samples come in whole permutations, as MLPerf asks for language
models (`sample_concatenate_permutation`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch

from draftwood.engine.engine import Engine
from draftwood.engine.sequence import Sequence as EngineSequence
from draftwood.errors import ConfigError, DraftwoodError, MissingExtraError
from draftwood.sampling import SamplingParams

SCENARIOS = ("Offline", "SingleStream", "Server")
MODES = ("performance", "accuracy")
_TOKEN = np.int32


def loadgen() -> Any:
    """The module `mlperf_loadgen`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return import_module("mlperf_loadgen")
    except ImportError as error:
        raise MissingExtraError("mlcommons-loadgen", "mlperf") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long LoadGen goes on, and what it expects of us.

    Attributes:
        seconds: least duration; MLPerf asks for 600.
        min_queries: least number of queries.
        offline_qps: samples a second that are expected at least; too few, and the one query of the
            offline scenario is too short.
        server_qps: queries a second that are sent.
        latency_ms: of one sample at least; too many, and the single stream runs out of queries.
        samples: in the library.
    """

    seconds: float
    min_queries: int
    offline_qps: float
    server_qps: float
    latency_ms: int
    samples: int

    def user_conf(self, rules: str) -> str:
        """The settings as a user.conf, which stands above mlperf.conf."""
        lines = [
            "# Written by draftwood bench mlperf. Below it stands LoadGen's built-in mlperf.conf,",
            f"# with the rules of {rules}.",
            f"*.*.min_duration = {round(1000 * self.seconds)}",
            f"*.*.min_query_count = {self.min_queries}",
            f"*.*.performance_sample_count_override = {self.samples}",
            f"*.Offline.target_qps = {self.offline_qps:.6g}",
            f"*.Server.target_qps = {self.server_qps:.6g}",
            f"*.SingleStream.target_latency = {self.latency_ms}",
        ]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Conf:
    """Files of settings: LoadGen's built-in mlperf.conf, above it these, the last one on top.

    Attributes:
        user: the user.conf.
        rules: the model of mlperf.conf whose limits apply, such as "llama3_1-8b".
        mlperf: a mlperf.conf of one's own; None for the built-in alone.
    """

    user: Path
    rules: str
    mlperf: Path | None = None

    @property
    def files(self) -> list[Path]:
        """In the order in which they are read."""
        return [*([self.mlperf] if self.mlperf else []), self.user]


def read_settings(conf: Conf, scenario: str) -> Any:
    """LoadGen's settings for a scenario.

    A process of its own reads them: LoadGen counts the files that a process has read, and calls
    results invalid after the second, which here is merely that of another scenario.

    Args:
        conf: the files.
        scenario: of `SCENARIOS`.

    Raises:
        ConfigError: LoadGen refuses them; the message names the file.
    """
    settings = loadgen().TestSettings()
    names = [n for n in dir(settings) if isinstance(getattr(settings, n), bool | int | float)]
    program = (
        "import json, sys, mlperf_loadgen as lg; s = lg.TestSettings();"
        "rules, scenario, files, names = json.loads(sys.argv[1]);"
        "codes = [s.FromConfig(f, rules, scenario, 1) for f in files];"
        "print(json.dumps([codes, {n: getattr(s, n) for n in names}]))"
    )
    files = conf.files
    given = json.dumps([conf.rules, scenario, [str(file) for file in files], names])
    done = subprocess.run(
        [sys.executable, "-c", program, given], capture_output=True, text=True, check=False
    )
    codes, values = json.loads(done.stdout) if done.returncode == 0 else ([1] * len(files), {})
    for file, code in zip(files, codes, strict=True):
        if code != 0 or not file.is_file():
            raise ConfigError(
                f"LoadGen cannot read {file} for {conf.rules}, {scenario}: see user.conf in"
                " MLPerf's documentation"
            )
    for name, value in values.items():
        setattr(settings, name, value)
    return settings


@dataclass(slots=True)
class _Query:
    """A sample that LoadGen waits for."""

    id: int
    seq: EngineSequence
    started: bool = False


@dataclass(slots=True)
class EngineSUT:
    """The system under test: a thread that runs the engine and answers LoadGen.

    Attributes:
        engine: only the thread touches it while it runs.
        samples: token ids; queries name them by their index.
        params: for every sample.
        error: what went wrong; LoadGen got empty answers from then on, so that it ends.
    """

    engine: Engine
    samples: Sequence[Sequence[int]]
    params: SamplingParams
    error: BaseException | None = None
    _waiting: SimpleQueue[tuple[int, int] | None] = field(default_factory=SimpleQueue)
    _running: list[_Query] = field(default_factory=list)
    _thread: Thread | None = None

    def start(self) -> None:
        """Starts the thread, with as many CPU threads as this one has."""
        self._thread = Thread(
            target=self._work, args=(torch.get_num_threads(),), name="mlperf-sut", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread when it has answered everything."""
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()
        self.engine.close()

    def issue(self, queries: Sequence[Any]) -> None:
        """LoadGen's call for samples; returns at once."""
        for query in queries:
            self._waiting.put((query.id, query.index))

    def flush(self) -> None:
        """LoadGen's call that nothing more comes; nothing is held back here."""

    def _work(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # a thread starts with the environment's number
        while True:
            try:
                if not self._take():
                    return
                if self._running:
                    self._step()
            except BaseException as error:  # LoadGen waits for ever for what is not answered
                self.error = self.error or error
                self._give_up()

    def _take(self) -> bool:
        """Queues what LoadGen has asked for since; waits if there is nothing to do. False: end."""
        while True:
            try:
                asked = self._waiting.get(block=not self._running)
            except Empty:
                return True
            if asked is None:
                return False
            self._add(*asked)

    def _add(self, query_id: int, index: int) -> None:
        if self.error is not None:
            _answer("QuerySamplesComplete", query_id, ())
            return
        self.engine.prefix.clear()
        try:
            seq = self.engine.add(self.samples[index], self.params)
        except DraftwoodError as error:
            self.error = error
            _answer("QuerySamplesComplete", query_id, ())
            return
        self._running.append(_Query(query_id, seq))

    def _step(self) -> None:
        self.engine.step()
        for query in list(self._running):
            tokens = query.seq.output_ids
            if tokens and not query.started:
                query.started = True
                _answer("FirstTokenComplete", query.id, tokens[:1])
            if query.seq.finished:
                self._running.remove(query)
                _answer("QuerySamplesComplete", query.id, tokens)

    def _give_up(self) -> None:
        for query in self._running:
            self.engine.abort(query.seq)
            _answer("QuerySamplesComplete", query.id, ())
        self._running.clear()


def _answer(call: str, query_id: int, tokens: Sequence[int]) -> None:
    """Tells LoadGen of tokens; it copies them before it returns."""
    lg = loadgen()
    data = np.asarray(tokens, dtype=_TOKEN)
    response = lg.QuerySampleResponse(query_id, data.ctypes.data, data.nbytes, len(data))
    getattr(lg, call)([response])


def run_test(sut: EngineSUT, scenario: str, mode: str, conf: Conf, folder: Path) -> None:
    """One run of LoadGen; its log files lie in `folder` afterwards.

    Args:
        sut: not started; it is stopped at the end.
        scenario, mode: of `SCENARIOS` and `MODES`.
        conf: the settings.
        folder: made if need be.

    Raises:
        ConfigError: LoadGen refuses the settings.
        DraftwoodError: the engine cannot serve a sample.
    """
    lg = loadgen()
    settings = read_settings(conf, scenario)
    settings.scenario = getattr(lg.TestScenario, scenario)
    settings.mode = {
        "performance": lg.TestMode.PerformanceOnly,
        "accuracy": lg.TestMode.AccuracyOnly,
    }[mode]
    logs = lg.LogSettings()
    folder.mkdir(parents=True, exist_ok=True)
    logs.log_output.outdir = str(folder)
    logs.log_output.copy_summary_to_stdout = False
    logs.enable_trace = False
    sut.start()
    handle = lg.ConstructSUT(sut.issue, sut.flush)
    library = lg.ConstructQSL(len(sut.samples), len(sut.samples), _nothing, _nothing)
    try:
        lg.StartTestWithLogSettings(handle, library, settings, logs, "")
    finally:
        sut.stop()
        lg.DestroyQSL(library)
        lg.DestroySUT(handle)
    if sut.error is not None:
        raise sut.error


def _nothing(indices: Sequence[int]) -> None:
    """Samples are in memory always."""


def read_details(folder: Path) -> dict[str, Any]:
    """What LoadGen's detail log says: key to the last value.

    Raises:
        ConfigError: there is no such log.
    """
    path = folder / "mlperf_log_detail.txt"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    rows = [json.loads(line.partition(" ")[2]) for line in lines if line.startswith(":::MLLOG")]
    return {row["key"]: row["value"] for row in rows}


def read_answers(folder: Path) -> dict[int, tuple[int, ...]]:
    """Sample to its tokens, from the accuracy log of a run."""
    rows = json.loads((folder / "mlperf_log_accuracy.json").read_text(encoding="utf-8"))
    return {
        row["qsl_idx"]: tuple(np.frombuffer(bytes.fromhex(row["data"]), dtype=_TOKEN).tolist())
        for row in rows
    }


def reference_answers(
    engine: Engine,
    samples: Sequence[Sequence[int]],
    params: SamplingParams,
    watch: Callable[[int], None] = lambda done: None,
) -> list[tuple[int, ...]]:
    """What plain decoding says, one sample after the other and without LoadGen.

    Args:
        engine: with no drafter.
        samples: token ids.
        params: for all.
        watch: told how many are done.
    """
    answers = []
    for sample in samples:
        seq = engine.add(sample, params)
        try:
            while not seq.finished:
                engine.step()
        finally:
            engine.close()
        answers.append(tuple(seq.output_ids))
        watch(len(answers))
    return answers
