"""Consecutive int32 words in device memory as tuples: the records and entries of the attention plans."""

# pyright: basic, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_words(pointer, COUNT: tl.constexpr):
    """Return COUNT words from `pointer` on."""
    words = ()
    for index in tl.static_range(COUNT):
        words = words + (tl.load(pointer + index),)
    return words


@triton.jit
def store_words(pointer, words, mask):
    """Write one tensor of words after the other, from `pointer` on."""
    for index in tl.static_range(len(words)):
        tl.store(pointer + index, words[index], mask=mask)
