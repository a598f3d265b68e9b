"""The kernels compiled for this machine and for the plainer ones that users have."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from draftwood.kernels import build

# Compiler targets and the processor flags without which their code cannot run here.
_NEEDS = {
    "alderlake": {"avx_vnni", "avx2", "fma"},
    "x86-64-v3": {"avx2", "fma"},
    "x86-64-v2": {"sse4_2"},
}


def targets() -> list[str]:
    """What the kernels can be compiled for and tested on this machine."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    return ["native", *(target for target, needed in _NEEDS.items() if needed <= flags)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same numbers in every run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that keeps the compiled kernels for the whole session."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(params=targets())
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
