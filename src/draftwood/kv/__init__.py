"""KV memory: blocks, leases on them, and the index of published prefixes."""

from draftwood.kv.lease import Lease
from draftwood.kv.pool import BlockPool, KVSpec, Plane, Slots
from draftwood.kv.prefix import PrefixIndex, PrefixMatch

__all__ = ["BlockPool", "KVSpec", "Lease", "Plane", "PrefixIndex", "PrefixMatch", "Slots"]
