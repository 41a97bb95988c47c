"""Configuration of the events of the KV cache: the keys of `kv_events_config`, by vLLM's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from phonograph.errors import ConfigError, shortened

_NUMBERS = {"buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000}
"""Defaults of the numbers."""
_KEYS = ("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "topic", *_NUMBERS)
_ADDRESS = re.compile(r"tcp://.+:(\d+)|(ipc|inproc)://.+")


class KVEventsConfig(NamedTuple):
    """Publisher of the events of the KV cache over ZeroMQ.

    Attributes:
        endpoint: address of the PUB socket. One with "*" or "::", and every ipc or inproc address, is bound; another
            one is connected to.
        replay_endpoint: address of the ROUTER socket that sends earlier batches again, which is bound; None for none.
        buffer_steps: earlier batches that are kept for it.
        hwm: batches that wait for a slow subscriber before further ones are dropped for it.
        topic: first frame of each message.
    """

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""

    def of_engine(self, rank: int) -> KVEventsConfig:
        """Return the addresses of one of several engines: TCP ports count up, other addresses get a suffix."""
        replay = self.replay_endpoint
        return self._replace(
            endpoint=_moved(self.endpoint, rank), replay_endpoint=None if replay is None else _moved(replay, rank)
        )


def read_kv_events_config(keys: Mapping[str, Any]) -> KVEventsConfig | None:
    """Return the configuration from its keys; None if the events are not enabled.

    Raises:
        ConfigError: a key is unknown, or has another value than it can have.
    """

    def refused(key: str, problem: str) -> ConfigError:
        return ConfigError(f"kv_events_config.{key}", shortened(str(keys.get(key))), problem)

    for key in keys:
        if key not in _KEYS:
            raise refused(key, f"is not known; the keys are {', '.join(_KEYS)}")
    enabled, publisher = keys.get("enable_kv_cache_events", False), keys.get("publisher")
    if not isinstance(enabled, bool):
        raise refused("enable_kv_cache_events", "must be true or false")
    if publisher not in (None, "zmq"):
        raise refused("publisher", "must be zmq, or null for none")
    for key, default in _NUMBERS.items():
        value = keys.get(key, default)
        if type(value) is not int or value < 1:
            raise refused(key, "must be a whole number >= 1")
    topic = keys.get("topic", "")
    if not isinstance(topic, str):
        raise refused("topic", "must be text")
    endpoint, replay = keys.get("endpoint", "tcp://*:5557"), keys.get("replay_endpoint")
    for key, address in (("endpoint", endpoint), ("replay_endpoint", replay)):
        match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if address is not None and (match is None or int(match[1] or 1) not in range(1, 1 << 16)):
            raise refused(key, "must be an address such as tcp://*:5557 or ipc:///run/kv-events")
    if endpoint is None or endpoint == replay:
        raise refused("endpoint", "must be an address, and another one than replay_endpoint")
    if enabled and "publisher" in keys and publisher is None:
        raise refused("publisher", "is null, so that nothing is published; zmq works, or enable_kv_cache_events false")
    if not enabled:
        return None
    numbers = {key: keys.get(key, default) for key, default in _NUMBERS.items() if key != "max_queue_size"}
    return KVEventsConfig(endpoint, replay, topic=topic, **numbers)


def _moved(address: str, rank: int) -> str:
    if not rank:
        return address
    start, colon, port = address.rpartition(":")
    return f"{start}{colon}{int(port) + rank}" if address.startswith("tcp:") else f"{address}_dp{rank}"
