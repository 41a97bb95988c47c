"""Block tables of a sequence in its KV groups, and the digests that name its full blocks in the prefix cache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from struct import pack

FREED = -1
"""Entry of a block table whose block was freed behind the window. The device's table keeps the id of the block."""


@dataclass(slots=True, eq=False)
class GroupTable:
    """Blocks of one sequence in one KV group, empty while it waits.

    Attributes:
        block_ids: blocks in the order of their tokens; `FREED` before `first`.
        first: index of the first block that the sequence holds.
        num_published: leading blocks that are in the prefix cache, or were when they were freed.
        kept: indices of blocks behind the window that are evicted like other blocks, not before them.
    """

    block_ids: list[int] = field(default_factory=list[int])
    first: int = 0
    num_published: int = 0
    kept: list[range] = field(default_factory=list[range])

    @property
    def held(self) -> list[int]:
        return self.block_ids[self.first :]


class SequenceTable:
    """Blocks of one sequence in all KV groups, and the digests of its tokens.

    Args:
        tokens: returns the sequence's known tokens from start to stop; called when blocks are named.
        prompt_len: tokens of the prompt.
        salt: beginning of all digests, if any. Sequences with unlike salts share no blocks.
        block_sizes: tokens of a block, by group.

    Attributes:
        groups: block table of each group.
        num_found: leading tokens whose blocks other sequences computed, at every admission.
        num_matched: leading tokens whose blocks were cached at the latest admission, with or without a checkpoint.
    """

    __slots__ = ("_block_sizes", "_digests", "_salt", "_tokens", "groups", "num_found", "num_matched", "prompt_len")

    def __init__(
        self,
        tokens: Callable[[int, int], list[int]],
        prompt_len: int,
        salt: str | None,
        block_sizes: Sequence[int],
    ) -> None:
        self._tokens = tokens
        self._salt = b"" if salt is None else sha256(salt.encode(errors="surrogatepass")).digest()
        self._block_sizes = block_sizes
        # Of the leading full blocks; groups with blocks of equal sizes share them.
        self._digests: dict[int, list[bytes]] = {size: [] for size in block_sizes}
        self.groups = tuple(GroupTable() for _ in block_sizes)
        self.prompt_len = prompt_len
        self.num_found = sys.maxsize
        self.num_matched = 0

    def num_named(self, group: int) -> int:
        """Return the number of leading blocks of a group whose digests are computed."""
        return len(self._digests[self._block_sizes[group]])

    def keys(self, group: int, start: int, stop: int) -> list[bytes]:
        """Return the names of blocks `start` to `stop` of a group; equal tokens have unlike names in other groups."""
        size = self._block_sizes[group]
        digests = self._digests[size]
        if len(digests) < stop:
            token_ids = self._tokens(len(digests) * size, stop * size)
            layout = f"{size}q"
            parent = digests[-1] if digests else self._salt
            for at in range(0, len(token_ids), size):
                parent = sha256(parent + pack(layout, *token_ids[at : at + size])).digest()
                digests.append(parent)
        if not group:
            return digests[start:stop]
        suffix = bytes([group])
        return [digest + suffix for digest in digests[start:stop]]
