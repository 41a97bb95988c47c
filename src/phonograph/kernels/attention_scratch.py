"""Shapes of what our attention kernels keep between their launches: apart from them, so that memory can be planned
where there is no triton."""

from __future__ import annotations

MAX_SHORT_QUERY = 16
"""Queries of up to this many tokens are served by `attention_decode`; longer ones fill the tiles of
`attention_prefill`."""
PREFILL_ROWS = 128
"""Rows of a prefill's tile."""
SHORTEST_PIECE = 512
"""Keys of a piece that a prefill's tile may be cut into, at least."""
DECODE_PROGRAMS = 2
"""Programs of the launch for short queries that a multiprocessor has room for."""
_PARTIALS_A_PROGRAM = 3


def tile_width(head_size: int) -> int:
    """Columns of a tile: a power of two, at least the 16 of a product."""
    return max(16, 1 << (head_size - 1).bit_length())


def row_tiles(group: int, width: int) -> tuple[int, int]:
    """Rows of the tile for queries that fit the smallest one, and for all others of up to MAX_SHORT_QUERY tokens."""
    most = 64 if width <= 128 else 32
    small = min(tile_width(group), most)
    return small, min(max(tile_width(MAX_SHORT_QUERY * group), small), most)


def decode_programs(num_sms: int) -> int:
    return DECODE_PROGRAMS * num_sms


def decode_partials(group: int, head_size: int, num_sms: int) -> tuple[int, int, int]:
    """Partial results of the launch for short queries: slots, rows, columns."""
    width = tile_width(head_size)
    return 2 * decode_programs(num_sms), row_tiles(group, width)[1], width


def prefill_programs(head_size: int, num_sms: int) -> int:
    return num_sms * (2 if head_size <= 128 else 1)


def prefill_slots(num_kv_heads: int, head_size: int, num_sms: int, *, cuts: bool) -> int:
    """Partial results that there is room for, of each KV head; one, that nothing goes to, where no tile is cut."""
    return max(8, -(-_PARTIALS_A_PROGRAM * prefill_programs(head_size, num_sms) // num_kv_heads)) if cuts else 1


def prefill_partials(num_kv_heads: int, head_size: int, num_sms: int, *, cuts: bool) -> tuple[int, int, int]:
    """Partial results of the launch for long queries: slots, rows, columns."""
    slots = prefill_slots(num_kv_heads, head_size, num_sms, cuts=cuts)
    return slots * num_kv_heads, PREFILL_ROWS, tile_width(head_size)
