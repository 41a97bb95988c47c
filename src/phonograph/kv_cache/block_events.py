"""Events of the prefix cache: blocks that can be found from now on, blocks that cannot any more, and resets.

A router outside of the engine keeps an index of the cache by them. Nothing is recorded unless a `BlockEvents` is given
to the cache.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class BlocksStored:
    """Consecutive blocks of a sequence that can be found.

    Attributes:
        group: index of the KV group.
        keys: names of the blocks, in the order of their tokens.
        parent: name of the block before the first one; None at the start of a sequence.
        token_ids: tokens of the blocks.
        salt: salt of the sequence, None without one.
    """

    group: int
    keys: list[bytes]
    parent: bytes | None
    token_ids: list[int]
    salt: str | None


@dataclass(slots=True)
class BlocksRemoved:
    """Blocks that cannot be found any more, by their names."""

    keys: list[bytes]


@dataclass(slots=True)
class CacheCleared:
    """No block can be found any more."""


BlockEvent = BlocksStored | BlocksRemoved | CacheCleared


class BlockEvents:
    """Recorder of events in their order. Neighbours of one kind become one event."""

    def __init__(self) -> None:
        self._events: list[BlockEvent] = []

    def take(self) -> list[BlockEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def stored(self, group: int, key: bytes, parent: bytes | None, token_ids: list[int], salt: str | None) -> None:
        """Record that one block can be found; see `BlocksStored`."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksStored) and last.group == group and last.keys[-1] == parent:
            last.keys.append(key)
            last.token_ids += token_ids
        else:
            self._events.append(BlocksStored(group, [key], parent, token_ids, salt))

    def removed(self, key: bytes) -> None:
        """Record that one block cannot be found any more."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved):
            last.keys.append(key)
        else:
            self._events.append(BlocksRemoved([key]))

    def cleared(self) -> None:
        """Record that no block can be found any more."""
        self._events.append(CacheCleared())


def block_hash(key: bytes) -> int:
    """Return the 64-bit hash of a block's name. Equal tokens have equal hashes in groups with blocks of equal size."""
    return int.from_bytes(key[:8], "big")


def group_of(key: bytes) -> int:
    """Return the KV group of a block's name; see `SequenceTable.keys`."""
    return key[32] if len(key) > 32 else 0
