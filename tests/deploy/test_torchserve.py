"""TorchServe: the handler with its shapes, the archive; a real server where there is one."""

from __future__ import annotations

import importlib
import json
import sys
import types
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from draftwood.deploy.torchserve import ArchiveOptions, DraftwoodHandler, write_archive
from draftwood.errors import ConfigError
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model."""
    return str(save_tiny(tmp_path_factory.mktemp("model") / "llama"))


class Context:
    """TorchServe's context, as far as a handler sees it."""

    def __init__(self, folder: Path, count: int = 0) -> None:
        self.system_properties = {"model_dir": str(folder), "gpu_id": None, "batch_size": count}
        self.request_ids = {i: f"id-{i}" for i in range(count)}
        self.status: dict[int, int] = {}
        self.metrics: Any = Metrics()

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Notes the status."""
        assert phrase
        self.status[idx] = code


class Metrics:
    """Counts what is added by name."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add_counter(self, name: str, value: float) -> None:
        """A counter."""
        self.values[name] = self.values.get(name, 0.0) + value

    add_time = add_counter


@pytest.fixture(scope="module")
def unpacked(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that TorchServe makes of an archive."""
    folder = tmp_path_factory.mktemp("store")
    options = ArchiveOptions(batch_size=4, llm={"device": "cpu"})
    path = write_archive(model, folder / "tiny.mar", options, include=True)
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "tiny")
    return folder / "tiny"


@pytest.fixture(scope="module")
def handler(unpacked: Path) -> Iterator[DraftwoodHandler]:
    """The handler as TorchServe loads it: the one class of the archive's module."""
    sys.path.insert(0, str(unpacked))
    module = importlib.import_module("draftwood_handler")
    sys.path.remove(str(unpacked))
    classes = [
        one
        for one in vars(module).values()
        if isinstance(one, type) and one.__module__ == module.__name__
    ]
    [kind] = classes
    handler = kind()
    handler.initialize(Context(unpacked))
    yield handler
    handler.close()


def body(**values: Any) -> dict[str, Any]:
    """A request as TorchServe hands it over: bytes, unless the client said that it is JSON."""
    return {"body": bytearray(json.dumps(values).encode())}


PARAMS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


def test_a_batch_is_one_packed_run(handler: DraftwoodHandler, unpacked: Path, model: str) -> None:
    sampled = {"max_tokens": 9, "ignore_eos": True, "temperature": 0.8, "seed": 3}
    rows = [
        body(prompt="a tree of tokens", **PARAMS),
        {"body": {"prompt": "the quick", **sampled}},
        {"data": "def add("},
        {"body": {"messages": [{"role": "user", "content": "speak"}], **PARAMS}},
    ]
    context = Context(unpacked, 4)
    rounds: list[int] = []
    assert handler._llm is not None
    observer = types.SimpleNamespace(on_round=lambda one: rounds.append(len(one.request_ids)))
    handler._llm.engine.observers.append(observer)
    answers = handler.handle(rows, context)
    handler._llm.engine.observers.remove(observer)
    with LLM(model) as llm:
        params = [SamplingParams(**PARAMS), SamplingParams(**sampled), SamplingParams()]
        whole = llm.generate(["a tree of tokens", "the quick", "def add("], params)
    assert [one["text"] for one in answers[:3]] == [one.text for one in whole]
    assert answers[0]["token_ids"] == list(whole[0].token_ids)
    assert answers[0]["usage"]["completion_tokens"] == 12
    assert max(rounds) == 4, "all requests of the batch in one forward"
    assert context.status == {}
    assert context.metrics.values["DraftwoodBatchRequests"] == 4
    assert context.metrics.values["DraftwoodTokens"] == sum(
        one["usage"]["completion_tokens"] for one in answers
    )


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "banana": 1}, "banana"),
        ({"prompt": "a", "top_k": "x"}, "top_k is 'x'"),
        ({"prompt": ""}, "empty"),
        ({}, "prompt or messages"),
        ({"messages": "a"}, "messages is a list"),
        ({"prompt": [1, "a"]}, "token ids"),
        ({"prompt": [10**6]}, "does not exist"),
        ({"prompt": "a", "n": 2}, "one text"),
    ],
)
def test_a_wrong_request_is_told_and_the_others_are_answered(
    handler: DraftwoodHandler, unpacked: Path, wrong: dict[str, Any], word: str
) -> None:
    context = Context(unpacked, 2)
    bad, good = handler.handle([body(**wrong), body(prompt="a", **PARAMS)], context)
    assert word in bad["error"]
    assert context.status == {0: 400}
    assert good["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("raw", [b"\xff\xfe", None, 7])
def test_a_body_that_is_nothing(handler: DraftwoodHandler, unpacked: Path, raw: object) -> None:
    context = Context(unpacked, 1)
    [answer] = handler.handle([{"body": raw}], context)
    assert "body" in answer["error"]
    assert context.status == {0: 400}


def test_pieces_of_a_stream(
    handler: DraftwoodHandler, unpacked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces go through TorchServe's own call; the whole is not sent again."""
    sent: list[Sequence[str]] = []

    def send(ret: list[str], ids: object, message: str, code: int, context: object) -> None:
        assert code == 200
        sent.append(ret)

    utils = types.ModuleType("ts.handler_utils.utils")
    utils.send_intermediate_predict_response = send  # type: ignore[attr-defined]
    for name in ("ts", "ts.handler_utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "ts.handler_utils.utils", utils)
    rows = [body(prompt="a tree", **PARAMS), body(prompt="a tree", stream=True, **PARAMS)]
    whole, last = handler.handle(rows, Context(unpacked, 2))
    assert last == ""
    assert "".join(pieces[1] for pieces in sent) == whole["text"]
    assert len(sent) > 1
    assert all(pieces[0] == "" for pieces in sent)


def test_no_data_is_no_answer(handler: DraftwoodHandler, unpacked: Path) -> None:
    assert handler.handle(None, Context(unpacked)) == []


def test_the_archive_is_what_torchserve_reads(model: str, tmp_path: Path) -> None:
    path = write_archive(model, tmp_path / "my-model.mar", ArchiveOptions(batch_size=3))
    with zipfile.ZipFile(path) as archive:
        manifest = json.loads(archive.read("MAR-INF/MANIFEST.json"))
        names = set(archive.namelist())
        config = archive.read("model-config.yaml").decode()
        load = json.loads(archive.read("draftwood.json"))
    assert manifest["model"]["modelName"] == "my-model"
    assert manifest["model"]["handler"] in names
    assert manifest["model"]["configFile"] in names
    assert manifest["runtime"] == "python"
    assert "batchSize: 3\n" in config
    assert load == {"model": model, "llm": {}}
    assert not list(tmp_path.glob("*.part"))


def test_mistakes(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match=r"my-model\.mar"):
        write_archive(model, tmp_path / "a b.mar", ArchiveOptions())
    with pytest.raises(ConfigError, match="no folder"):
        write_archive("smollm2-135m", tmp_path / "a.mar", ArchiveOptions(), include=True)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_archive(model, tmp_path / "no" / "a.mar", ArchiveOptions())
    with pytest.raises(ConfigError, match="batch_size"):
        ArchiveOptions(batch_size=0)
