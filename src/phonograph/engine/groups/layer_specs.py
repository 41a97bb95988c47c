"""Attention of each layer of a model under a configuration."""

from __future__ import annotations

from phonograph.attention.attention_spec import AttentionKind, AttentionSpec, KVLayout
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import DeviceSpec
from phonograph.models.layer_spec import LayerAttention
from phonograph.models.spec import ModelSpec

KV_CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
# GPU kernels load keys with the copy engine if a block holds a whole tile of them (docs/performance.md).
_DEFAULT_BLOCK_SIZE = {"cpu": 16, "cuda": 64}


def layer_specs(config: EngineConfig, model: ModelSpec, dtype: str, device: DeviceSpec) -> list[AttentionSpec]:
    """Return the attention of each layer that has it.

    Args:
        config: settings of the KV cache and of graphs.
        model: sizes of the model.
        dtype: type of its weights.
        device: its default block size.
    """
    divides = config.decode_context_parallel_size > 1

    def kind(layer: LayerAttention) -> AttentionKind:
        if layer.memory is not None:
            return AttentionKind.ENCODER_DECODER
        return AttentionKind.DECODER if model.causal else AttentionKind.ENCODER_ONLY

    def layer_spec(layer: LayerAttention) -> AttentionSpec:
        return AttentionSpec(
            num_query_heads=layer.num_query_heads,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            dtype=dtype,
            kv_cache_dtype=KV_CACHE_DTYPES.get(config.kv_cache_dtype, dtype),
            block_size=config.block_size or _DEFAULT_BLOCK_SIZE[device.kind],
            kind=kind(layer),
            layout=KVLayout(config.kv_cache_layout),
            windows=(layer.window,),
            softcap=layer.softcap,
            sinks=layer.sinks,
            speculative_tokens=config.draft_tokens,
            lse=divides,
            non_causal=divides,
            shared_prefixes=config.cascade_attention == "auto"
            and not divides
            and model.pooler is None
            and not model.states
            and model.encoder is None,
            batch_invariant=config.batch_invariant,
        )

    return [layer_spec(attention) for attention in model.attentions.values()]
