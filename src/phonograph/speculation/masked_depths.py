"""Drafts of sequences with a grammar, whose rows have a mask each."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from phonograph.core.request import Request

_SLOW_FILLS = 4
"""Fills of masks that took too long, after which a sequence has no more drafts."""


def bound_masked(depths: list[int], decodes: Collection[Request], slow_masks: np.ndarray) -> list[int]:
    """Return depths of which those with masks are bounded.

    A sequence whose grammar does not keep up has no drafts. All others with a grammar have as many together as there
    are slots, which bounds the memory of masks.

    Args:
        depths: drafts that each decode may have.
        decodes: running requests past their prompts.
        slow_masks: see `GrammarMasks.slow`.
    """
    bounded, room = depths.copy(), len(slow_masks)
    for index, one in enumerate(decodes):
        if one.grammar is not None:
            bounded[index] = min(depths[index], room) if slow_masks[one.slot] < _SLOW_FILLS else 0
            room -= bounded[index]
    return bounded
