"""What a record says about where it was taken."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest

import draftwood
from draftwood.bench import fingerprint
from draftwood.bench.fingerprint import Neighbours, environment, model_facts
from draftwood.bench.records import Writer, open_writer, read_records
from draftwood.errors import ConfigError
from tests.tiny import hf_model, make_module


def test_the_environment_is_json_and_names_no_host() -> None:
    facts = environment()
    text = json.dumps(facts)
    assert facts["draftwood"] == draftwood.__version__
    assert facts["cpu"]["num_threads"] == 1
    assert platform.node() not in text or len(platform.node()) < 4
    assert str(Path.home()) not in text


def test_a_commit_is_only_told_in_a_checkout(tmp_path: Path) -> None:
    assert fingerprint._commit(tmp_path) is None
    (tmp_path / ".git").mkdir()
    assert fingerprint._commit(tmp_path) is None  # no repository after all


def test_where_the_system_tells_nothing_neither_does_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_text = Path.read_text

    def nothing(path: Path, *arguments: Any, **keywords: Any) -> str:
        if path.is_relative_to("/proc"):
            raise OSError
        return read_text(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "read_text", nothing)
    assert Neighbours().cores() is None
    facts = environment()
    assert facts["cpu"]["flags"] == []
    assert facts["cpu"]["model"]


def test_neighbours_are_what_others_did(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0])
    busy = iter([100.0, 115.0])
    own = iter([5.0, 12.0])
    monkeypatch.setattr(fingerprint, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(fingerprint, "_busy_s", lambda: next(busy))
    monkeypatch.setattr(fingerprint, "process_time", lambda: next(own))
    assert Neighbours().cores() == 0.8  # 15 s of work in 10 s, 7 s of it ours


def test_a_model_is_named_without_its_path(tmp_path: Path) -> None:
    from draftwood.models.hf import HFModel

    folder = tmp_path / "my-model"
    folder.mkdir()
    facts = model_facts(HFModel(make_module("llama"), name=str(folder)).spec)
    assert facts["name"] == "my-model"
    facts = model_facts(hf_model("llama").spec)
    assert (facts["name"], facts["dtype"], facts["device"]) == ("llama", "float32", "cpu")


def test_records_are_on_disk_at_once_and_rounded(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_writer(path) as writer:
        writer.write({"a": 1.23456789, "b": [2 / 3], "c": {"d": "é"}})
        assert read_records(path) == [{"a": 1.23457, "b": [0.666667], "c": {"d": "é"}}]
    with open_writer(None) as writer:
        assert isinstance(writer, Writer)
        writer.write({"a": 1})
    with pytest.raises(ConfigError, match="cannot be written"), open_writer(tmp_path):
        pass
