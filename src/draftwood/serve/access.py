"""Who may ask: API keys, which hosts a request may name, and which pages may read answers."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from draftwood.errors import ConfigError

_PREFIX = "sha256:"


class ApiKeys:
    """Keys that open the API. Only their hashes are kept.

    Args:
        keys: the keys, or `sha256:` and the hash of one in hexadecimal digits.

    Raises:
        ConfigError: one is empty or no hash.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def holder(self, authorization: str | None) -> str | None:
        """A name for who sends this header; None when its key opens nothing.

        Every key is compared, and none ends the comparison sooner than another.
        """
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            return None
        return f"key-{matches.index(True)}"

    def owner(self, holder: str) -> str:
        """A name for a key, by what `holder` called it, that stays when keys are added or moved."""
        digest = self._digests[int(holder.removeprefix("key-"))]
        return hashlib.blake2b(digest, digest_size=16, person=b"draftwood-owner").hexdigest()


def _digest(key: str) -> bytes:
    if key.startswith(_PREFIX):
        try:
            digest = bytes.fromhex(key.removeprefix(_PREFIX))
        except ValueError:
            digest = b""
        if len(digest) != hashlib.sha256().digest_size:
            raise ConfigError("an API key begins with sha256: and no hash of 64 digits follows")
        return digest
    if not key.strip():
        raise ConfigError("an API key is empty: give at least one character")
    return hashlib.sha256(key.strip().encode()).digest()


def is_loopback(host: str) -> bool:
    """Whether an address to bind to is this machine's alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def allowed_hosts(host: str, named: Sequence[str]) -> frozenset[str] | None:
    """Names by which requests may address the server; None for any.

    A server that only this machine reaches is reached by web pages too, when their host's name
    is made to point here. Such a request names that host.
    """
    if not is_loopback(host):
        return None
    return frozenset({"localhost", "127.0.0.1", "[::1]", host.lower(), *map(str.lower, named)})


def host_name(header: str) -> str:
    """The name in a Host header, without the port."""
    name, colon, port = header.rpartition(":")
    return (name if colon and port.isdigit() else header).lower()
