"""Sizes of FlashInfer's workspaces: the library's own arithmetic, as bounds for every batch.

The library gives each wrapper 8 MiB of integers on the device and as many pinned. The plan of a graph needs tens or
hundreds of kilobytes, so with these bounds a hundred graphs save most of a gigabyte. If a bound were too small, `plan`
would raise and name the buffer: it writes nothing beyond one.

T tokens, R slots, H query heads, K KV heads, D head size. A tile is a block of rows, which are (token, query head of
one KV head).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.composite.capabilities import decode_part
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSet

EAGER_INTEGERS = 8 << 20
"""Bytes of the integer workspace that the library gives a wrapper. Wrappers of eager steps keep it."""
_SLACK = 4096
"""Bytes for rounding up to 16 bytes, and for a few scalars."""
_FA2_LEAST_TILE = 16
"""Rows in the narrowest tile of FA2; the others have 64 and 128."""
_FA3_TILE = 128
"""Tokens in a tile of FA3 (192 at head size 64)."""
_FA3_WORDS = 7
"""Words of FA3's plan for each tile."""
_FA3_SHARED_WORKS = 4096
"""Number of tiles of a head above which all heads share one list."""


def splits_mixed(spec: AttentionSpec) -> bool:
    """Return True if decodes of a mixed graph can use the decode wrapper, which takes one row of each sequence."""
    return spec.speculative_tokens == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Workspace sizes of one KV group.

    Attributes:
        routine: implementation of prefill, "fa2" or "fa3".
        num_sms: multiprocessors of the device.
    """

    spec: AttentionSpec
    limits: Limits
    routine: str
    num_sms: int

    def floats(self) -> int:
        """Return the bytes of the float workspace: float32 partial results of split keys.

        They occur in decodes for all slots and in FA2: in eager prefills, split only until they fill the device, and
        with speculation in prefills of graphs. FA3 never splits. 84 MB for 256 slots of Llama-3.1-8B on Hopper.
        """
        spec, slots = self.spec, self.limits.max_num_seqs
        shapes = [self._decode_tiles(slots)]
        if self.routine == "fa2":
            shapes.append((self._least_tiles(), self._prefill_tile()))
            if spec.speculative_tokens:
                shapes.append(self._prefill_tiles(slots * (1 + spec.speculative_tokens), slots + 1))
        rows = max(tiles * tile for tiles, tile in shapes)
        return spec.num_query_heads * rows * (spec.head_size + 1) * 4 + _SLACK

    def total(self, graphs: Sequence[GraphKey]) -> int:
        """Return the bytes on the device of the wrappers of these graphs and of the two eager ones."""
        limits, whole = self.limits, [key for key in graphs if key.graphs is not GraphSet.PIECEWISE]
        decodes = {key.num_reqs for key in whole if key.query_len == 1}
        if splits_mixed(self.spec):
            mixed = (key for key in whole if key.graphs is GraphSet.MIXED)
            decodes |= {decode_part(key.num_tokens, key.num_reqs, 1).num_reqs for key in mixed}
        prefills = {(key.num_reqs, key.num_tokens) for key in whole if key.query_len != 1}
        return (
            self.floats()
            + 2 * EAGER_INTEGERS
            + 4 * self.pages()
            + sum(self.decode_integers(slots) for slots in decodes)
            + sum(self.prefill_integers(tokens, slots + 1) for slots, tokens in prefills)
            + 4 * (5 * limits.max_num_seqs + 6)
        )

    def pages(self) -> int:
        """Return the number of page numbers of the largest batch."""
        return self.limits.max_num_seqs * -(-self.limits.max_model_len // self.spec.block_size)

    def decode_integers(self, slots: int) -> int:
        """Return the bytes of a decode wrapper's integer workspace."""
        return _fa2_integers(self._decode_tiles(slots)[0], slots, slots)

    def prefill_integers(self, tokens: int, slots: int) -> int:
        """Return the bytes of a prefill wrapper's integer workspace."""
        if self.routine == "fa2":
            # The narrowest tiles are the most numerous.
            tiles = max(self._least_tiles(), -(-tokens * self._group // _FA2_LEAST_TILE) + slots)
            return _fa2_integers(tiles, tokens, slots)
        works = -(-tokens // _FA3_TILE) + slots
        works *= 1 if works > _FA3_SHARED_WORKS + 1 else self.spec.num_query_heads
        return 4 * (_FA3_WORDS * works + self.num_sms) + _SLACK

    @property
    def _group(self) -> int:
        return self.spec.num_query_heads // self.spec.num_kv_heads

    def _least_tiles(self) -> int:
        """Return the tiles that fill the device twice. A graph never launches fewer."""
        return 2 * self.num_sms // self.spec.num_kv_heads

    def _prefill_tile(self) -> int:
        return 64 if self.spec.head_size >= 256 else 128

    def _decode_tiles(self, slots: int) -> tuple[int, int]:
        tile = next((tile for tile in (_FA2_LEAST_TILE, 64) if self._group <= tile), self._prefill_tile())
        return max(self._least_tiles(), -(-slots * self._group // tile) + slots), tile

    def _prefill_tiles(self, tokens: int, slots: int) -> tuple[int, int]:
        # The library chooses the width by the longest query that is possible, so this is the widest.
        tile = self._prefill_tile()
        return max(self._least_tiles(), -(-tokens * self._group // tile) + slots), tile


def _fa2_integers(tiles: int, tokens: int, slots: int) -> int:
    """Return bytes for three words and a flag a tile, and a word for each token and slot."""
    return 13 * tiles + 4 * (tokens + slots) + _SLACK
