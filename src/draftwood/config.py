"""Settings of an engine. Unknown or impossible ones are errors."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.errors import ConfigError

_DRAFT_SHARE = 16
_MOST_DRAFT_MEMORY = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits and switches.

    Attributes:
        max_num_seqs: most requests that run at once.
        max_batch_tokens: most rows of one forward; longer prompts are computed in chunks.
        max_tree_nodes: most draft nodes per request and round; 0 decodes plainly.
        block_size: slots of a KV block.
        kv_memory: bytes for KV and for what drafters remember; None takes what one full context
            needs, within a quarter of the memory that is free.
        kv_disk: folder that keeps KV for later processes; None for none.
        kv_disk_bytes: most bytes in it; the least recently used go first.
        kv_redis: URL of a Redis server that shares KV between processes and machines:
            redis://..., rediss://... (TLS) or unix://...; None for none.
        kv_namespace: begins every key in Redis.
        kv_ttl_s: seconds that unused KV stays on disk and in Redis; None for no limit.
        kv_timeout_s: the most that disk or Redis may let a request wait for its next answer.
        kv_compression: of blocks on disk and in Redis: "none", "zstd" (the same bits), or, with
            loss, "fp16" or "int8": what was restored from these may change a text.
        past_answers: drafters learn from answers of earlier requests; off where the same prompts
            are measured again and again.
        adaptive: choose tree sizes by measured cost; False verifies all that is proposed.
        debug_kv: fill slots that hold nothing with NaN.
    """

    max_num_seqs: int = 16
    max_batch_tokens: int = 512
    max_tree_nodes: int = 32
    block_size: int = 16
    kv_memory: int | None = None
    kv_disk: str | None = None
    kv_disk_bytes: int = 8 << 30
    kv_redis: str | None = None
    kv_namespace: str = "draftwood"
    kv_ttl_s: float | None = None
    kv_timeout_s: float = 0.25
    kv_compression: str = "none"
    past_answers: bool = True
    adaptive: bool = True
    debug_kv: bool = False

    @property
    def draft_memory(self) -> int:
        """The part of `kv_memory` for what drafters remember of past answers, in bytes."""
        if self.kv_memory is None:
            return _MOST_DRAFT_MEMORY
        return min(self.kv_memory // _DRAFT_SHARE, _MOST_DRAFT_MEMORY)

    def __post_init__(self) -> None:
        for name, least in (
            ("max_num_seqs", 1),
            ("max_batch_tokens", 1),
            ("max_tree_nodes", 0),
            ("block_size", 1),
            ("kv_disk_bytes", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least {least}")
        if self.kv_memory is not None and self.kv_memory <= 0:
            raise ConfigError(
                f"kv_memory is {self.kv_memory}: it must be a number of bytes above 0"
            )
        for name in ("kv_ttl_s", "kv_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise ConfigError(f"{name} is {seconds}: it must be a number of seconds above 0")
