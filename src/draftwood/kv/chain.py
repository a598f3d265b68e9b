"""Names for the blocks of a prompt: a block's name covers its tokens and everything before them.

Whoever gives the same identity, block size, salt and tokens gets the same names, in whatever
process: the prefix index, the stores behind it, and a router that has none of the KV itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

KEY_BYTES = 16


def chained(
    tokens: Sequence[int], block_size: int, identity: bytes, salt: bytes = b""
) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """Yields key and token ids of each full block of `tokens`, in order.

    Args:
        tokens: token ids, from the first one on.
        block_size: tokens in a block.
        identity: everything besides tokens that changes KV (model, revision, dtype, block size).
        salt: separates tenants, who must not see each other's timing.
    """
    key = blake2b(identity + b"\0" + salt, digest_size=KEY_BYTES).digest()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = tuple(tokens[start : start + block_size])
        text = b",".join(b"%d" % token for token in block)
        key = blake2b(key + text, digest_size=KEY_BYTES).digest()
        yield key, block
