"""Facts about the KV groups of an engine, for people and programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phonograph.core.blocks import group_pages

if TYPE_CHECKING:
    from phonograph.engine.plan import EnginePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """One KV group.

    layers:             its layers
    window:             keys that a token attends to, itself included; None for all
    block_size:         tokens of a block
    blocks_per_request: most blocks that a request of full length holds at a time
    backend:            attention backend
    reasons:            steps of its selection
    """

    layers: tuple[int, ...]
    window: int | None
    block_size: int
    blocks_per_request: int
    backend: str
    reasons: tuple[str, ...]


def group_facts(plan: EnginePlan) -> tuple[GroupFacts, ...]:
    """Return the facts about each KV group of a plan."""
    limits = plan.limits
    return tuple(
        GroupFacts(
            layers=group.layers,
            window=group.window,
            block_size=group.block_size,
            blocks_per_request=group_pages(group, limits.max_model_len, limits.max_num_batched_tokens),
            backend=selection.capabilities.label,
            reasons=selection.reasons,
        )
        for group, selection in zip(plan.kv.groups, plan.selections, strict=True)
    )
