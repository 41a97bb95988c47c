"""Largest context that fits the memory, for engines without a configured max_model_len."""

from __future__ import annotations

from collections.abc import Callable

from phonograph.core.blocks import blocks_for
from phonograph.core.limits import Limits
from phonograph.engine.memory import MemoryPlan
from phonograph.errors import MemoryLimitError

SHORTEST = 2
"""Tokens of the shortest context: one of the prompt and one of the output."""

Planned = tuple[Limits, MemoryPlan]


def plan_fitting_context(plan: Callable[[int], Planned], longest: int, block_size: int) -> Planned:
    """Return the plan for the largest context of whole blocks that one sequence has room for.

    Buffers of attention backends grow with the context, so the size of the KV cache does not give the answer at once: a
    binary search over the number of blocks does.

    Args:
        plan: returns the limits and the memory plan for a context, or raises MemoryLimitError.
        longest: the model's context.
        block_size: tokens in a KV block.

    Raises:
        MemoryLimitError: not even the shortest context fits.
    """
    try:
        return plan(longest)
    except MemoryLimitError:
        pass
    fitting, refused = blocks_for(min(SHORTEST, longest), block_size), blocks_for(longest, block_size)
    best = plan(min(fitting * block_size, longest))
    while refused - fitting > 1:
        middle = (fitting + refused) // 2
        try:
            best, fitting = plan(middle * block_size), middle
        except MemoryLimitError:
            refused = middle
    return best
