"""KV groups of a plan as lines of text."""

from __future__ import annotations

from phonograph.cli.show import compact
from phonograph.engine.groups.group_facts import group_facts
from phonograph.engine.groups.kv_groups import KVGroups, group_name, window_name
from phonograph.engine.plan import EnginePlan
from phonograph.errors import counted


def group_names(kv: KVGroups, members: list[int]) -> str:
    """Return the names of groups of equal attention, as "KV groups 0, 1 (8 layers, window 1024)"."""
    first = members[0]
    name = group_name(first, kv.groups[first])
    return name if len(members) == 1 else name.replace(f"group {first}", f"groups {', '.join(map(str, members))}", 1)


def group_lines(plan: EnginePlan) -> list[str]:
    """Return a line for each KV group; none for a single one without a window, which memory and attention describe."""
    if plan.kv.grows_with_tokens:
        return []
    lines: list[str] = []
    for index, group in enumerate(group_facts(plan)):
        lines.append(
            f"{index}: {counted(len(group.layers), 'layer')} ({compact(group.layers)}), {window_name(group.window)}, "
            f"blocks of {counted(group.block_size, 'token')}, at most {group.blocks_per_request} a request, "
            f"{group.backend}"
        )
    return lines
