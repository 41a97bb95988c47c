"""Scales of an FP8 KV cache in checkpoints: by layer one for keys, one for values, and possibly one for queries."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from phonograph.errors import WeightError
from phonograph.models.spec import ModelSpec

# Names that quantizers write. Quark calls the scale of keys the `output_scale` of their projection; TensorRT-LLM has
# one factor for keys and values.
_NAMES = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?P<projection>q|k|v)_proj\.output_scale|(?P<both>kv_cache_scaling_factor)"
    r"|(?:attn\.)?(?:q_proj\.(?P<q>q)|k_proj\.(?P<k>k)|v_proj\.(?P<v>v)|(?P<any>q|k|v|kv))_scale)"
)
_UNUSED = re.compile(r"model\.layers\.\d+\.self_attn\.(?:(?:attn\.)?prob_scale|prob_output_scale)")
"""Scales of attention probabilities, for kernels that round these to FP8 with a fixed scale. No kernel here does."""


@dataclass(slots=True)
class KVScales:
    """Scales of stored keys and values, and of rounded queries: float32 [K] by layer, if the checkpoint has them.

    `sources` has tensor and file of each scale, by "keys", "values" or "queries" and layer.
    """

    keys: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    values: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    queries: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    sources: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])

    def take(self, name: str, tensor: torch.Tensor, file: Path, spec: ModelSpec, device: torch.device) -> None:
        """Add a tensor that `is_kv_scale`. Of scales for each query head, a KV head gets the largest of its group.

        Raises:
            WeightError: it is neither one number nor one for each head; a number is not finite and positive; or another
                tensor has the same scale.
        """
        match = _NAMES.fullmatch(name)
        assert match is not None
        which = "kv" if match["both"] else next(filter(None, match.group("projection", "q", "k", "v", "any")))
        layer = int(match["layer"])
        attentions = spec.attentions
        attention = attentions.get(layer, attentions[max(attentions)])
        num_heads = attention.num_kv_heads
        per_query_head = which == "q" and tensor.numel() == attention.num_query_heads
        if tensor.numel() not in (1, num_heads) and not per_query_head:
            heads = f"{num_heads} KV heads" + (f" or {attention.num_query_heads} query heads" if which == "q" else "")
            raise WeightError(
                f"tensor {name} has {tensor.numel()} numbers; a scale has one number, or one for each of {heads}"
            )
        scale = tensor.float().reshape(-1)
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise WeightError(f"tensor {name} is {scale.tolist()}; scales must be finite and above 0")
        scale = scale.view(num_heads, -1).amax(1) if per_query_head else scale.expand(num_heads)
        scale = scale.contiguous().to(device)
        for letter, part, scales in (
            ("q", "queries", self.queries),
            ("k", "keys", self.keys),
            ("v", "values", self.values),
        ):
            if letter not in which:
                continue
            source = self.sources.setdefault((part, layer), f"{name} in {file}")
            if layer in scales:
                raise WeightError(
                    f"tensor {name} in {file} and tensor {source} both scale the {part} of layer {layer} in an FP8 KV "
                    "cache; remove one"
                )
            scales[layer] = scale

    def check(self, spec: ModelSpec) -> None:
        """Check that all layers have scales for keys and values, or none has any; and the same for queries.

        Layers that read another's keys and values need none for these.

        Raises:
            WeightError: only some have.
        """
        layers = set(spec.attentions)
        writers = {index for index, attention in spec.attentions.items() if attention.kv_layer is None}
        for name, scales, wanted, needed in (
            ("keys", self.keys, self.keys or self.values, writers),
            ("values", self.values, self.keys, writers),
            ("queries", self.queries, self.queries, layers),
        ):
            if wanted and not needed <= scales.keys() <= layers:
                absent = sorted(needed - scales.keys())
                problem = f"none for the {name} of layer {absent[0]}" if absent else f"some for layer {max(scales)}"
                raise WeightError(f"the checkpoint has scales of an FP8 KV cache, but {problem}; it is incomplete")

    def keep(self, heads: Callable[[int], slice]) -> None:
        """Keep the scales of some KV heads of each layer only."""
        for scales in (self.keys, self.values, self.queries):
            for layer, scale in scales.items():
                scales[layer] = scale[heads(layer)].contiguous()


def is_kv_scale(name: str) -> bool:
    """Return True for the name of a scale of the KV cache."""
    return _NAMES.fullmatch(name) is not None


def is_unused_scale(name: str) -> bool:
    """Return True for the name of a scale of values that no kernel here rounds, so that it has no effect."""
    return _UNUSED.fullmatch(name) is not None
