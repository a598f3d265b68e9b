"""Quantised linear layers against float64, and the same bits for every number of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.kernels import ops
from draftwood.kernels.packing import (
    pack_int4,
    pack_int8,
    rotate_groups,
    unpack_int4,
    unpack_int8,
)

SHAPES = [(64, 64, 32), (100, 77, 32), (200, 576, 128), (576, 240, 128), (130, 112, 48)]


def quantised(x: torch.Tensor, group: int) -> torch.Tensor:
    """What the kernels make of activations, in float64."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % 16))
    parts = []
    for part in rotate_groups(x, group).split(group, 1):
        scale = part.abs().amax(1, keepdim=True).double() / 127
        parts.append((part / scale).round().clamp(-127, 127) * scale)
    return rotate_groups(torch.cat(parts, 1).float(), group).double()


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_linear(kernels: str, n: int, k: int, group: int) -> None:
    torch.manual_seed(n)
    x = torch.randn(70, k) * torch.logspace(-3, 3, 70)[:, None]
    bias = torch.randn(n)
    packed = pack_int8(torch.randn(n, k), bias, group)
    whole = ops.quantised_linear(x, packed)
    expected = quantised(x, group)[:, :k] @ unpack_int8(packed).double().T + bias
    # A value that lies between two integers may be rounded to the other one.
    step = x.abs().amax(1, keepdim=True) * packed.scale.max() * 127
    assert ((whole - expected).abs() / (step + 1)).max() < 0.15
    assert (whole - expected).abs().median() < 1e-3
    for rows in range(1, 71):
        assert torch.equal(ops.quantised_linear(x[:rows], packed), whole[:rows])
        assert torch.equal(ops.quantised_linear(x[rows - 1 : rows], packed), whole[rows - 1 : rows])
    order = torch.randperm(70)
    assert torch.equal(ops.quantised_linear(x[order], packed), whole[order])


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_linear_with_4_bits(kernels: str, n: int, k: int, group: int) -> None:
    torch.manual_seed(n)
    x, bias = torch.randn(70, k), torch.randn(n)
    packed = pack_int4(torch.randn(n, k), bias, group)
    whole = ops.quantised_linear(x, packed)
    expected = quantised(x, group)[:, :k] @ unpack_int4(packed).double().T + bias
    step = x.abs().amax(1, keepdim=True) * packed.group_scale.max() * 8
    assert ((whole - expected).abs() / (step + 1)).max() < 0.15
    assert (whole - expected).abs().median() < 1e-3
    for rows in (1, 2, 3, 6, 7, 13, 64, 65):
        assert torch.equal(ops.quantised_linear(x[:rows], packed), whole[:rows])
        assert torch.equal(ops.quantised_linear(x[rows - 1 : rows], packed), whole[rows - 1 : rows])


def test_whatever_the_threads(kernels: str, eager_threads: None) -> None:
    torch.manual_seed(0)
    x, packed = torch.randn(9, 256), pack_int8(torch.randn(500, 256))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(ops.quantised_linear(x, packed))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_extreme_bytes_do_not_saturate(kernels: str) -> None:
    """Sums of products at the ends of both ranges stay exact (16-bit pairs would overflow)."""
    k = 256
    spike = torch.zeros(1, k)
    spike[0, ::128] = 1.0  # turned: constant, so every activation byte is 127
    packed = pack_int8(spike.repeat(64, 1) * 3)
    y = ops.quantised_linear(spike * 5, packed)
    assert torch.allclose(y, torch.full_like(y, 30.0), rtol=1e-6)


def test_zero_and_tiny_rows(kernels: str) -> None:
    packed = pack_int8(torch.randn(64, 128))
    x = torch.zeros(3, 128)
    x[1] = 1e-38
    y = ops.quantised_linear(x, packed)
    assert torch.equal(y, torch.zeros(3, 64))
    assert torch.equal(ops.quantised_linear(x[:0], packed), torch.empty(0, 64))


def test_a_row_of_nan_spoils_no_other(kernels: str) -> None:
    x, packed = torch.randn(8, 128), pack_int8(torch.randn(64, 128))
    clean = ops.quantised_linear(x, packed)
    x[3] = float("nan")
    others = [row for row in range(8) if row != 3]
    assert torch.equal(ops.quantised_linear(x, packed)[others], clean[others])


def test_embedding(kernels: str) -> None:
    table = torch.randn(300, 176)
    packed = pack_int8(table)
    ids = torch.tensor([0, 299, 5, 5, 64])
    rows = ops.quantised_embedding(ids, packed)
    assert torch.allclose(rows, unpack_int8(packed)[ids], atol=1e-5)
    assert (rows - table[ids]).abs().max() < 0.05
    assert torch.equal(ops.quantised_embedding(ids[2:3], packed), rows[2:3])


@given(st.integers(1, 40), st.integers(1, 20))
def test_turning_twice_is_nothing(columns: int, sixteenths: int) -> None:
    group = 16 * min(sixteenths, 16)
    x = torch.randn(3, 16 * columns)
    turned = rotate_groups(x, group)
    assert torch.allclose(rotate_groups(turned, group), x, atol=1e-5)
    assert torch.allclose(turned @ turned.T, x @ x.T, rtol=1e-4, atol=1e-3)


def test_packing_keeps_the_weights() -> None:
    weight = torch.randn(130, 77)
    packed = pack_int8(weight, torch.ones(130), 64)
    assert (unpack_int8(packed) - weight).abs().max() < 0.05
    assert packed.weight.shape == (3, 20, 64, 4)
    assert packed.bias is not None
    assert len(packed.bias) == len(packed.scale) == 192


def test_packing_into_4_bits_keeps_the_weights_roughly() -> None:
    """The error of the best 4-bit grid for normal weights is near a tenth; one scale is not."""
    weight = torch.randn(130, 272)
    weight[7] *= 100
    packed = pack_int4(weight, torch.ones(130), 64)
    error = (unpack_int4(packed) - weight).norm(dim=1) / weight.norm(dim=1)
    assert 0.05 < error.min() < error.max() < 0.13
    assert packed.weight.shape == (3, 34, 64, 4)
    assert packed.num_bytes == 3 * 34 * 256 + 3 * 5 * 256


def test_a_group_of_zeros_stays_zero() -> None:
    weight = torch.randn(64, 128)
    weight[:, :64] = 0
    assert torch.equal(unpack_int4(pack_int4(weight, group=64))[:, :64], weight[:, :64])
