"""`PrefixRouter`: request router of Ray Serve that chooses replicas as `EngineRouter` chooses engines.

A proxy has the body of a request, and no tokenizer. So prefixes are those of the body's bytes: requests of a
conversation, or with one system prompt, begin with the same bytes. A replica's cache is taken to have the latest bodies
that were sent to it, as many as its KV cache holds at four bytes a token. Each proxy counts its own requests.

Ray's classes are imported by name, since Ray is installed by an extra only.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from phonograph.kv_cache.block_events import block_hash
from phonograph.kv_cache.tables import block_digests, root_digest
from phonograph.scheduling.engine_router import EngineRouter, IndexChange
from phonograph.server.cluster.ray_deployment import this_actor

BLOCK_WORDS = 8
"""Words of 8 bytes in a block of a body."""
MAX_BODY = 32 << 10
"""Bytes of a body that count."""
TOKEN_BYTES = 4
KV_TOKENS = 1 << 16
"""Tokens of a replica's KV cache, until the replica has reported them."""
BODY_POLLS, POLL_SECONDS = 5, 0.002
"""Looks for the body of a request, and the time between them. A slow upload is routed by load."""

_request_router: Any = import_module("ray.serve.request_router")


class PrefixRouter(_request_router.RequestRouter):
    """Prefers the replica with the longest prefix of a request, bounded by load. See `EngineRouter`."""

    def initialize_state(self, **_: Any) -> None:
        """Make the state. Ray calls this after the constructor."""
        self._router = EngineRouter(0, BLOCK_WORDS)
        self._numbers: dict[Any, int] = {}  # of replicas, by their ids
        self._next_number = 0
        self._chosen: dict[str, int] = {}  # number of the replica of each open request, by its id
        self._sent: dict[int, OrderedDict[int, None]] = {}  # blocks that each replica is taken to have, oldest first

    def update_replicas(self, replicas: list[Any]) -> None:
        """Take the replicas that run, with their statistics."""
        running = {one.replica_id: one for one in replicas}
        for replica_id in [one for one in self._numbers if one not in running]:
            number = self._numbers.pop(replica_id)
            self._router.remove(number)
            del self._sent[number]
        for replica_id, replica in running.items():
            if replica_id not in self._numbers:
                self._numbers[replica_id] = self._next_number
                self._router.add(self._next_number)
                self._sent[self._next_number] = OrderedDict()
                self._next_number += 1
            if replica.routing_stats:
                stats: Any = SimpleNamespace(**replica.routing_stats)
                self._router.loaded(self._numbers[replica_id], stats)
        super().update_replicas(replicas)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return the chosen replica, and the others in case that it refuses the request."""
        if pending_request is None:
            return [candidate_replicas]
        words = await _words(pending_request.metadata.internal_request_id)
        key: str = pending_request.metadata.internal_request_id
        self._close(key)
        route = self._router.choose(hash(key), words)
        if route is None:
            return [candidate_replicas]
        self._router.begun(hash(key))
        self._chosen[key] = route.engine
        # A request that its client leaves is never routed.
        pending_request.future.add_done_callback(partial(self._settle, key))
        self._remember(route.engine, words, candidate_replicas)
        first = [one for one in candidate_replicas if self._numbers.get(one.replica_id) == route.engine]
        return [first, [one for one in candidate_replicas if one not in first]]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Count the request where it has gone. A replica may have refused it."""
        key = pending_request.metadata.internal_request_id
        number = self._numbers.get(replica_id)
        if number is not None and key in self._chosen and self._chosen[key] != number:
            self._router.ended(self._chosen[key])
            self._router.ended(number, -1)
            self._chosen[key] = number

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Count a request as ended."""
        number = self._numbers.get(replica_id)
        if number is None or self._chosen.get(internal_request_id) == number:
            self._close(internal_request_id)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Choose a replica no more."""
        super().on_replica_actor_died(replica_id)
        if replica_id in self._numbers:
            self._router.remove(self._numbers[replica_id])

    def _settle(self, key: str, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            self._close(key)

    def _close(self, key: str) -> None:
        number = self._chosen.pop(key, None)
        if number is not None:
            self._router.ended(number)

    def _remember(self, number: int, words: list[int], replicas: list[Any]) -> None:
        """Take the replica to have the blocks of a body from now on, and not its oldest ones."""
        sent = self._sent[number]
        stored = [block_hash(one) for one in block_digests(words, BLOCK_WORDS, root_digest(None))]
        for one in stored:
            sent[one] = None
            sent.move_to_end(one)
        stats = next((one.routing_stats for one in replicas if self._numbers.get(one.replica_id) == number), {})
        most = stats.get("kv_tokens", KV_TOKENS) * TOKEN_BYTES // (8 * BLOCK_WORDS)
        removed = [sent.popitem(last=False)[0] for _ in range(len(sent) - most)]
        self._router.changed(number, [IndexChange(True, stored), IndexChange(False, removed)])


async def _words(request_id: str) -> list[int]:
    """Return the first bytes of a request's body as words; none outside of a proxy, or without a whole body.

    The body stays in the proxy, where the replica fetches it.
    """
    queues: Any = getattr(getattr(this_actor(), "http_proxy", None), "asgi_receive_queues", {})
    for _ in range(BODY_POLLS):
        messages: list[Any] = []
        with suppress(KeyError, RuntimeError):  # the request has ended, or the proxy's thread adds a message
            messages = list(queues[request_id]._message_queue)
        if messages and not messages[-1].get("more_body", False):
            body = b"".join(one.get("body", b"") for one in messages)[:MAX_BODY]
            return list(memoryview(body[: len(body) // 8 * 8]).cast("q"))
        await asyncio.sleep(POLL_SECONDS)
    return []
