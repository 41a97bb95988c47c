"""Models with layers of other sizes."""

from __future__ import annotations

from dataclasses import replace

from phonograph.models.layer_spec import LayerSizes, LayerSpec, RopeTable, decoder_layer
from phonograph.models.layers.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.spec import ModelSpec


def resized(
    spec: ModelSpec, *, num_layers: int | None = None, vocab_size: int | None = None, **sizes: int
) -> ModelSpec:
    """Return a model without weight formats, with other numbers of layers and tokens, and other `LayerSizes`."""
    layers = spec.layers if num_layers is None else spec.layers[:1] * num_layers
    vocab_size = vocab_size or spec.vocab_size
    hidden_size = sizes.get("hidden_size", spec.hidden_size)
    return replace(
        spec,
        layers=tuple(_resized(layer, sizes) for layer in layers),
        head=LayerMatrix("lm_head", "", (MatrixPart("lm_head", vocab_size),), hidden_size),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
    )


def _resized(layer: LayerSpec, sizes: dict[str, int]) -> LayerSpec:
    attention, feed_forward = layer.attention, layer.feed_forward
    before = LayerSizes(
        attention.qkv.num_inputs,
        feed_forward.down.num_inputs,
        attention.num_query_heads,
        attention.num_kv_heads,
        attention.head_size,
    )
    made = decoder_layer(
        before._replace(**sizes),
        qkv_bias=attention.qkv.bias,
        o_bias=attention.output.bias,
        mlp_bias=feed_forward.down.bias,
        head_norms=attention.head_norms,
        joint_norms=attention.joint_norms,
        softcap=attention.softcap,
        activation=feed_forward.activation,
        window=attention.window,
        attention_norms=(attention.input_norm, attention.output_norm),
        feed_forward_norms=(feed_forward.input_norm, feed_forward.output_norm),
    )
    same = made.attention.head_size == attention.head_size
    return made.with_rope(attention.rope if same else RopeTable((1.0,) * (made.attention.head_size // 2)))
