"""Blocks in Redis, for several processes or machines.

A block is one string value under `NAMESPACE:kv1:KEY`, so it is set, read and evicted whole. The
budget is the server's: give it `maxmemory` and the policy `allkeys-lru`. Whoever can write to the
server can choose the KV that others read: it needs a password and a network of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from draftwood.errors import ConfigError, MissingExtraError, StoreError, first_line
from draftwood.kv.tiers.record import HEAD_BYTES
from draftwood.kv.tiers.store import BlockStore, StoredBlock, StoreStats

_SCHEMES = ("redis", "rediss", "unix")
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_SCAN = 512


class RedisStore(BlockStore):
    """Records as values of a Redis server.

    Args:
        url: redis://user:password@host:6379/0, rediss://... (TLS; `?ssl_ca_certs=FILE`
            for an authority of your own) or unix:///path?db=0.
        namespace: begins every key; stores of different namespaces do not see each other.
        ttl_s: seconds that an unused block stays; None leaves it to the server's eviction.
        timeout_s: the most that connecting, and one answer to a read, may take.
        write_timeout_s: the most that one write may take; nobody waits for it.

    Raises:
        MissingExtraError: redis-py is not installed.
        ConfigError: the URL or the namespace cannot be used.
    """

    name = "redis"

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "draftwood",
        ttl_s: float | None = None,
        timeout_s: float = 0.25,
        write_timeout_s: float = 5.0,
    ) -> None:
        if not re.fullmatch(r"[\w.:-]+", namespace):
            raise ConfigError(
                f"kv_namespace is {namespace!r}: use letters, digits and any of  _ . : -"
            )
        self._redis = _module()
        self._prefix = f"{namespace}:kv1:"
        self._ttl_ms = None if ttl_s is None else max(round(1000 * ttl_s), 1)
        self._ttl_s = ttl_s
        self._place = _without_password(url)
        self._reading = self._client(url, timeout_s, timeout_s)
        self._writing = self._client(url, write_timeout_s, min(timeout_s, write_timeout_s))

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `BlockStore`."""
        if not keys:
            return []
        with self._errors():
            values: list[bytes | None] = self._reading.mget([self._name(key) for key in keys])
        return values

    def put_many(self, records: Sequence[tuple[bytes, bytes]], *, replace: bool = True) -> None:
        """See `BlockStore`."""
        with self._errors(), self._writing.pipeline(transaction=False) as pipe:
            for key, record in records:
                pipe.set(self._name(key), record, px=self._ttl_ms, nx=not replace)
                if not replace and self._ttl_ms is not None:
                    pipe.pexpire(self._name(key), self._ttl_ms)
            _execute(pipe)

    def run(self, keys: Sequence[bytes]) -> int:
        """See `BlockStore`."""
        with self._errors(), self._reading.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.exists(self._name(key))
            found = _execute(pipe)
        return next((i for i, count in enumerate(found) if not count), len(keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        """See `BlockStore`. A read counts as use for the server's own eviction already."""
        if self._ttl_ms is None or not keys:
            return
        with self._errors(), self._writing.pipeline(transaction=False) as pipe:
            for key in reversed(keys):
                pipe.pexpire(self._name(key), self._ttl_ms)
            _execute(pipe)

    def delete(self, keys: Sequence[bytes]) -> None:
        """See `BlockStore`."""
        with self._errors():
            for start in range(0, len(keys), _SCAN):
                names = [self._name(key) for key in keys[start : start + _SCAN]]
                self._writing.unlink(*names)

    def ls(self) -> Iterator[StoredBlock]:
        """See `BlockStore`."""
        for names in self._pages():
            with self._errors(), self._writing.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.strlen(name)
                    pipe.object("idletime", name)  # an error under an LFU policy
                    pipe.getrange(name, 0, HEAD_BYTES - 1)
                answers = pipe.execute(raise_on_error=False)
            for i, name in enumerate(names):
                size, idle, head = answers[3 * i : 3 * i + 3]
                if isinstance(size, int) and size > 0 and isinstance(head, bytes):
                    idle_s = float(idle) if isinstance(idle, int) else None
                    yield StoredBlock.of(self._key(name), size, idle_s, head)

    def stats(self) -> StoreStats:
        """See `BlockStore`. The budget shown is the server's `maxmemory`."""
        sizes: list[int] = []
        for names in self._pages():
            with self._errors(), self._writing.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.strlen(name)
                sizes.extend(size for size in _execute(pipe) if size)
        with self._errors():
            limit = self._writing.info("memory").get("maxmemory") or None
        return StoreStats(self.name, self._place, len(sizes), sum(sizes), limit, self._ttl_s)

    def close(self) -> None:
        """See `BlockStore`."""
        for client in (self._reading, self._writing):
            with suppress(Exception):
                client.close()

    def _client(self, url: str, timeout_s: float, connect_s: float) -> Any:
        redis = self._redis
        _check_files(url)
        # A connection that the server has closed is opened again once; a slow one is not asked
        # twice.
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 1, (redis.ConnectionError,))
        timeouts: dict[str, float] = {"socket_timeout": timeout_s}
        if not url.startswith("unix"):
            timeouts["socket_connect_timeout"] = connect_s
        try:
            client = redis.Redis.from_url(url, decode_responses=False, retry=retry, **timeouts)
            pool = client.connection_pool
            pool.connection_class(**pool.connection_kwargs)  # unknown options are errors now
            return client
        except (ValueError, TypeError) as error:
            raise ConfigError(f"kv_redis cannot be used: {first_line(error)}") from error

    def _pages(self) -> Iterator[list[bytes]]:
        """Names of all blocks of this namespace, each once, some at a time."""
        seen: set[bytes] = set()
        cursor = None
        while cursor != 0:
            with self._errors():
                cursor, found = self._writing.scan(
                    cursor or 0, match=f"{self._prefix}*", count=_SCAN
                )
            names = [name for name in found if name not in seen and self._is_ours(name)]
            seen.update(names)
            yield names

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _is_ours(self, name: bytes) -> bool:
        return re.fullmatch(rb"(?:[0-9a-f]{2})+", name[len(self._prefix.encode()) :]) is not None

    def _key(self, name: bytes) -> bytes:
        return bytes.fromhex(name[len(self._prefix.encode()) :].decode())

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (self._redis.RedisError, OSError, ValueError) as error:
            raise StoreError(f"Redis at {self._place}: {first_line(error)}") from error


def _execute(pipe: Any) -> list[Any]:
    """The answers of a pipeline; raises the first error, without the command and its bytes."""
    answers: list[Any] = pipe.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def _module() -> Any:
    try:
        redis = import_module("redis")
        import_module("redis.retry")
        import_module("redis.backoff")
    except ImportError as error:
        raise MissingExtraError("redis", "redis") from error
    return redis


def _check_files(url: str) -> None:
    """Refuses certificates that are not there: redis-py would say so at every connection."""
    for name, value in parse_qsl(urlsplit(url).query):
        if name in _FILES and not os.path.isfile(value):
            raise ConfigError(f"kv_redis names {name}={value}, and there is no such file")


def _without_password(url: str) -> str:
    """The URL as it may be shown.

    Raises:
        ConfigError: it is no URL of a Redis server.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
    except ValueError as error:
        raise ConfigError(f"kv_redis is no URL ({error}): use redis://host:6379/0") from error
    if parts.scheme not in _SCHEMES or not (host or parts.path):
        raise ConfigError(
            "kv_redis is no URL of a Redis server: use redis://host:6379/0, rediss://... for TLS,"
            " or unix:///path/of/socket"
        )
    return f"{parts.scheme}://{host}{port}{parts.path}"
