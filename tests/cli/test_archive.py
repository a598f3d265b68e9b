"""`draftwood archive`."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from tests.cli.conftest import Call


def test_an_archive(call: Call, tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "tiny.mar"
    answer = call("archive", tiny, "--out", str(out), "--batch-size", "5", "--include-weights")
    assert (answer.code, answer.out) == (0, f"{out}\n")
    with zipfile.ZipFile(out) as archive:
        assert "model/config.json" in archive.namelist()
        assert json.loads(archive.read("draftwood.json"))["model"] is None
        assert b"batchSize: 5" in archive.read("model-config.yaml")


def test_mistakes(call: Call, tiny: str, tmp_path: Path) -> None:
    call("archive", "nothing", "--out", str(tmp_path / "a.mar")).assert_mistake("nothing")
    call("archive", tiny, "--out", str(tmp_path / "a.zip")).assert_mistake("my-model.mar")
