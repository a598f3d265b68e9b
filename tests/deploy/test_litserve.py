"""LitServe's adapter, where LitServe is installed, and what is said where it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from draftwood.errors import MissingExtraError
from tests.tiny import save_tiny


def test_without_litserve_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "litserve", None)
    monkeypatch.delitem(sys.modules, "draftwood.deploy.litserve", raising=False)
    with pytest.raises(MissingExtraError, match=r"draftwood\[litserve\]"):
        import draftwood.deploy.litserve  # noqa: F401


class _Api:
    """`litserve.LitAPI` as the adapter needs it: its base, and nothing of its server."""

    def __init__(self, **options: object) -> None:
        self.options = options


def test_a_batch_and_a_wrong_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import types

    litserve = types.ModuleType("litserve")
    litserve.LitAPI = _Api  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "litserve", litserve)
    monkeypatch.delitem(sys.modules, "draftwood.deploy.litserve", raising=False)
    from draftwood.deploy.litserve import DraftwoodAPI

    api = DraftwoodAPI(str(save_tiny(tmp_path / "m")), max_batch_size=4)
    assert api.options == {"max_batch_size": 4}  # type: ignore[attr-defined]
    api.setup("cpu")
    bodies = [{"prompt": "a", "max_tokens": 5, "ignore_eos": True}, {"prompt": "a", "top_p": 0}]
    good, bad = api.unbatch(api.predict(api.batch(bodies)))
    assert api.encode_response(good)["usage"]["completion_tokens"] == 5
    refusal = api.encode_response(bad)
    assert (refusal.status_code, b"top_p" in refusal.body) == (400, True)
    assert api.predict(bodies[0]).status == 200
    monkeypatch.delitem(sys.modules, "draftwood.deploy.litserve")
