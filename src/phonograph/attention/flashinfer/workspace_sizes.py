"""How much scratch FlashInfer's plans take: its own arithmetic, as bounds that hold for every batch.

The library gives each wrapper 8 MiB of integers on the device and as many pinned, which for a hundred graphs would be
most of a gigabyte; a graph's plan takes tens or hundreds of kilobytes. Where a bound here were too small, `plan` would
raise and say which buffer overflowed: nothing is written beyond one.

T tokens, R slots, H query heads, K KV heads, D head size. A tile is a block of rows, which are (token, query head of
one KV head).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phonograph.attention.backend import AttentionSpec, BatchLimits
from phonograph.attention.composite.capabilities import decode_part
from phonograph.graphs.modes import GraphKey, GraphSet

EAGER_INTEGERS = 8 << 20
"""Bytes of the integer workspace that the library gives a wrapper: those of eager steps keep it."""
_SLACK = 4096
"""For what the library rounds up to 16 bytes, and its few scalars."""
_FA2_LEAST_TILE = 16
"""Rows in the narrowest tile of FA2; the others have 64 and 128."""
_FA3_TILE = 128
"""Tokens in a tile of FA3 (192 at head size 64)."""
_FA3_WORDS = 7
"""Words that its plan keeps of each tile."""
_FA3_SHARED_WORKS = 4096
"""Above so many tiles in a head, all heads share one list."""


def splits_mixed(spec: AttentionSpec) -> bool:
    """Whether decodes of a mixed graph can have the decode wrapper, which takes one row of each sequence."""
    return spec.speculative_tokens == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """routine: of prefill, "fa2" or "fa3"; num_sms: of the device."""

    spec: AttentionSpec
    limits: BatchLimits
    routine: str
    num_sms: int

    def floats(self) -> int:
        """Bytes of the one float workspace: partial results in float32 where keys are split, which FA3 never does.

        Decode for all slots, eager prefill (split only while that fills the device), and with speculation the prefill
        of graphs. 84 MB for 256 slots of Llama-3.1-8B on Hopper.
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
        """All that is kept on the device, by the wrappers of these graphs and by the two of eager steps."""
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
        """Page numbers of the largest batch."""
        return self.limits.max_num_seqs * -(-self.limits.max_model_len // self.spec.block_size)

    def decode_integers(self, slots: int) -> int:
        """Bytes of the integer workspace of a decode wrapper."""
        return _fa2_integers(self._decode_tiles(slots)[0], slots, slots)

    def prefill_integers(self, tokens: int, slots: int) -> int:
        """The same of a prefill wrapper."""
        if self.routine == "fa2":
            # The narrowest tiles, of which there are most.
            tiles = max(self._least_tiles(), -(-tokens * self._group // _FA2_LEAST_TILE) + slots)
            return _fa2_integers(tiles, tokens, slots)
        works = -(-tokens // _FA3_TILE) + slots
        works *= 1 if works > _FA3_SHARED_WORKS + 1 else self.spec.num_query_heads
        return 4 * (_FA3_WORDS * works + self.num_sms) + _SLACK

    @property
    def _group(self) -> int:
        return self.spec.num_query_heads // self.spec.num_kv_heads

    def _least_tiles(self) -> int:
        """Tiles that fill the device twice: in a graph never fewer are launched."""
        return 2 * self.num_sms // self.spec.num_kv_heads

    def _prefill_tile(self) -> int:
        return 64 if self.spec.head_size >= 256 else 128

    def _decode_tiles(self, slots: int) -> tuple[int, int]:
        tile = next((tile for tile in (_FA2_LEAST_TILE, 64) if self._group <= tile), self._prefill_tile())
        return max(self._least_tiles(), -(-slots * self._group // tile) + slots), tile

    def _prefill_tiles(self, tokens: int, slots: int) -> tuple[int, int]:
        # The library takes the longest query that could be there for the width of tiles, so this is the widest.
        tile = self._prefill_tile()
        return max(self._least_tiles(), -(-tokens * self._group // tile) + slots), tile


def _fa2_integers(tiles: int, tokens: int, slots: int) -> int:
    """Three words and a flag for each tile, a word for each token and slot."""
    return 13 * tiles + 4 * (tokens + slots) + _SLACK
