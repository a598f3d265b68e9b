"""Redis over TLS, with a certificate of an authority of our own and a password."""

from __future__ import annotations

import logging
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from draftwood.errors import ConfigError
from draftwood.kv.tiers import RedisStore
from draftwood.sampling import SamplingParams
from tests.redis_server import SERVER, need_redis
from tests.services import need
from tests.tiny import TinyLLM, hf_model, random_prompts, tiny_llm

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
MODEL = hf_model("llama")
PROMPTS = random_prompts([41, 33], seed=9)


@dataclass(frozen=True, slots=True)
class TLSRedis:
    """A server on a port of this machine.

    Attributes:
        port: where it listens, for TLS alone.
        authority: the certificate that signed its own.
    """

    port: int
    authority: Path

    def url(self, password: str = "secret", authority: Path | None = None) -> str:
        """With which certificate the server is checked."""
        checked = authority or self.authority
        return f"rediss://:{password}@localhost:{self.port}/0?ssl_ca_certs={checked}"


def make_authority(folder: Path, name: str) -> Path:
    """A self-signed certificate; its key lies beside it."""
    path = folder / f"{name}.pem"
    _openssl(
        "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
        "-keyout", str(path.with_suffix(".key")), "-out", str(path),
        "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=keyCertSign",
    )  # fmt: skip
    return path


def make_certificate(folder: Path, authority: Path) -> Path:
    """A certificate for this machine, signed by the authority."""
    path, request = folder / "server.pem", folder / "server.csr"
    names = folder / "names"
    names.write_text("subjectAltName=DNS:localhost\n")
    _openssl(
        "req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost",
        "-keyout", str(path.with_suffix(".key")), "-out", str(request),
    )  # fmt: skip
    _openssl(
        "x509", "-req", "-in", str(request), "-days", "2", "-CA", str(authority),
        "-CAkey", str(authority.with_suffix(".key")), "-CAcreateserial",
        "-extfile", str(names), "-out", str(path),
    )  # fmt: skip
    return path


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port: int = one.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TLSRedis]:
    """A running server that wants TLS and a password."""
    need_redis()
    need("openssl")
    folder = tmp_path_factory.mktemp("tls")
    authority = make_authority(folder, "ours")
    certificate = make_certificate(folder, authority)
    port = free_port()
    process = subprocess.Popen(
        [
            SERVER, "--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no",
            "--tls-cert-file", str(certificate), "--tls-ca-cert-file", str(authority),
            "--tls-key-file", str(certificate.with_suffix(".key")), "--bind", "localhost",
            "--dir", str(folder), "--save", "", "--requirepass", "secret",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _wait(process, port)
        yield TLSRedis(port, authority)
    finally:
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        assert process.poll() is None, "redis-server has ended: it may lack TLS"
        with socket.socket() as one:
            if one.connect_ex(("localhost", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError("redis-server does not start")


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return tiny_llm(MODEL, drafter="none").run(PROMPTS, GREEDY)


def make(url: str) -> TinyLLM:
    return tiny_llm(MODEL, block_size=4, kv_timeout_s=5.0, kv_redis=url)


def test_kv_goes_through_tls_to_another_engine(server: TLSRedis, texts: list[list[int]]) -> None:
    with make(server.url()) as llm:
        assert llm.run(PROMPTS, GREEDY) == texts
        assert llm.tiers is not None
        llm.tiers.flush()
        [one] = llm.tiers.counters.values()
        assert one.num_stored > 0
    with make(server.url()) as llm:
        outputs = llm.outputs(PROMPTS, GREEDY)
        assert [list(output.token_ids) for output in outputs] == texts
        assert [output.metrics.cached_by_tier["redis"] for output in outputs] == [40, 32]


@pytest.mark.parametrize("fault", ["authority", "password"])
def test_a_stranger_is_not_used(
    fault: str,
    server: TLSRedis,
    texts: list[list[int]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server that another authority signed, or that refuses us: plain computing, one warning."""
    wrong = {
        "authority": lambda: server.url(authority=make_authority(tmp_path, "another")),
        "password": lambda: server.url(password="wrong"),
    }[fault]()
    with caplog.at_level(logging.WARNING, "draftwood"), make(wrong) as llm:
        outputs = llm.outputs(PROMPTS, GREEDY)
    assert [list(output.token_ids) for output in outputs] == texts
    assert [output.metrics.num_cached_tokens for output in outputs] == [0, 0]
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings
    assert not any("wrong" in text or "secret" in text for text in warnings), "a password is shown"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ssl_ca_certs.*none\.pem.*no such file"):
        RedisStore(f"rediss://localhost:1/0?ssl_ca_certs={tmp_path / 'none.pem'}")
