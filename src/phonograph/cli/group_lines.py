"""KV groups of a plan, and prefixes that a batch shares in them, as lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.selection import Selection
from phonograph.attention.triton.capabilities import why_not_shared
from phonograph.attention.triton.prefix_runs import PrefixRun, count_units, find_runs
from phonograph.cli.show import compact
from phonograph.core.batch import ScheduledBatch
from phonograph.engine.groups.group_facts import group_facts
from phonograph.engine.groups.kv_groups import KVGroups, group_name, keys_name
from phonograph.engine.plan import EnginePlan
from phonograph.errors import counted
from phonograph.kernels.attention_scratch import MAX_SHORT_QUERY
from phonograph.models.spec import ModelSpec


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
    for index, (kv_group, group) in enumerate(zip(plan.kv.groups, group_facts(plan), strict=True)):
        reads = f", read by {len(group.readers)} more ({compact(group.readers)})" if group.readers else ""
        lines.append(
            f"{index}: {counted(len(group.layers), 'layer')} ({compact(group.layers)}{reads}), "
            f"{keys_name(kv_group)}, blocks of {counted(group.block_size, 'token')}, at most "
            f"{group.blocks_per_request} a request, {group.backend}"
        )
    return lines


def attention_lines(plan: EnginePlan) -> list[str]:
    """Return the backend of each KV group and the steps to it."""
    members = plan.kv.members
    if len(members) == 1:
        return _selection_lines(plan, plan.selection, plan.attention)
    lines: list[str] = []
    for spec, groups in members.items():
        label, *reasons = _selection_lines(plan, plan.selections[groups[0]], spec)
        lines += [f"{group_names(plan.kv, groups)}: {label}", *reasons]
    return lines


def _selection_lines(plan: EnginePlan, selection: Selection, spec: AttentionSpec) -> list[str]:
    """Return a backend and the steps to it. On a CPU one line stands for all backends that only run on a GPU."""
    label = selection.capabilities.label
    kernels = [name for name, why in selection.rejected.items() if any(text.startswith("device ") for text in why)]
    if plan.device.kind != "cpu" or not kernels:
        sharing = [] if plan.device.kind == "cpu" else [sharing_reason(plan, selection, spec)]
        return [label, *(f"- {reason}" for reason in (*selection.reasons, *sharing))]
    others = (f"- {name} refuses: {'; '.join(why)}" for name, why in selection.rejected.items() if name not in kernels)
    return [f"{label}: the GPU kernels need a GPU (--matrix has each refusal)", *others]


def sharing_reason(plan: EnginePlan, selection: Selection, spec: AttentionSpec) -> str:
    """Return the reason why decodes attend a prefix that they share once, or not."""
    if plan.model.states and plan.config.cascade_attention == "auto":
        return "each decode reads a shared prefix: attending it once is not tested with layers that have a state"
    return selection.capabilities.prefix_sharing(spec, plan.device)[1]


def runs_of(
    plan: EnginePlan, batch: ScheduledBatch, shared: list[int]
) -> Iterator[tuple[str, list[PrefixRun], tuple[int, int, int]]]:
    """Yield the runs of a batch that attend a prefix once, for each kind of KV group whose backend does that.

    The values are the names of the groups, the runs, and the counts of `count_units`.

    Args:
        plan: of the engine.
        batch: the batch.
        shared: leading tokens of each sequence that are in the same blocks as its neighbours'.
    """
    for spec, groups in plan.kv.members.items():
        if plan.shares_prefixes(spec):
            size = spec.block_size
            keys = [0, *(min(pair) // size * size for pair in pairwise(shared))]
            # Longer queries are attended by another launch.
            keys = [
                count if query <= MAX_SHORT_QUERY else 0 for count, query in zip(keys, batch.query_lens, strict=True)
            ]
            left = next(one[0] for one in spec.windows if not why_not_shared(spec, one, plan.device.capability))
            seq_lens = [sum(pair) for pair in zip(batch.context_lens, batch.query_lens, strict=True)]
            runs = find_runs(spec, plan.device.num_sms, keys, batch.query_lens, seq_lens, left)
            yield group_names(plan.kv, groups), runs, count_units(spec, runs, batch.query_lens)


def shared_tiles(plan: EnginePlan, batch: ScheduledBatch, shared: list[int]) -> int:
    """Return the tiles of keys of shared prefixes by which an engine that has run this batch chooses its next graph."""
    return next((tiles for _, _, (_, _, tiles) in runs_of(plan, batch, shared)), 0)


def sharing_lines(plan: EnginePlan, batch: ScheduledBatch, shared: list[int]) -> list[str]:
    """Return a line for each run of a batch that attends a prefix once; none for a batch that shares nothing."""
    if not any(shared):
        return []
    lines: list[str] = []
    for name, runs, (shared_units, own_units, _) in runs_of(plan, batch, shared):
        label = f"{name}: " if len(plan.kv.members) > 1 else ""
        lines += [
            f"- {label}sequences {run.first} to {run.last} attend keys {run.begin} to {run.end} once, then each its own"
            for run in runs
        ]
        if runs:
            lines.append(f"- {label}{counted(shared_units, 'shared unit')} and {own_units} others in each layer")
    return lines or ["- no prefix is attended once: no backend does that here, or it would save too little"]


def layers_text(model: ModelSpec) -> str:
    """Return the numbers of layers, of those with each kind of state, and of heads with sizes, which may differ."""
    states = Counter(mixer.name for mixer in model.states.values())
    heads = dict.fromkeys(
        f"{one.num_query_heads} query and {one.num_kv_heads} KV heads of size {one.head_size}"
        for one in model.attentions.values()
    )
    kinds = (f"{count} with a {name}" for name, count in states.items())
    return ", ".join([f"{model.num_layers} layers", *kinds, " or ".join(heads)])


def shorten_layers(layers: list[dict[str, Any]]) -> None:
    """Name the mixer of each layer by its kind, and leave the frequencies of its rope out."""
    for layer in layers:
        mixer = layer.pop("mixer")
        layer["attention" if "rope" in mixer else "state"] = mixer
        rope = mixer.get("rope")
        if rope is not None:
            mixer["rope"] = {"pairs": len(rope.frequencies), "factor": rope.factor}
