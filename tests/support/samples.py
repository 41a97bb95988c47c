"""Random texts that a grammar of `byte_grammars` allows."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from byte_grammars import END

CONTROLS = [byte for byte in range(0x20) if chr(byte) not in "\n\r"]
"""What the engine's masks never allow in JSON."""


def sample(grammar: Any, rng: random.Random, *, most: int = 400, ends: float = 0.3) -> str | None:
    """A text, byte by byte; None where it did not end within `most`, or nothing could come next, or it is no UTF-8.

    ends: how often one that ends something is taken where it may come; beyond 40 bytes it mostly is, or few texts ended
    """
    import xgrammar

    matcher = xgrammar.GrammarMatcher(grammar)
    bitmask = xgrammar.allocate_token_bitmask(1, END + 1)
    text = bytearray()
    while len(text) < most:
        matcher.fill_next_token_bitmask(bitmask)
        allowed = np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little")[: END + 1]
        allowed[CONTROLS] = 0
        choices = np.flatnonzero(allowed).tolist()
        if not choices:
            return None
        last = [one for one in choices if one == END or chr(one) in '"}]']
        token = rng.choice(last if last and rng.random() < (ends if len(text) < 40 else 0.8) else choices)
        assert matcher.accept_token(token)
        if token == END:
            return _decoded(text)
        text.append(token)
    return None


def _decoded(text: bytearray) -> str | None:
    """Bytes one by one can make what is no UTF-8 (halves of pairs, overlong forms): the library looks at less."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None
