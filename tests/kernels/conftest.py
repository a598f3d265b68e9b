"""The kernels compiled for this machine and for the plainer ones that users have."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from draftwood.kernels import build

_X86 = platform.machine().lower() in {"x86_64", "amd64"}
_TARGETS = ["native", "x86-64-v3", "x86-64-v2"] if _X86 else ["native"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same numbers in every run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that keeps the compiled kernels for the whole session."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(params=_TARGETS)
def kernels(
    request: pytest.FixtureRequest, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Loads the kernels for one target and two threads; skips where they cannot be built."""
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(kernel_cache))
    monkeypatch.setenv("DRAFTWOOD_KERNELS_MARCH", request.param)
    monkeypatch.setattr(build, "_outcome", None)
    library = build.load()
    if library is None:
        pytest.skip(str(build.why_unavailable()))
    library.dw_set_grain(ctypes.c_int64(400_000))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield request.param
    torch.set_num_threads(threads)


@pytest.fixture
def eager_threads(kernels: str) -> None:
    """Threads share even the smallest work."""
    library = build.load()
    assert library is not None
    library.dw_set_grain(ctypes.c_int64(1))
