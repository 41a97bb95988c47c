"""Events of the prefix cache over ZeroMQ, in vLLM's form, for routers outside of the server.

A message has three frames: the topic, the number of the batch in 8 bytes (big-endian), and the batch in MessagePack:
`[time, [event, ...], rank]`. An event is a map with its `type`. A ROUTER socket takes the number of a batch and sends
all kept batches from that one on, each as number and batch, and then -1 with an empty frame.

A block is published when its tokens are scheduled, which is one step before its keys and values are written. A request
that a router sends for it is scheduled after that step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import zmq

from phonograph.config.kv_events_config import KVEventsConfig
from phonograph.core.kv_group import KVGroup
from phonograph.errors import ConfigError
from phonograph.kv_cache.block_events import BlockEvent, BlocksRemoved, BlocksStored, block_hash, group_of

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MEDIUM = "GPU"
"""Memory of the blocks. vLLM gives this name to the cache of every device."""


class KVPublisher:
    """Publisher of the events of one engine. The engine's thread publishes, a thread of its own sends batches again.

    A subscriber that is slower than the engine loses batches, which it finds by their numbers.

    Args:
        config: addresses of this engine.
        rank: number of this engine among several.

    Raises:
        ConfigError: an address cannot be used, or a package is missing.
    """

    def __init__(self, config: KVEventsConfig, rank: int) -> None:
        try:
            from msgspec.msgpack import Encoder
        except ImportError:
            problem = "needs the package msgspec: pip install 'phonograph[kv-events]'"
            raise ConfigError("kv_events_config", "enabled", problem) from None
        self._pack = Encoder().encode
        self._rank = rank
        self._topic = config.topic.encode()
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replayer: threading.Thread | None = None
        try:
            self._socket = self._context.socket(zmq.PUB)
            self._socket.set_hwm(config.hwm)
            self._socket.linger = 0
            listens = not config.endpoint.startswith("tcp:") or "*" in config.endpoint or "::" in config.endpoint
            _open(self._socket, "endpoint", config.endpoint, binds=listens)
            if config.replay_endpoint is not None:
                router = self._context.socket(zmq.ROUTER)
                router.linger = 0
                router.set_hwm(0)  # a ROUTER socket drops what does not fit its queue, also the end of a replay
                _open(router, "replay_endpoint", config.replay_endpoint, binds=True)
                self._replayer = threading.Thread(target=self._replay, args=(router,), name="kv-event-replay")
                self._replayer.daemon = True
                self._replayer.start()
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def publish(self, events: Sequence[BlockEvent], groups: Sequence[KVGroup]) -> None:
        """Send one batch, without waiting.

        Args:
            events: events in their order; nothing is sent without any.
            groups: KV groups of the engine.
        """
        if not events:
            return
        maps = [event_map for event in events for event_map in event_maps(event, groups)]
        batch = self._pack([time.time(), maps, self._rank])
        with self._lock:
            self._kept.append((self._number, batch))
        self._socket.send_multipart((self._topic, self._number.to_bytes(8, "big"), batch))
        self._number += 1

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()  # ends the thread: its socket gets an error
        if self._replayer is not None:
            self._replayer.join()

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        """Answer requests for earlier batches until the context is terminated."""
        with suppress(zmq.ContextTerminated):
            while True:
                # REQ and DEALER sockets send the requester's identity, an empty frame and the number.
                frames = router.recv_multipart()
                if len(frames) != 3 or len(frames[2]) != 8:
                    continue
                first = int.from_bytes(frames[2], "big")
                with self._lock:
                    kept = [one for one in self._kept if one[0] >= first]
                for number, batch in kept:
                    router.send_multipart((*frames[:2], number.to_bytes(8, "big"), batch))
                router.send_multipart((*frames[:2], END_OF_REPLAY, b""))
        router.close(linger=0)


def event_maps(event: BlockEvent, groups: Sequence[KVGroup]) -> Iterator[dict[str, Any]]:
    """Yield an event in the published form: one map, or one for each KV group of removed blocks."""
    if isinstance(event, BlocksStored):
        group = groups[event.group]
        salts = None if event.salt is None or event.parent is not None else [event.salt]
        yield {
            "type": "BlockStored",
            "block_hashes": [block_hash(key) for key in event.keys],
            "parent_block_hash": None if event.parent is None else block_hash(event.parent),
            "token_ids": event.token_ids,
            "block_size": group.block_size,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
            "extra_keys": [salts, *[None] * (len(event.keys) - 1)],
            "group_idx": event.group,
            "kv_cache_spec_kind": "full_attention" if group.window is None else "sliding_window",
            "kv_cache_spec_sliding_window": group.window,
        }
    elif isinstance(event, BlocksRemoved):
        for index in sorted({group_of(key) for key in event.keys}):
            hashes = [block_hash(key) for key in event.keys if group_of(key) == index]
            yield {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM, "group_idx": index}
    else:
        yield {"type": "AllBlocksCleared"}


def _open(socket: zmq.Socket[bytes], key: str, address: str, *, binds: bool) -> None:
    try:
        (socket.bind if binds else socket.connect)(address)
    except zmq.ZMQError as error:
        problem = f"cannot be used ({error.strerror}); another address works, or no kv_events_config"
        raise ConfigError(f"kv_events_config.{key}", address, problem) from None
