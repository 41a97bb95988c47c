"""Attention backends of the KV groups, and the level of graphs that all of them support."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import AnyBackend
from phonograph.attention.composite.context_parallel import ContextParallelBackend
from phonograph.attention.selection import Selection, load, select
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import DeviceSpec
from phonograph.core.limits import Limits
from phonograph.engine.groups.kv_groups import KVGroups, group_name
from phonograph.errors import BackendError
from phonograph.graphs.modes import Support
from phonograph.kernels.ranks import Ranks


def select_backends(
    config: EngineConfig, kv: KVGroups, device: DeviceSpec
) -> tuple[KVGroups, dict[AttentionSpec, Selection], list[str]]:
    """Select a backend for each distinct attention, and the block size that it prefers.

    Returns:
        The groups with their final block sizes, the selection for each distinct specification, and notes on block
        sizes.

    Raises:
        ConfigError: there is no such backend, or no such version of it.
        BackendError: the named backend refuses, or all do; with several groups the message names the group.
    """
    version = None if config.flash_attn_version is None else str(config.flash_attn_version)
    selected: dict[AttentionSpec, Selection] = {}
    for spec, (index, *_) in kv.members.items():
        try:
            selected[spec] = select(config.attention_backend, version, spec, device)
        except BackendError as error:
            if len(kv.groups) == 1:
                raise
            raise BackendError(f"{group_name(index, kv.groups[index])}: {error}") from error
    # Other groups must have pages of equal bytes. A configured number of blocks refers to the default block size.
    if len(kv.groups) > 1 or config.block_size is not None or config.num_kv_blocks is not None:
        return kv, selected, []
    spec = kv.specs[0]
    selection = selected[spec]
    preferred = selection.capabilities.preferred_block_size(spec)
    if preferred is None:
        return kv, selected, []
    size, reason = preferred
    resized = replace(spec, block_size=size)
    if selection.capabilities.why_not(resized, device):
        return kv, selected, []
    groups = tuple(replace(group, block_size=size) for group in kv.groups)
    return replace(kv, groups=groups, specs=(resized,)), {resized: selection}, [f"block_size {size}: {reason}"]


def make_backends(
    kv: KVGroups,
    selections: Sequence[Selection],
    device: torch.device,
    limits: Limits,
    *,
    ranks: Ranks | None = None,
    context_ranks: int = 1,
) -> list[AnyBackend]:
    """Make the attention backend of each KV group; groups of equal attention have the same one.

    Args:
        kv: groups.
        selections: backend of each group.
        device: of the backends.
        limits: the largest batch.
        ranks: connection with the other ranks; None for one rank.
        context_ranks: ranks that share the tokens of a KV head.

    Raises:
        ConfigError: a library is missing.
        BackendError: an adapter does not fit its library.
    """
    made: dict[AttentionSpec, AnyBackend] = {}
    for spec, selection in zip(kv.specs, selections, strict=True):
        if spec not in made:
            make = load(selection)
            if ranks is not None and context_ranks > 1:
                make = partial(ContextParallelBackend, make=make, ranks=ranks, num_ranks=context_ranks)
            made[spec] = make(spec, device, limits)
    return [made[spec] for spec in kv.specs]


def weakest_support(kv: KVGroups, selected: dict[AttentionSpec, Selection], device: DeviceSpec) -> Support:
    """Return the lowest level of graph support among the groups. With several groups its reason names the group.

    Args:
        kv: KV groups.
        selected: backend of each distinct specification.
        device: the device.
    """
    supports = {spec: selected[spec].capabilities.graph_support(spec, device) for spec in kv.members}
    weakest = min(supports, key=lambda spec: supports[spec].level)
    level, reason = supports[weakest].level, supports[weakest].reason
    if len(kv.groups) == 1 or len(set(supports.values())) == 1:
        return Support(level, reason)
    index = kv.members[weakest][0]
    return Support(level, f"{group_name(index, kv.groups[index])}: {reason}")
