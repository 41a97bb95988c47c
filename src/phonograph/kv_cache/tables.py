"""Block tables of a sequence in its KV groups, and the digests that name its full blocks in the prefix cache."""

from __future__ import annotations

import sys
from bisect import bisect_left
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

    def num_shared(self, other: GroupTable) -> int:
        """Return the end of the equal blocks from the first that both tables hold.

        A block is shared only if the blocks before it are.
        """
        first, end = max(self.first, other.first), min(len(self.block_ids), len(other.block_ids))
        if first >= end or self.block_ids[first] != other.block_ids[first]:
            return 0
        return bisect_left(range(end), True, lo=first, key=lambda at: self.block_ids[at] != other.block_ids[at])


class SequenceTable:
    """Blocks of one sequence in all KV groups, and the digests of its tokens.

    Args:
        tokens: returns the sequence's known tokens from start to stop; called when blocks are named.
        prompt_len: tokens of the prompt.
        salt: beginning of all digests, if any. Sequences with unlike salts share no blocks.
        block_sizes: tokens of a block, by group.
        encoder_len: positions of its encoder; 0 without one.

    Attributes:
        groups: block table of each group.
        num_found: leading tokens whose blocks other sequences computed, at every admission.
        num_matched: leading tokens whose blocks were cached at the latest admission, with or without a checkpoint.
        encoded: the blocks of an encoder were cached at the latest admission.
    """

    __slots__ = (
        "_block_sizes", "_digests", "_root", "_tokens", "encoded", "encoder_len", "groups", "num_found", "num_matched",
        "prompt_len", "salt",
    )  # fmt: skip

    def __init__(
        self,
        tokens: Callable[[int, int], list[int]],
        prompt_len: int,
        salt: str | None,
        block_sizes: Sequence[int],
        encoder_len: int = 0,
    ) -> None:
        self._tokens, self.encoder_len = tokens, encoder_len
        self.salt = salt
        self._root = root_digest(salt)
        self._block_sizes = block_sizes
        # Of the leading full blocks; groups with blocks of equal sizes share them.
        self._digests: dict[int, list[bytes]] = {size: [] for size in block_sizes}
        self.groups = tuple(GroupTable() for _ in block_sizes)
        self.prompt_len = prompt_len
        self.num_found = sys.maxsize
        self.num_matched = 0
        self.encoded = False

    def num_named(self, group: int) -> int:
        """Return the number of leading blocks of a group whose digests are computed."""
        return len(self._digests[self._block_sizes[group]])

    @property
    def publishes(self) -> bool:
        """True unless the contents of its blocks are older than a reset, or may be wrong."""
        return all(one.num_published != sys.maxsize for one in self.groups)

    def tail_name(self, num_tokens: int) -> bytes | None:
        """Return a name of the tokens behind the last full block of the leading `num_tokens`; None if there are none.

        Blocks are those of group 0. Tokens with the same name have the same tokens before them, and the same salt.
        """
        full = num_tokens // self._block_sizes[0]
        token_ids = self._tokens(full * self._block_sizes[0], num_tokens)
        if not token_ids:
            return None
        parent = self.keys(0, full - 1, full)[0] if full else self._root
        return block_digests(token_ids, len(token_ids), parent)[0]

    def keys(self, group: int, start: int, stop: int) -> list[bytes]:
        """Return the names of blocks `start` to `stop` of a group; equal tokens have unlike names in other groups."""
        size = self._block_sizes[group]
        digests = self._digests[size]
        if len(digests) < stop:
            token_ids = self._tokens(len(digests) * size, stop * size)
            digests += block_digests(token_ids, size, digests[-1] if digests else self._root)
            assert len(digests) == stop, "a block is named before its tokens are known"
        if not group:
            return digests[start:stop]
        suffix = bytes([group])
        return [digest + suffix for digest in digests[start:stop]]

    def encoder_keys(self, group: int, num_blocks: int) -> list[bytes]:
        """Return the names of the blocks of an encoder in a group of cross attention."""
        return [sha256(self._root + pack("q", number)).digest() + bytes([group]) for number in range(num_blocks)]

    def token_ids(self, group: int, start: int, stop: int) -> list[int]:
        """Return the tokens of blocks `start` to `stop` of a group."""
        size = self._block_sizes[group]
        return self._tokens(start * size, stop * size)


def root_digest(salt: str | None) -> bytes:
    """Return the digest before the first block of a sequence."""
    return b"" if salt is None else sha256(salt.encode(errors="surrogatepass")).digest()


def block_digests(token_ids: Sequence[int], block_size: int, parent: bytes) -> list[bytes]:
    """Return the digests of full blocks, each of its tokens and the digest before it.

    Args:
        token_ids: tokens of the blocks; those after the last full block are left out.
        block_size: tokens of a block.
        parent: digest of the block before them, or `root_digest`.
    """
    layout = f"{block_size}q"
    digests: list[bytes] = []
    for at in range(0, len(token_ids) - block_size + 1, block_size):
        parent = sha256(parent + pack(layout, *token_ids[at : at + block_size])).digest()
        digests.append(parent)
    return digests
