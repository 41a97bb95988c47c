"""The socket that a server listens on, and TLS of its connections."""

from __future__ import annotations

import os
import socket
import ssl
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress

from phonograph.config.server_config import ServerConfig
from phonograph.errors import ConfigError


@contextmanager
def bound(config: ServerConfig) -> Generator[socket.socket]:
    """Bind a socket, and close it at the end: a used address ends the start before the engine loads.

    Raises:
        ConfigError: the address cannot be bound.
    """
    if config.uds is None:
        with _tcp(config) as listener:
            yield listener
        return
    with _unix(config.uds) as listener:
        try:
            yield listener
        finally:
            with suppress(OSError):
                os.unlink(config.uds)


def shown_address(config: ServerConfig, listener: socket.socket) -> str:
    """Return the address of a server for its users."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if config.ssl_certfile else 'http'}://{shown}:{port}/v1"


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS configuration of the server's connections, or None without `ssl_certfile`.

    Raises:
        ConfigError: a file is missing or unusable, or the certificate has another key.
    """
    certificate, key, authorities = config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs
    if certificate is None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(config, name) is not None:
                raise ConfigError(name, getattr(config, name), "needs ssl_certfile, the server's certificate")
        return None
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(config, name)
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(name, path, "is not a readable file")
    if config.ssl_cert_reqs and authorities is None:
        problem = "needs ssl_ca_certs, the authorities of the clients' certificates"
        raise ConfigError("ssl_cert_reqs", config.ssl_cert_reqs, problem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a callback, OpenSSL asks for a password on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"is not the key of the certificate in ssl_certfile={certificate!r}"
            raise ConfigError("ssl_keyfile", key or certificate, problem) from None
        problem = (
            "and ssl_keyfile must be PEM files with a certificate and its key, without a password"
            if key is not None
            else "must be a PEM file with a certificate and its key; give the key with ssl_keyfile"
        )
        raise ConfigError("ssl_certfile", certificate, problem) from None
    if authorities is not None:
        try:
            context.load_verify_locations(authorities)
        except ssl.SSLError:
            raise ConfigError("ssl_ca_certs", authorities, "must be a PEM file with certificates") from None
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    return context


def _tcp(config: ServerConfig) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            "host", config.host, f"is not an address of this machine ({error}); 127.0.0.1 works"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError("port", config.port, f"cannot be bound on {config.host}: {error.strerror}") from None
    return listener


def _unix(path: str) -> socket.socket:
    """Return a bound Unix domain socket. A socket file that no process listens on any more is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_over(path):
            os.unlink(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError("uds", path, f"cannot be bound: {error.strerror or error}") from None
    return listener


def _is_left_over(path: str) -> bool:
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(path)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
