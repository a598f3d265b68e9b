"""A whole forward: equal to the single operators, and the same bits in every company."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from draftwood.kernels import ops
from draftwood.kernels.decoder import (
    Decoder,
    DecoderShape,
    DecoderWeights,
    LayerWeights,
    RotaryTable,
)
from draftwood.kernels.packing import pack_int8
from tests.kernels.trees import random_tree

VOCABULARY, SLOTS = 150, 700
SHAPE = DecoderShape(hidden=96, inter=192, heads=6, kv_heads=2, dim=32, eps=1e-6, scale=32**-0.5)


@dataclass
class Toy:
    decoder: Decoder
    rotary: RotaryTable
    keys: Tensor
    values: Tensor

    def run(
        self, ids: Tensor, positions: Tensor, *rows: ops.Rows, wanted: Tensor | None = None
    ) -> Tensor:
        cos, sin = self.rotary.at(positions)
        wanted = torch.arange(len(ids)) if wanted is None else wanted
        layout = ops.Layout(rows)
        return self.decoder.forward(ids, cos, sin, layout, self.keys, self.values, wanted)

    def prefill(self, ids: Tensor, slots: slice | Tensor) -> Tensor:
        return self.run(ids, torch.arange(len(ids)), ops.Rows(len(ids), 0, slots))

    def forget(self) -> None:
        self.keys.fill_(float("nan"))
        self.values.fill_(float("nan"))


def layer(shape: DecoderShape, head_norms: bool) -> LayerWeights:
    q, kv = shape.heads * shape.dim, shape.kv_heads * shape.dim
    norm = lambda n: 1 + 0.1 * torch.randn(n)  # noqa: E731
    matrix = lambda n, k, bias=False: pack_int8(  # noqa: E731
        torch.randn(n, k) * k**-0.5, torch.randn(n) if bias else None
    )
    return LayerWeights(
        attention_norm=norm(shape.hidden),
        mlp_norm=norm(shape.hidden),
        qkv=matrix(q + 2 * kv, shape.hidden, True),
        o=matrix(shape.hidden, q),
        gate_up=matrix(2 * shape.inter, shape.hidden),
        down=matrix(shape.hidden, shape.inter),
        q_norm=norm(shape.dim) if head_norms else None,
        k_norm=norm(shape.dim) if head_norms else None,
    )


@pytest.fixture(params=[False, True], ids=["plain", "head norms"])
def toy(kernels: str, request: pytest.FixtureRequest) -> Toy:
    torch.manual_seed(0)
    layers = [layer(SHAPE, request.param) for _ in range(3)]
    table = pack_int8(torch.randn(VOCABULARY, SHAPE.hidden))
    weights = DecoderWeights(table, layers, torch.ones(SHAPE.hidden), table)
    planes = torch.full((2, 3, SLOTS, SHAPE.kv_heads, SHAPE.dim), float("nan"))
    rotary = RotaryTable(1e4 ** -(torch.arange(0, SHAPE.dim, 2) / SHAPE.dim))
    return Toy(Decoder(SHAPE, weights), rotary, planes[0], planes[1])


def by_operators(toy: Toy, ids: Tensor, positions: Tensor, layout: ops.Layout) -> Tensor:
    """The same forward, operator by operator."""
    shape, weights = SHAPE, toy.decoder.weights
    cos, sin = toy.rotary.at(positions)
    x = ops.quantised_embedding(ids, weights.embedding)
    q_width, kv_width = shape.heads * shape.dim, shape.kv_heads * shape.dim
    for i, one in enumerate(weights.layers):
        qkv = ops.quantised_linear(ops.rms_norm(x, one.attention_norm, shape.eps), one.qkv)
        q, k, v = (
            part.unflatten(1, (-1, shape.dim)).contiguous()
            for part in qkv.split([q_width, kv_width, kv_width], 1)
        )
        if one.q_norm is not None:
            assert one.k_norm is not None
            q = ops.rms_norm(q, one.q_norm, shape.eps)
            k = ops.rms_norm(k, one.k_norm, shape.eps)
        toy.keys[i, : len(ids)] = ops.rope_(k, cos, sin)
        toy.values[i, : len(ids)] = v
        seen = ops.attention(
            ops.rope_(q, cos, sin), toy.keys[i], toy.values[i], layout, shape.scale
        )
        x += ops.quantised_linear(seen.flatten(1), one.o)
        gate_up = ops.quantised_linear(ops.rms_norm(x, one.mlp_norm, shape.eps), one.gate_up)
        x += ops.quantised_linear(ops.silu_mul(gate_up), one.down)
    return ops.quantised_linear(ops.rms_norm(x, weights.norm, shape.eps), weights.head)


def test_equals_the_operators(toy: Toy) -> None:
    ids, positions = torch.randint(0, VOCABULARY, (45,)), torch.arange(45)
    whole = toy.prefill(ids, slice(0, 45))
    layout = ops.Layout([ops.Rows(45, 0, slice(0, 45))])
    toy.forget()
    assert torch.equal(by_operators(toy, ids, positions, layout), whole)


def test_whatever_the_threads(toy: Toy, eager_threads: None) -> None:
    ids = torch.randint(0, VOCABULARY, (300,))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        toy.forget()
        results.append(toy.prefill(ids, slice(0, 300)))
        row = ops.Rows(1, 299, slice(0, 300))
        last = toy.run(ids[299:], torch.tensor([299]), row)
        assert torch.equal(last[0], results[-1][-1])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_one_by_one_and_in_chunks(toy: Toy) -> None:
    ids = torch.randint(0, VOCABULARY, (300,))
    whole = toy.prefill(ids, slice(0, 300))
    for chunk in (1, 7, 64, 299):
        toy.forget()
        parts = [
            toy.run(
                ids[start : start + chunk],
                torch.arange(start, min(300, start + chunk)),
                ops.Rows(min(chunk, 300 - start), start, slice(0, min(300, start + chunk))),
            )
            for start in range(0, 300, chunk)
        ]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("seed", range(6))
def test_trees_with_gaps(toy: Toy, seed: int) -> None:
    """Nodes verified in a random tree, in random slots, as decoded one after the other."""
    torch.manual_seed(seed)
    context, nodes = int(torch.randint(1, 300, (1,))), int(torch.randint(2, 65, (1,)))
    ids = torch.randint(0, VOCABULARY, (context + nodes,))
    slots = torch.randperm(SLOTS)[: context + nodes]
    mask, depths = random_tree(nodes)
    toy.prefill(ids[:context], slots[:context])
    rows = ops.Rows(nodes, context, slots, mask)
    verified = toy.run(ids[context:], context + depths, rows)
    for node in range(0, nodes, 7):
        path = torch.cat([ids[:context], ids[context:][mask[node]]])
        toy.forget()
        plain = toy.prefill(path, slice(3, 3 + len(path)))
        assert torch.equal(plain[-1], verified[node])


def test_batches_and_wanted_rows(toy: Toy) -> None:
    first, second = (torch.randint(0, VOCABULARY, (n,)) for n in (40, 9))
    alone = [toy.prefill(first, slice(0, 40)), toy.prefill(second, slice(50, 59))]
    toy.forget()
    both = toy.run(
        torch.cat([first, second]),
        torch.cat([torch.arange(40), torch.arange(9)]),
        ops.Rows(40, 0, slice(0, 40)),
        ops.Rows(9, 0, slice(50, 59)),
        wanted=torch.tensor([3, 39, 48]),
    )
    assert torch.equal(both, torch.stack([alone[0][3], alone[0][39], alone[1][8]]))


def test_hidden_states(toy: Toy) -> None:
    ids = torch.randint(0, VOCABULARY, (5,))
    cos, sin = toy.rotary.at(torch.arange(5))
    hidden = torch.empty(5, SHAPE.hidden)
    layout = ops.Layout([ops.Rows(5, 0, slice(0, 5))])
    logits = toy.decoder.forward(
        ids, cos, sin, layout, toy.keys, toy.values, torch.tensor([4]), hidden
    )
    assert torch.equal(ops.quantised_linear(hidden[4:], toy.decoder.weights.head), logits)
