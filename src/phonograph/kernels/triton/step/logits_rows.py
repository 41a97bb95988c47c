"""Rows of logits of a sequence, and the keys of their draws.

Each token of a decode has a row of logits. A prefill has one, for its last token.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from phonograph.kernels.triton.sampling.scan import descend


@triton.jit
def logits_rows(staging, row, query_start, query_end, QUERY_STARTS: tl.constexpr):
    """Return the first row of logits of sequence `row`, and their number. Decodes come first in a step."""
    num_decodes = tl.load(staging + 2)
    decode_tokens = tl.load(staging + QUERY_STARTS + num_decodes)
    is_decode = row < num_decodes
    first = tl.where(is_decode, query_start, decode_tokens + row - num_decodes)
    return first, tl.where(is_decode, query_end - query_start, 1)


@triton.jit
def draw_key(low, high, draw):
    """Return the key of a request's draw number `draw`, int64, from both words of its stream key."""
    stream_key = high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32 | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    return descend(stream_key, draw.to(tl.uint64)).to(tl.int64)
