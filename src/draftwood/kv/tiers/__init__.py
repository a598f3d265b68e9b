"""KV that outlives the process: blocks on disk and in Redis, behind the index in RAM."""

from draftwood.kv.tiers.compression import COMPRESSIONS, LOSSY, check_compression
from draftwood.kv.tiers.disk import DiskStore
from draftwood.kv.tiers.fetch import Fetch
from draftwood.kv.tiers.memory import MemoryStore
from draftwood.kv.tiers.record import Labels
from draftwood.kv.tiers.redis import RedisStore
from draftwood.kv.tiers.setup import make_stores, make_tiers
from draftwood.kv.tiers.store import BlockStore, StoredBlock, StoreStats, VerifyReport
from draftwood.kv.tiers.tier import TierCounters
from draftwood.kv.tiers.tiers import KVTiers, TieredPrefix

__all__ = [
    "COMPRESSIONS",
    "LOSSY",
    "BlockStore",
    "DiskStore",
    "Fetch",
    "KVTiers",
    "Labels",
    "MemoryStore",
    "RedisStore",
    "StoreStats",
    "StoredBlock",
    "TierCounters",
    "TieredPrefix",
    "VerifyReport",
    "check_compression",
    "make_stores",
    "make_tiers",
]
