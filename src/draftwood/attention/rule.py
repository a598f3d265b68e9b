"""What a layer's attention does."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """What a layer's attention does besides the softmax of scaled products.

    Attributes:
        scaling: factor on the products.
        window: how many positions back a row sees, itself included; None for all.
        softcap: scores become `softcap * tanh(scores / softcap)`; None for not.
        sinks: [num_heads] logits of a key that takes weight and gives nothing; None for none.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
