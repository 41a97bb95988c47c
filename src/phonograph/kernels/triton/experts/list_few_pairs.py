"""Lists of few pairs, of one program: each pair is compared with all, without masks and without a read of memory.

    experts    | 7 2 | 2 9 | 7 9 |        of three tokens, pairs 0 to 5
    places     | 2 0 | 1 4 | 3 5 |        pairs of lower experts, and of the expert in lower tokens

Each `BLOCK`th pair of an expert begins an item, after the items that begin at lower places.

Shapes: r tokens of the program, k experts of a token.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

MOST_PAIRS, MOST_LISTED = 64, 1023
"""Most pairs, and most experts: both have their bits in one word."""


@triton.jit
def list_few_pairs(
    experts, row, num_rows, pairs_ptr, items_ptr, num_items_ptr,
    X: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the pairs and items of a tile from its experts [r, k]; rows from `num_rows` on have none."""
    R: tl.constexpr = experts.shape[0]
    C: tl.constexpr = experts.shape[1]
    P: tl.constexpr = R * C
    column = tl.arange(0, C)
    has = (row < num_rows)[:, None] & (column < K)[None, :]
    key = tl.reshape(tl.where(has, experts, X) * P + row[:, None] * C + column[None, :], (P,))
    key, others = key[None, :], key[:, None]
    # Words of one sum, so that threads exchange all of it at once: pairs of lower experts, pairs before, those up to
    # the end of the expert, and the expert.
    low = key // P * P
    words = (others < low).to(tl.int32) + ((others < key).to(tl.int32) << 7)
    words += ((others < low + P).to(tl.int32) << 14) + tl.where(others == key, key // P << 21, 0)
    words = tl.sum(words, 0)
    place, expert, pair = (words >> 7) & 127, words >> 21, tl.arange(0, P)
    routed = expert < X
    head = routed & ((place - (words & 127)) % BLOCK == 0)
    # Heads up to a pair's own place.
    heads = tl.sum((tl.where(head, place, P)[:, None] <= place[None, :]).to(tl.int32), 0)
    tl.store(pairs_ptr + place, pair // C * (K + SHARED) + pair % C, routed)
    ptrs = items_ptr + 3 * heads - 3
    tl.store(ptrs, expert, head)
    tl.store(ptrs + 1, place, head)
    tl.store(ptrs + 2, tl.minimum(((words >> 14) & 127) - place, BLOCK), head)
    tokens = tl.maximum(num_rows, 0)
    last = routed & (place == tokens * K - 1)
    tl.store(num_items_ptr, 0, tokens == 0)
    if SHARED:
        tl.store(pairs_ptr + tokens * K + row, row * (K + 1) + K, row < tokens)
        for begin in tl.static_range(0, R, BLOCK):
            has = last & (begin < tokens)
            ptrs = items_ptr + 3 * heads
            tl.store(ptrs, X, has)
            tl.store(ptrs + 1, tokens * K + begin, has)
            tl.store(ptrs + 2, tl.minimum(tokens - begin, BLOCK), has)
            heads += has.to(tl.int32)
    tl.store(num_items_ptr + heads * 0, heads, last)
