"""A text started on one machine and continued on another stays the same text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftwood.kernels import build, ops
from draftwood.kernels.packing import pack_int8
from tests.kernels.conftest import targets


def results() -> list[Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 336), torch.randn(130, 336)
    keys, values, q = torch.randn(300, 2, 64), torch.randn(300, 2, 64), torch.randn(5, 6, 64)
    layout = ops.Layout([ops.Rows(5, 295, slice(0, 300))])
    return [
        ops.quantised_linear(x, pack_int8(weight)),
        ops.attention(q, keys, values, layout, 0.125),
        ops.rms_norm(x, weight[0], 1e-6),
        ops.silu_mul(x),
    ]


def test_the_same_bits_wherever_fma_exists(
    kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(kernel_cache))
    found: dict[str, list[Tensor]] = {}
    for target in targets():
        monkeypatch.setenv("DRAFTWOOD_KERNELS_MARCH", target)
        monkeypatch.setattr(build, "_outcome", None)
        if build.load() is None:
            pytest.skip(str(build.why_unavailable()))
        found.setdefault(ops.instruction_set(), results())
    found.pop("portable", None)
    first, *others = found.values() or [[]]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
