"""Decode context parallelism in a plan: which ranks share the tokens of a KV head, and their blocks."""

from __future__ import annotations

from dataclasses import replace

from phonograph.attention.attention_spec import KVLayout
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import DeviceSpec
from phonograph.engine.groups.kv_groups import KVGroups
from phonograph.errors import ConfigError
from phonograph.models.spec import ModelSpec

SETTING = "decode_context_parallel_size"


def divide_context(
    config: EngineConfig, whole: ModelSpec, kv: KVGroups, device: DeviceSpec
) -> tuple[KVGroups, list[str]]:
    """Return the KV groups with blocks of which each rank keeps a part, and a note.

    Args:
        config: number of ranks, and settings that they may not support.
        whole: the model.
        kv: groups of a rank.
        device: of each rank.

    Raises:
        ConfigError: the ranks do not share a KV head, or the model or the device has no rule for that.
    """
    size, ranks = config.decode_context_parallel_size, config.tensor_parallel_size
    if size == 1:
        return kv, []
    group, problem = kv.groups[0], None
    if device.kind != "cpu" and kv.specs[0].has_fp8_cache:
        problem = f"kv_cache_dtype={config.kv_cache_dtype!r} has no rule for it on a GPU"
    elif kv.specs[0].layout is not KVLayout.NHD:
        problem = f"kv_cache_layout={config.kv_cache_layout!r} has no rule for it, NHD has"
    elif len(kv.groups) > 1 or group.window is not None:
        problem = "a model with windows has no rule for it"
    elif any(attention.sinks for attention in whole.attentions.values()):
        problem = "attention with sinks has no rule for it"
    if problem is not None:
        raise ConfigError(SETTING, size, f"{problem}; 1 works")
    num_kv_heads = next(iter(whole.attentions.values())).num_kv_heads
    copies = max(1, ranks // num_kv_heads)
    if copies % size:
        works = " or ".join(str(count) for count in range(1, copies + 1) if copies % count == 0)
        raise ConfigError(
            SETTING,
            size,
            f"tensor_parallel_size={ranks} puts each of {num_kv_heads} KV heads on {copies} rank{'s' * (copies > 1)}; "
            f"{works} works",
        )
    note = (
        f"{SETTING} {size}: each of {size} ranks has every {size}th token of a sequence; a block has "
        f"{size * group.block_size} tokens, of which a rank keeps {group.block_size}"
    )
    return replace(kv, groups=(replace(group, block_size=size * group.block_size),)), [note]
