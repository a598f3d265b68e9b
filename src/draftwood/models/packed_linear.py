"""float32 linear layers on CPU with weights laid out once for the matrix kernel.

`F.linear` lays the weights out anew at every call when it gets a few rows, so that verifying a tree
costs as much as decoding its nodes one by one. oneDNN's kernel takes weights that were laid out
before: then 16 rows cost little more than one (docs/benchmarks.md). PyTorch has it as the operator
its own compiler uses when it freezes a model.

Its result for a row has the same bits for any number of rows from 2 on; a single row takes another
path, so it is run as two.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

_EXPECTED_ROWS = 16


class PackedLinear(nn.Module):
    """`nn.Linear` for inference, float32, on CPU.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _EXPECTED_ROWS)
        self._bias = None if bias is None else bias.detach()
        # Modelling code may ask for the shape or type of the weight; its numbers are laid out anew.
        self.weight = torch.empty_like(weight, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        single = rows.shape[0] == 1
        if single:
            rows = rows.expand(2, -1).contiguous()
        y = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        if single:
            y = y[:1]
        shaped: Tensor = y.view(*x.shape[:-1], self.out_features)
        return shaped

    def extra_repr(self) -> str:
        """Sizes, as `nn.Linear` shows them."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def packing_available() -> bool:
    """Whether this PyTorch has the operator and the CPU kernel behind it."""
    try:
        with torch.inference_mode():
            layer = PackedLinear(torch.eye(4), None)
            return bool(torch.equal(layer(torch.eye(4)), torch.eye(4)))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def pack_linears(module: nn.Module) -> int:
    """Replaces every float32 linear layer below `module`; returns how many.

    GPT-2's `Conv1D` is one too, with its weight transposed. The original weights are given up,
    unless they are tied to something else (an embedding).
    """
    if not packing_available():
        return 0
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            packed = _packed(child)
            if packed is not None:
                setattr(parent, name, packed)
                count += 1
    return count


def _packed(layer: nn.Module) -> PackedLinear | None:
    from transformers.pytorch_utils import Conv1D

    if not (type(layer) is nn.Linear or type(layer) is Conv1D):
        return None
    weight = cast(Tensor, layer.weight)
    if weight.dtype != torch.float32:
        return None
    bias = cast(Tensor | None, layer.bias)
    return PackedLinear(weight if type(layer) is nn.Linear else weight.t().contiguous(), bias)
