"""Attention metadata of a step for all KV groups, with one plan for groups of equal attention.

A plan of most backends depends on lengths and windows, and on the pages that sequences share in all groups. Groups with
one backend then share a plan: the metadata of later groups differ from the first one's in block table and slot mapping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phonograph.attention.attention_spec import AttentionKind
from phonograph.attention.backend import AnyBackend
from phonograph.attention.metadata import AttentionMetadata, CommonMetadata
from phonograph.graphs.modes import GraphKey


def plan_sources(backends: Sequence[AnyBackend]) -> list[int]:
    """Return, for each KV group, the group whose plan it uses: itself, or the first one with its backend."""
    firsts = [backends.index(backend) for backend in backends]
    return [
        first if first != group and backends[group].capabilities.plans_by_lengths else group
        for group, first in enumerate(firsts)
    ]


class GroupBuilder:
    """Builder of the metadata of each KV group.

    Args:
        backends: backend of each group; groups of equal attention have the same object.

    Attributes:
        units: counts of the first group that shares prefixes; see `MetadataBuilder`.
    """

    def __init__(self, backends: Sequence[AnyBackend]) -> None:
        self._sources = plan_sources(backends)
        together = {source: [i for i, one in enumerate(self._sources) if one == source] for source in self._sources}
        # Of plans for several groups, the groups.
        self._together = {source: groups for source, groups in together.items() if len(groups) > 1}
        self._causal = [one.spec.kind is AttentionKind.DECODER for one in backends]
        self._builders = {group: backends[group].make_builder() for group in dict.fromkeys(self._sources)}
        self.units = next((one.units for one in self._builders.values() if one.units is not None), None)

    def build(self, commons: Sequence[CommonMetadata], *, key: GraphKey | None) -> tuple[AttentionMetadata, ...]:
        """Build the metadata of the step that runs next. The runner calls it exactly once for each step.

        Args:
            commons: the batch, with the block table and the slot mapping of each group.
            key: the graph that will be captured or replayed; None for an eager step.
        """
        made: list[AttentionMetadata] = []
        for group, (source, given) in enumerate(zip(self._sources, commons, strict=True)):
            common = given if self._causal[group] else replace(given, causal=False)
            if source == group:
                if group in self._together:
                    tables = tuple(commons[member].block_table for member in self._together[group])
                    common = replace(common, plan_tables=tables)
                made.append(self._builders[group].build(common, key=key))
            else:
                made.append(replace(made[source], common=common))
        return tuple(made)
