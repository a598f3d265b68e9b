"""Activations that give an element the same bits wherever it stands in its tensor.

PyTorch computes SiLU, the tanh form of GELU and the sigmoid in vectors, and what is left at the end
of a thread's share in another way whose last bit may differ. Where a share ends depends on how many
rows there are, so a row among others could differ from the row alone: with three threads or more at
a width of 4,864, with one at a width of 48. Written with exp and tanh, which PyTorch computes alike
everywhere, and with sums, products and quotients, which are rounded alike everywhere, they do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

_GELU_SCALE = math.sqrt(2 / math.pi)
_QUICK_GELU_SCALE = 1.702


class _Exact(nn.Module):
    """An activation computed by a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        """The activation of each element."""
        return self._function(x)


def make_row_exact(module: nn.Module) -> int:
    """Replaces the activations below `module` that are not exact; returns how many.

    Those that stand in a model's code as functions stay: mixtures of experts have such.
    """
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            function = _function_of(child)
            if function is not None:
                setattr(parent, name, _Exact(function))
                count += 1
    return count


def _function_of(layer: nn.Module) -> Callable[[Tensor], Tensor] | None:
    from transformers import activations as acts

    known: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
        nn.SiLU: _silu,
        acts.SiLUActivation: _silu,
        acts.GELUTanh: _gelu_tanh,
        acts.QuickGELUActivation: _quick_gelu,
        nn.Sigmoid: _sigmoid,
    }
    return known.get(type(layer))


def _silu(x: Tensor) -> Tensor:
    return x / x.neg().exp_().add_(1.0)


def _sigmoid(x: Tensor) -> Tensor:
    return x.neg().exp_().add_(1.0).reciprocal_()


def _quick_gelu(x: Tensor) -> Tensor:
    return x / (x * -_QUICK_GELU_SCALE).exp_().add_(1.0)


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = (x * x).mul_(x).mul_(0.044715).add_(x).mul_(_GELU_SCALE)
    return torch.tanh_(inner).add_(1.0).mul_(x).mul_(0.5)
