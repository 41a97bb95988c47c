"""Addresses and TLS of a server, and the errors of those that do not work."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.errors import ConfigError
from phonograph.server.http.listen import bound, shown_address, tls_context
from phonograph.server.http.run import serve
from phonograph.server.http.starting import Starting

TLS = Path(__file__).parents[1] / "data" / "tls"
CERTIFICATE, KEY = str(TLS / "server.pem"), str(TLS / "server.key")


def test_addresses_that_cannot_be_bound_are_named() -> None:
    with bound(ServerConfig(host="127.0.0.1", port=0)) as listener:
        port = listener.getsockname()[1]
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        listener.listen()
        taken = ServerConfig(host="127.0.0.1", port=port)
        with (
            pytest.raises(ConfigError, match=f"port={port}: cannot be bound on 127.0.0.1: Address already in use"),
            bound(taken),
        ):
            pass
    nowhere = ServerConfig(host="no.such.host.invalid", port=0)
    with pytest.raises(ConfigError, match="host='no.such.host.invalid': is not an address"), bound(nowhere):
        pass


def test_the_address_is_shown_as_clients_write_it() -> None:
    with bound(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        assert shown_address(ServerConfig(), listener) == f"http://127.0.0.1:{port}/v1"
        assert shown_address(ServerConfig(ssl_certfile=CERTIFICATE), listener) == f"https://127.0.0.1:{port}/v1"
        assert shown_address(ServerConfig(uds="/run/a"), listener) == "unix:/run/a"


def test_a_unix_socket_is_made_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    config = ServerConfig(uds=str(path))
    with bound(config) as listener:
        listener.listen()
        assert path.is_socket()
        with (
            pytest.raises(ConfigError, match="uds='.*http.sock': cannot be bound: Address already in use"),
            bound(config),
        ):
            pass
        assert path.is_socket(), "another server's"
    assert not path.exists()
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    with bound(config):
        pass
    path.write_text("a file")
    with pytest.raises(ConfigError, match="uds=.*Address already in use"), bound(config):
        pass
    assert path.read_text() == "a file"
    with pytest.raises(ConfigError, match="uds=.*: cannot be bound: "), bound(ServerConfig(uds=f"/{'x' * 200}")):
        pass


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ssl_keyfile": KEY}, "ssl_keyfile=.*needs ssl_certfile"),
        ({"ssl_ca_certs": CERTIFICATE}, "ssl_ca_certs=.*needs ssl_certfile"),
        ({"ssl_certfile": "absent.pem"}, "ssl_certfile='absent.pem': is not a readable file"),
        ({"ssl_certfile": CERTIFICATE, "ssl_keyfile": "no.key"}, "ssl_keyfile='no.key': is not a readable file"),
        ({"ssl_certfile": CERTIFICATE, "ssl_keyfile": str(TLS / "other.key")}, "ssl_keyfile=.*is not the key of the"),
        ({"ssl_certfile": CERTIFICATE, "ssl_keyfile": str(TLS / "locked.key")}, "without a password"),
        ({"ssl_certfile": CERTIFICATE}, "ssl_certfile=.*give the key with ssl_keyfile"),
        ({"ssl_certfile": KEY, "ssl_keyfile": KEY}, "ssl_certfile=.*must be PEM files with a certificate"),
        ({"ssl_certfile": CERTIFICATE, "ssl_keyfile": KEY, "ssl_ca_certs": KEY}, "ssl_ca_certs=.*PEM file with cert"),
        ({"ssl_certfile": CERTIFICATE, "ssl_keyfile": KEY, "ssl_cert_reqs": 2}, "ssl_cert_reqs=2: needs ssl_ca_certs"),
    ],
)
def test_files_of_tls_that_do_not_work_end_the_start(settings: dict[str, Any], said: str) -> None:
    server = ServerConfig(port=0, **settings)
    with pytest.raises(ConfigError, match=said):
        serve(EngineConfig(model="demo"), server, lambda *_: None, lambda _: None)


def test_one_file_may_have_certificate_and_key(tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(Path(CERTIFICATE).read_text() + Path(KEY).read_text())
    assert tls_context(ServerConfig(ssl_certfile=str(both))) is not None
    assert tls_context(ServerConfig()) is None


@pytest.mark.parametrize("uds", [False, True])
def test_the_start_is_answered_over_tls_and_over_a_unix_socket(uds: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "s") if uds else None
    config = ServerConfig(port=0, uds=path, **({} if uds else {"ssl_certfile": CERTIFICATE, "ssl_keyfile": KEY}))
    trusted = ssl.create_default_context(cafile=CERTIFICATE)

    async def ask() -> httpx.Response:
        with bound(config) as listener:
            async with Starting(16, tls_context(config)).answering(listener):
                transport = httpx.AsyncHTTPTransport(uds=path, verify=trusted)
                address = "http://localhost" if uds else f"https://127.0.0.1:{listener.getsockname()[1]}"
                async with httpx.AsyncClient(transport=transport, base_url=address) as client:
                    return await client.post("/v1/completions", json={"prompt": "x" * 100_000})

    answer = asyncio.run(ask())
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_starting"
