"""What every test runs under: KV debug mode, no hub, no silent skips on CI, and the real model."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

# Before draftwood or transformers are imported: rejected slots hold NaN, and no hub is ever asked.
os.environ["DRAFTWOOD_DEBUG_KV"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from hypothesis import HealthCheck, settings

from draftwood.llm import LLM
from draftwood.models.sources import ModelFiles, resolve
from tests.redis_server import Redis, need_redis

# Tiny matrices: a second thread only waits, and on a busy machine it waits long.
torch.set_num_threads(1)

REAL_MODEL = "smollm2-135m"

_common: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("default", max_examples=30, derandomize=True, **_common)
settings.register_profile("thorough", max_examples=2000, **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what uses the real model, and skips what needs a CUDA device where there is none."""
    no_cuda = pytest.mark.skip(reason="no CUDA device")
    not_asked = pytest.mark.skip(reason="DRAFTWOOD_LARGE_MODELS is not set")
    for item in items:
        if {"real_files", "real_llm"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.real_model)
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(no_cuda)
        asked = os.environ.get("DRAFTWOOD_LARGE_MODELS")
        if item.get_closest_marker("large_models") and not asked:
            item.add_marker(not_asked)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """On CI a skipped test is a failed one, but for those that need what CI has not."""
    report = yield
    elsewhere = any(
        item.get_closest_marker(name) for name in ("cuda", "torchserve", "large_models")
    )
    expected = hasattr(report, "wasxfail") or elsewhere
    if report.skipped and os.environ.get("CI") and not expected:
        report.outcome = "failed"
        report.longrepr = f"skipped, which counts as a failure on CI: {report.longrepr}"
    return report


@pytest.fixture(autouse=True, scope="session")
def _no_cost_tables_in_the_users_cache(
    tmp_path_factory: pytest.TempPathFactory,
) -> Generator[None, None, None]:
    """Cost tables of tiny models are nobody's business outside the tests."""
    folder = tmp_path_factory.mktemp("costs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftwood.engine.costs.cache_dir", lambda: folder)
        yield


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Generator[None, None, None]:
    """A command that serves sets up the process's log; the next test has another stderr."""
    loggers = [logging.getLogger(name) for name in ("draftwood", "uvicorn", "opentelemetry")]
    before = [(list(one.handlers), one.level, one.propagate) for one in loggers]
    yield
    for one, (handlers, level, propagate) in zip(loggers, before, strict=True):
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)


@pytest.fixture(scope="session")
def real_files() -> ModelFiles:
    """SmolLM2-135M-Instruct as a folder in the user's cache; fetched when it is not there."""
    return resolve(REAL_MODEL)


@pytest.fixture(scope="session")
def real_llm(real_files: ModelFiles) -> LLM:
    """SmolLM2-135M-Instruct in float32 on the CPU, drafter "auto", KV debug mode on."""
    assert real_files.path.is_dir()
    return LLM(REAL_MODEL, device="cpu", dtype="float32", max_model_len=1024)


@pytest.fixture(scope="session")
def _shared_redis() -> Generator[Redis, None, None]:
    need_redis()
    with tempfile.TemporaryDirectory(prefix="dw-") as folder:
        server = Redis(Path(folder)).start()
        yield server
        server.kill()


@pytest.fixture
def redis_server(_shared_redis: Redis) -> Redis:
    """An empty server that this test leaves running."""
    with _shared_redis.client() as client:
        client.flushall()
    return _shared_redis


@pytest.fixture
def own_redis() -> Generator[Redis, None, None]:
    """A server of this test's own, not started yet: it may be killed."""
    need_redis()
    with tempfile.TemporaryDirectory(prefix="dw-") as folder:
        server = Redis(Path(folder))
        yield server
        server.kill()
