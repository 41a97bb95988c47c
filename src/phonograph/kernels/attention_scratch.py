"""Shapes of the scratch of our attention kernels, apart from them so that memory can be planned without Triton."""

from __future__ import annotations

MAX_SHORT_QUERY = 16
"""Longest query, in tokens, that `decode_attention` serves; longer ones fill the tiles of `prefill_attention`."""
PREFILL_ROWS = 128
"""Rows of a prefill's tile, for heads of up to 256 (`prefill_rows`)."""
SHORTEST_PIECE = 512
"""Least keys of a piece that a prefill's tile is cut into."""
DECODE_PROGRAMS = 2
"""Programs of the launch for short queries that a multiprocessor has room for."""
UNIT_COST = 2
"""Cost of beginning a unit, in tiles of keys (`decode_plan`)."""
MIN_SHARED = 256
"""Keys of the shortest prefix that decodes attend once."""
LONGEST_WINDOW = 1 << 17
"""Keys of the longest window in which decodes share prefixes: its tiles are counted in a part of a word."""
SHARING_COST = 6
"""Cost of sharing prefixes in a batch, in tiles of keys of each program: these wait for each other, and read partial
results. On an H200 a launch lost below 4 (2.9% of its time with 1.5) and won from 5 on (2.6% with 6.5)."""
PREFIX_TILES_FROM = 64
"""Sequences from which there are graphs of decodes with shared prefixes in tiles of 128 rows, in their own launch."""
PREFIX_TILES_WORK = 4096
"""Tiles of keys of shared prefixes, in a layer, from which a graph with that launch is faster than one without it. On
an H200 it lost with 2,048 (6 and 3% of a step) and won with 8,192 (8%)."""
_PARTIALS_PER_PROGRAM = 3


def holds_all_programs(capability: tuple[int, int]) -> bool:
    """Return True if a GPU, by its compute capability, runs all programs of the launch for short queries at once.

    Those that share prefixes wait for each other. Two of them take the shared memory that a multiprocessor of Hopper or
    of a Blackwell for servers has. (0, 0) is a CPU, whose interpreter runs both phases one after the other.
    """
    return capability[0] in (0, 9, 10)


def tile_width(head_size: int) -> int:
    """Return the columns of a tile: a power of two, at least the 16 of a product."""
    return max(16, 1 << (head_size - 1).bit_length())


def row_tiles(group: int, width: int, *, shares: bool = False) -> tuple[int, int]:
    """Return the rows of the tile for queries that fit the smallest one, and for all others.

    Those have up to MAX_SHORT_QUERY tokens. With `shares` they may hold the queries of many sequences.
    """
    most = 64 if width <= 128 else 32 if width <= 256 else 16
    small = min(tile_width(group), most)
    return small, most if shares else min(max(tile_width(MAX_SHORT_QUERY * group), small), most)


def decode_partials(
    group: int, head_size: int, num_sms: int, *, shared_rows: int = 0, tile_rows: int = 0
) -> tuple[int, int, int]:
    """Return slots, rows and columns of the partial results of the launch for short queries.

    `shared_rows` are (token, query head) that may share prefixes, each on two levels; `tile_rows` those of cut tiles of
    a launch for prefixes.
    """
    width = tile_width(head_size)
    rows = row_tiles(group, width, shares=shared_rows > 0)[1]
    slots = 2 * DECODE_PROGRAMS * num_sms
    if shared_rows:
        slots = 2 * slots + -(-2 * shared_rows // rows) + -(-tile_rows // rows)
    return slots, rows, width


def prefix_slots(num_kv_heads: int, num_sms: int) -> int:
    """Return the cut tiles of shared prefixes, for each KV head, in the launch for prefixes: two rounds of programs."""
    return max(2 * num_sms // num_kv_heads, 1)


def prefix_tile_rows(num_kv_heads: int, num_sms: int) -> int:
    """Return the rows of the partial results of cut tiles of the launch for prefixes."""
    return prefix_slots(num_kv_heads, num_sms) * num_kv_heads * PREFILL_ROWS


def key_tile(width: int) -> int:
    """Return the keys of a tile of the launch for short queries, so that two programs fit a multiprocessor."""
    return 64 if width <= 128 else 32 if width <= 256 else 16


def prefill_rows(head_size: int) -> int:
    """Return the rows of a prefill's tile. Sums of 128 rows of 512 numbers take all registers of a multiprocessor."""
    return PREFILL_ROWS if tile_width(head_size) <= 256 else PREFILL_ROWS // 2


def prefill_programs(head_size: int, num_sms: int) -> int:
    """Return the number of programs of the launch for long queries."""
    return num_sms * (2 if head_size <= 128 else 1)


def prefill_partials(num_kv_heads: int, head_size: int, num_sms: int, *, cuts: bool) -> tuple[int, int, int]:
    """Return slots, rows and columns of the partial results of the launch for long queries.

    Where no tile is cut there is one slot for each KV head, which stays empty.
    """
    programs = _PARTIALS_PER_PROGRAM * prefill_programs(head_size, num_sms)
    slots = max(8, -(-programs // num_kv_heads)) if cuts else 1
    return slots * num_kv_heads, prefill_rows(head_size), tile_width(head_size)
