"""Names, shapes and bytes of a model's tensors in a checkpoint, after the names of a family are replaced."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from phonograph.models.heads.encoder_specs import PREFIX as ENCODER
from phonograph.models.layer_spec import LayerAttention, LayerSpec
from phonograph.models.weights.wrapper import is_norm

if TYPE_CHECKING:
    from phonograph.models.spec import ModelSpec

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_LAYERS = "model.layers"


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a checkpoint must have, but those of quantized matrices."""
    hidden = spec.hidden_size
    norm_tensors = ("weight", "bias") if spec.norms.bias else ("weight",)
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.features is None or spec.features.owns_embedding:
        rows = spec.features.vocab_size if spec.features else spec.head.num_outputs
        shapes["model.embed_tokens.weight"] = (rows, hidden)
    if spec.features is not None:
        shapes |= {f"model.{name}": shape for name, shape in spec.features.tensors(hidden)}
    if spec.layer_embeddings is not None:
        vocab_size, size = spec.layer_embeddings
        shapes["model.embed_tokens_per_layer.weight"] = (vocab_size, spec.num_layers * size)
        shapes["model.per_layer_model_projection.weight"] = (spec.num_layers * size, hidden)
        shapes["model.per_layer_projection_norm.weight"] = (size,)
    for index, layer in enumerate(spec.layers):
        shapes |= {f"{_LAYERS}.{index}.{name}": shape for name, shape in _layer_tensors(layer, hidden, norm_tensors)}
    if spec.encoder is not None:
        encoder = spec.encoder
        shapes |= {f"{ENCODER}.{name}": shape for name, shape in encoder.tensors()}
        for index, layer in enumerate(encoder.layers):
            tensors = _layer_tensors(layer, encoder.hidden_size, norm_tensors)
            shapes |= {f"{ENCODER}.layers.{index}.{name}": shape for name, shape in tensors}
    if spec.has_final_norm:
        shapes |= {f"model.norm.{kind}": (hidden,) for kind in norm_tensors}
    if not spec.tie_word_embeddings and spec.head.scheme is None and spec.owns_head:
        shapes["lm_head.weight"] = (spec.head.num_outputs, hidden)
    if spec.input is not None:
        for name, rows in (("positions", spec.input.positions), ("token_types", spec.input.token_types)):
            shapes |= {f"model.{name}.weight": (rows, hidden)} if rows else {}
        shapes |= {f"model.embed_norm.{kind}": (hidden,) for kind in norm_tensors} if spec.input.norm else {}
    for stage in () if spec.pooler is None else spec.pooler.stages:
        shapes |= dict(stage.tensors())
    return shapes


def _layer_tensors(
    layer: LayerSpec, hidden_size: int, of_norms: Sequence[str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name in the layer and the shape of each tensor; `of_norms` are those of a norm, such as its weight."""
    yield from ((f"{norm}.{kind}", (hidden_size,)) for norm in layer.norms for kind in of_norms)
    for matrix in layer.matrices:
        yield from matrix.tensors()
    yield from layer.other_shapes.items()
    if layer.scalar is not None:
        yield layer.scalar, (1,)
    attention = layer.mixer
    if isinstance(attention, LayerAttention) and attention.head_norms:
        for name, heads in (("q_norm", attention.num_query_heads), ("k_norm", attention.num_key_heads)):
            if heads:
                width = attention.head_size * (heads if attention.joint_norms else 1)
                yield f"self_attn.{name}.weight", (width,)


def weight_bytes(spec: ModelSpec, dtype: str) -> int:
    """Return the bytes of all weights, of which those that are not quantized are in `dtype`."""
    element = DTYPE_BYTES[dtype]
    shapes = spec.tensor_shapes()
    dense = sum(math.prod(shape) for shape in shapes.values()) * element
    # These are in float32.
    others = sum(math.prod(shape) for layer in spec.layers for shape in layer.other_shapes.values())
    if spec.norms.wide:
        others += sum(math.prod(shape) for name, shape in shapes.items() if is_norm(name))
    for stage in () if spec.pooler is None else spec.pooler.stages:
        others += sum(math.prod(shape) for _, shape in stage.tensors())
    dense += others * (DTYPE_BYTES["float32"] - element)
    matrices = spec.quantized_matrices()
    return dense + sum(scheme.nbytes(outputs, inputs, element) for scheme, outputs, inputs in matrices)
