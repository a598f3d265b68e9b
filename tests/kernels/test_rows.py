"""Norms, rotary embedding, activations and top-k, one row at a time."""

from __future__ import annotations

import pytest
import torch

from draftwood.kernels import ops
from draftwood.kernels.decoder import RotaryTable


@pytest.mark.parametrize("n", [64, 100, 1536])
def test_rms_norm(kernels: str, n: int) -> None:
    x, weight = torch.randn(65, n), torch.randn(n)
    whole = ops.rms_norm(x, weight, 1e-6)
    exact = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-6).sqrt() * weight
    assert torch.allclose(whole.double(), exact, rtol=1e-5, atol=1e-6)
    for rows in (1, 2, 7, 64):
        assert torch.equal(ops.rms_norm(x[:rows], weight, 1e-6), whole[:rows])


def test_rms_norm_adds_the_residual(kernels: str) -> None:
    x, weight, residual = torch.randn(5, 64), torch.randn(64), torch.randn(5, 64)
    total = residual + x
    normed = ops.rms_norm(x, weight, 1e-6, residual=residual)
    assert torch.equal(residual, total)
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (128, 128), (80, 32)])
def test_rope(kernels: str, dim: int, rotary: int) -> None:
    table = RotaryTable(1e4 ** -(torch.arange(0, rotary, 2) / rotary))
    positions = torch.randint(0, 5000, (33,))
    wide = torch.randn(33, 5 * dim)
    x = wide[:, dim : 4 * dim].unflatten(1, (3, dim))
    before = x.double().clone()
    cos, sin = table.at(positions)
    ops.rope_(x, cos, sin)
    half = rotary // 2
    a, b = before[..., :half], before[..., half:rotary]
    c, s = cos[:, None].double(), sin[:, None].double()
    expected = torch.cat([a * c - b * s, b * c + a * s, before[..., rotary:]], -1)
    assert torch.allclose(x.double(), expected, atol=1e-5)


def test_rotary_table_does_not_change_as_it_grows() -> None:
    frequencies = 1e4 ** -(torch.arange(0, 64, 2) / 64)
    positions = torch.arange(700)
    table = RotaryTable(frequencies)
    early = table.at(positions)
    table.at(torch.tensor([20000]))
    late = table.at(positions)
    assert torch.equal(early[0], late[0])
    assert torch.equal(early[1], late[1])
    assert table.at(positions[:0])[0].shape == (0, 32)


@pytest.mark.parametrize("n", [64, 100])
def test_silu_mul(kernels: str, n: int) -> None:
    x = torch.randn(40, 2 * n) * 20
    whole = ops.silu_mul(x)
    exact = torch.nn.functional.silu(x[:, :n].double()) * x[:, n:].double()
    assert torch.allclose(whole.double(), exact, rtol=1e-5, atol=1e-6)
    assert torch.equal(ops.silu_mul(x[3:4]), whole[3:4])


@pytest.mark.parametrize("size", [8, 63, 64, 1000, 50000])
def test_top_k(kernels: str, size: int) -> None:
    x = torch.randn(6, size)
    values, indices = ops.top_k(x, 8)
    expected = x.topk(8)
    assert torch.equal(values, expected.values)
    assert torch.equal(indices, expected.indices)


def test_top_k_takes_the_lowest_index_among_equals(kernels: str) -> None:
    x = torch.randint(0, 4, (20, 3000)).float()
    _, indices = ops.top_k(x, 8)
    for row, found in zip(x, indices, strict=True):
        assert torch.equal(found, torch.sort(row, descending=True, stable=True).indices[:8])
    assert torch.equal(ops.top_k(x, 1)[1][:, 0], torch.tensor(x.numpy().argmax(1)))


def test_top_k_with_infinities_and_nan(kernels: str) -> None:
    """A grammar forbids tokens with minus infinity; they come last, by index."""
    x = torch.full((1, 200), float("-inf"))
    x[0, 150], x[0, 7] = 1.0, float("nan")
    values, indices = ops.top_k(x, 3)
    assert values.tolist() == [[1.0, float("-inf"), float("-inf")]]
    assert indices.tolist() == [[150, 0, 1]]
