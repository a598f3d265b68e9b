"""Gumbel noise without a generator: a pure function of (seed, position, token).

Sampling is written as `argmax(log p + g)` with g standard Gumbel noise (the Gumbel-max trick). As g
depends on nothing but the key, a token can be chosen in any order, on any device, in any batch, and
again after a restart, and it comes out the same. The bits come from SplitMix64's finaliser (Steele,
Lea, Flood 2014, "Fast splittable pseudorandom number generators") applied to a counter.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


def gumbel(seed: int, position: int, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise for each token id at one position.

    Args:
        seed: of the request, 64 bits.
        position: of the token to be chosen, counted from the start of the prompt.
        tokens: integer token ids, any shape and device.

    Returns:
        float64, the shape of `tokens`. Equal on CPU and CUDA to the last bits of a float64
        logarithm; always finite.
    """
    # 52 bits, centred in their cell: never 0 or 1, so both logarithms are finite.
    bits = _shift_right(_hash(stream_key(seed, position), tokens), 12)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def stream_key(seed: int, position: int) -> int:
    """One 64-bit key for a (seed, position) pair, mixed in exact Python integers."""
    return _mix_int((_mix_int(seed & _MASK) + position * _GAMMA) & _MASK)


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK
    return x ^ (x >> 31)


def _hash(key: int, tokens: Tensor) -> Tensor:
    """SplitMix64's output number `token` of the stream that starts at `key`."""
    x = (tokens.to(torch.int64) + 1) * _signed(_GAMMA) + _signed(key)
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A logical shift; torch has only the arithmetic one for int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The same 64 bits as a Python int that fits torch's int64."""
    return x - (1 << 64) if x >= 1 << 63 else x
