"""Weights in MXFP4: codes of 4 bits (e2m1), and a power of two (e8m0) for each 32 inputs.

The format is that of the OCP Microscaling Formats Specification 1.0. A word of 32 bits has eight codes, or the
exponents of four groups, lowest bits first. Every weight below 2^128 is exact in bfloat16; others are infinite.

On a GPU, codes lie as `spread` puts them, and words as `in_blocks` does. A number that is made of a code's bits is the
weight times 2^-126, which the scale makes up for. It would be infinite above 2; so exponents are stored `BIAS` lower
than they would be for that, and kernels multiply their sums by `FACTOR`.

Shapes: O outputs, I inputs, G groups, W words of an output's codes, S words of its exponents.
"""

from __future__ import annotations

import torch

GROUP = 32
"""Inputs of a group."""
CODES = tuple(sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""Numbers of the 16 codes."""
OFFSET = 127
NOT_A_NUMBER = 255
"""Exponent that is not a number. Others mean 2 ** (exponent - OFFSET)."""
SHIFT = 32
FACTOR = 2.0**SHIFT
"""Factor of sums of a GPU's products in bfloat16."""
BIAS = 126 - SHIFT
"""Number that is added to exponents on a GPU. They are then the exponents of scale * 2^126 / FACTOR in bfloat16."""
LARGEST = 254 - BIAS
"""Largest exponent on a GPU. Weights above 2^-100 are exact there; smaller ones may be rounded to 0."""
ROWS_OF_BLOCK, WORDS_OF_BLOCK = 8, 8
"""Outputs and words of an output whose words lie one after another on a GPU."""
_PAIRS = torch.tensor([(CODES[byte & 15], CODES[byte >> 4]) for byte in range(256)], dtype=torch.bfloat16)
"""Numbers of the two codes of each byte."""
_MOVES = (
    (0x0007, 6),
    (0x0008, 12),
    (0x0070, -1),
    (0x0080, 5),
    (0x0700, -8),
    (0x0800, -2),
    (0x3000, -2),
    (0xC000, -1),
)
"""Moves of `spread`: bits of each half of a word, and the places to the left by which they move."""


def dequantize_fp4(packed_OW: torch.Tensor, scales_OS: torch.Tensor, bias: int) -> torch.Tensor:
    """Return the weights [O, I] of words in the order of a file, in bfloat16; `bias` is that of the exponents."""
    codes_OB, exponents_OB = _bytes(packed_OW), _bytes(scales_OS)
    exponents_OG = exponents_OB[:, : codes_OB.shape[1] * 2 // GROUP].to(torch.int16) - bias
    # A bfloat16 has its exponent above 7 bits; 2^-127 has none, and one bit below it.
    scales_OG = (exponents_OG << 7).clamp_(min=1 << 6).view(torch.bfloat16)
    pairs = _PAIRS.to(codes_OB.device).view(torch.int32).flatten()
    values = pairs.index_select(0, codes_OB.flatten().int()).view(torch.bfloat16)
    return values.view(*scales_OG.shape, GROUP).mul_(scales_OG.unsqueeze(-1)).flatten(1)


def exponent_words(exponents_OG: torch.Tensor) -> torch.Tensor:
    """Return the words [O, S] of exponents, uint8; bytes after the last group are 0."""
    words_OS = exponents_OG.new_zeros(exponents_OG.shape[0], num_exponent_words(exponents_OG.shape[1]) * 4)
    words_OS[:, : exponents_OG.shape[1]] = exponents_OG
    return words_OS.view(torch.int32)


def num_exponent_words(groups: int) -> int:
    """Return S."""
    return -(-groups // 4)


def spread(packed_OW: torch.Tensor) -> torch.Tensor:
    """Return words whose codes lie where a GPU makes bfloat16 of them with fewest operations.

    A number needs its sign in bit 15 of its half of a word, and its other bits in 8 to 6. Shifts of the word by 0, 3
    and 6 places bring the codes 0, 1 and 2 of both halves there at once; code 3 has the bits that are left.
    """
    found = torch.zeros_like(packed_OW)
    for bits, left in _MOVES:
        found |= _moved(packed_OW, bits, left)
    return found


def gather(packed_OW: torch.Tensor) -> torch.Tensor:
    """Return the words from the result of `spread`."""
    found = torch.zeros_like(packed_OW)
    for bits, left in _MOVES:
        found |= _moved(packed_OW, bits << left if left > 0 else bits >> -left, -left)
    return found


def in_blocks(packed_OW: torch.Tensor) -> torch.Tensor:
    """Return words of which each block of outputs and words is 256 bytes in a row, which a warp reads at once.

    Rows of 32 bytes, in their place, would ask the L2 cache for a line with each two rows of a block.
    """
    blocks = packed_OW.unflatten(1, (-1, WORDS_OF_BLOCK)).unflatten(0, (-1, ROWS_OF_BLOCK))
    return blocks.transpose(1, 2).reshape(packed_OW.shape)


def from_blocks(packed_OW: torch.Tensor) -> torch.Tensor:
    """Return the words from the result of `in_blocks`."""
    outputs, words = packed_OW.shape
    blocks = packed_OW.reshape(-1, words // WORDS_OF_BLOCK, ROWS_OF_BLOCK, WORDS_OF_BLOCK)
    return blocks.transpose(1, 2).reshape(outputs, words)


def _moved(words: torch.Tensor, bits: int, left: int) -> torch.Tensor:
    """Return these bits of both halves of each word, moved."""
    target = bits << left if left > 0 else bits >> -left
    moved = words << left if left > 0 else words >> -left
    return moved & _signed(target << 16 | target)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _bytes(words_OW: torch.Tensor) -> torch.Tensor:
    # A row of one word may have any stride, also in a tensor that counts as contiguous.
    return words_OW.reshape(-1).view(torch.uint8).view(len(words_OW), -1)
