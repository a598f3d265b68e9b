"""Random trees for the tests of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def random_tree(num_nodes: int) -> tuple[Tensor, Tensor]:
    """Ancestor mask [T, T] (self included) and depths [T] of a random tree, parents first."""
    mask = torch.eye(num_nodes, dtype=torch.bool)
    for node in range(1, num_nodes):
        mask[node] |= mask[int(torch.randint(max(0, node - 6), node, (1,)))]
    return mask, mask.sum(1) - 1
