"""From settings to stores."""

from __future__ import annotations

from draftwood.config import EngineConfig
from draftwood.kv.pool import BlockPool
from draftwood.kv.tiers.disk import DiskStore
from draftwood.kv.tiers.record import Labels
from draftwood.kv.tiers.redis import RedisStore
from draftwood.kv.tiers.store import BlockStore
from draftwood.kv.tiers.tiers import KVTiers


def make_stores(config: EngineConfig) -> list[BlockStore]:
    """The stores that the settings name, fastest first. None of them is asked anything yet.

    Raises:
        ConfigError: the folder is a file, or the URL is none.
        MissingExtraError: redis-py is wanted and not installed.
    """
    stores: list[BlockStore] = []
    if config.kv_disk is not None:
        stores.append(
            DiskStore(config.kv_disk, max_bytes=config.kv_disk_bytes, ttl_s=config.kv_ttl_s)
        )
    if config.kv_redis is not None:
        stores.append(
            RedisStore(
                config.kv_redis,
                namespace=config.kv_namespace,
                ttl_s=config.kv_ttl_s,
                timeout_s=config.kv_timeout_s,
            )
        )
    return stores


def make_tiers(config: EngineConfig, pool: BlockPool, labels: Labels) -> KVTiers | None:
    """The tiers that the settings name, for KV of this pool's shape; None if they name none.

    Raises:
        ConfigError, MissingExtraError: see `make_stores`.
    """
    stores = make_stores(config)
    if not stores:
        return None
    return KVTiers(
        stores,
        target=pool.target.spec,
        draft=pool.draft.spec if pool.draft else None,
        block_size=pool.block_size,
        labels=labels,
        timeout_s=config.kv_timeout_s,
        ttl_s=config.kv_ttl_s,
    )
