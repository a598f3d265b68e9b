"""Which blocks already hold the KV of a prompt's beginning.

Full blocks of finished or running requests are published under a chained hash: a block's key covers
its own tokens and everything before them. The index holds one reference to each published block and
gives the least recently used ones back when the pool runs dry. Token ids are compared on a hit, so
that a hash collision costs a recomputation and never a wrong text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from draftwood.kv.chain import chained
from draftwood.kv.pool import BlockPool


@dataclass(slots=True)
class Entry:
    """A published block: its number, whose KV it holds, and whether the draft's is there too."""

    block: int
    tokens: tuple[int, ...]
    has_draft: bool


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks that hold the beginning of a prompt.

    Attributes:
        blocks: block numbers, in order; the caller has one more reference to each.
        num_draft_blocks: how many of the first ones hold the draft's KV too.
    """

    blocks: tuple[int, ...]
    num_draft_blocks: int


class PrefixSink(Protocol):
    """Who keeps blocks for longer than the pool does."""

    def saw(self, entries: Sequence[tuple[bytes, Entry]]) -> None:
        """Blocks were published, or are evicted when this returns: copy what is wanted."""


class PrefixIndex:
    """Published blocks by chained hash, least recently used first.

    Args:
        pool: where the blocks live.
        salt: everything besides tokens that changes KV (model, revision, dtype, quantisation).

    Attributes:
        sink: is shown what is published and evicted; None for nobody.
    """

    def __init__(self, pool: BlockPool, salt: bytes = b"") -> None:
        self._pool = pool
        self._salt = salt
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self.sink: PrefixSink | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, tokens: Sequence[int], salt: bytes = b"") -> PrefixMatch:
        """Finds the longest published prefix and takes a reference to its blocks.

        At least the last token is left to compute, as its logits are wanted.
        """
        hits: list[Entry] = []
        keys: list[bytes] = []
        for key, block_tokens in self.keys(tokens[: len(tokens) - 1], salt):
            entry = self._entries.get(key)
            if entry is None or entry.tokens != block_tokens:
                break
            hits.append(entry)
            keys.append(key)
        self._touch(keys)
        for entry in hits:
            self._pool.share(entry.block)
        drafted = next((i for i, entry in enumerate(hits) if not entry.has_draft), len(hits))
        return PrefixMatch(tuple(entry.block for entry in hits), drafted)

    def publish(
        self, tokens: Sequence[int], blocks: Sequence[int], num_draft_tokens: int, salt: bytes = b""
    ) -> None:
        """Makes the full blocks of `tokens` findable; `blocks` is the holder's block table."""
        size = self._pool.block_size
        keys = []
        for i, (key, block_tokens) in enumerate(self.keys(tokens, salt)):
            has_draft = (i + 1) * size <= num_draft_tokens
            self._offer(key, Entry(blocks[i], block_tokens, has_draft))
            keys.append(key)
        self._touch(keys)
        self._show(keys)

    def num_known(self, keys: Sequence[tuple[bytes, tuple[int, ...]]]) -> int:
        """How many of the first blocks of a chain are published; `keys` as `keys` gives them."""
        for i, (key, block_tokens) in enumerate(keys):
            entry = self._entries.get(key)
            if entry is None or entry.tokens != block_tokens:
                return i
        return len(keys)

    def adopt(self, key: bytes, entry: Entry) -> None:
        """Publishes a block whose KV came from elsewhere; its holder keeps its own reference."""
        self._offer(key, entry)

    def evict(self, num_blocks: int) -> int:
        """Frees up to `num_blocks` that nobody else holds, oldest first; returns how many."""
        idle = (key for key, e in self._entries.items() if self._pool.references(e.block) == 1)
        victims = list(islice(idle, num_blocks))
        self._show(victims[::-1])  # a chain's end is the oldest
        self._pool.release(self._entries.pop(key).block for key in victims)
        return len(victims)

    def clear(self) -> None:
        """Forgets everything; blocks that requests hold stay theirs."""
        self._pool.release(entry.block for entry in self._entries.values())
        self._entries.clear()

    def _offer(self, key: bytes, entry: Entry) -> None:
        """Adds an entry, or replaces one that lacks the draft's KV by one that has it."""
        old = self._entries.get(key)
        if old is not None and (old.has_draft or not entry.has_draft or old.block == entry.block):
            old.has_draft |= entry.has_draft and old.block == entry.block
            return
        self._pool.share(entry.block)
        self._entries[key] = entry
        if old is not None:
            self._pool.release([old.block])

    def _touch(self, keys: list[bytes]) -> None:
        # Deepest first, so that a chain is evicted from its end and never broken in the middle.
        for key in reversed(keys):
            self._entries.move_to_end(key)

    def _show(self, keys: Sequence[bytes]) -> None:
        if self.sink is not None:
            self.sink.saw([(key, self._entries[key]) for key in keys])

    def keys(self, tokens: Sequence[int], salt: bytes = b"") -> list[tuple[bytes, tuple[int, ...]]]:
        """Chained hash and token ids of each full block of `tokens`."""
        return list(chained(tokens, self._pool.block_size, self._salt, salt))
