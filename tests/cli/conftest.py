"""A tiny model in a folder, and the command line called in this process."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draftwood.cli.app import run
from tests.tiny import save_tiny


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call of the command line left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must be one JSON value."""
        return json.loads(self.out)

    def assert_mistake(self, *words: str) -> None:
        """Exit code 2, nothing on stdout, and one line on stderr with all of `words`."""
        assert (self.code, self.out) == (2, ""), self
        assert self.err.startswith("error: "), self.err
        assert self.err.count("\n") == 1, self.err
        assert self.err.endswith("\n"), self.err
        for word in words:
            assert word in self.err


Call = Callable[..., Answer]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured costs of tiny models stay out of the user's cache."""
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path_factory.getbasetemp() / "draftwood-cache"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model with a chat template; its context is 256 tokens."""
    return str(save_tiny(tmp_path_factory.mktemp("tiny") / "llama"))


@pytest.fixture(scope="session")
def other_vocabulary(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model with the tokens of two ids exchanged: as many tokens, other strings."""
    folder = save_tiny(tmp_path_factory.mktemp("other") / "llama")
    path = Path(folder) / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="session")
def wordpiece(other_vocabulary: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of another vocabulary whose tokens' text depends on their neighbours."""
    folder = tmp_path_factory.mktemp("wordpiece") / "llama"
    shutil.copytree(other_vocabulary, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return str(folder)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Calls the command line; `stdin` is what comes through the pipe."""

    def call(*arguments: str, stdin: str | bytes = "") -> Answer:
        content = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))
        capsys.readouterr()
        code = run(arguments)
        return Answer(code, *capsys.readouterr())

    return call
